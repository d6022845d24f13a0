"""Arrangements of HF tensors in one parameter, and how Megatron and the engine divide it over their ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.model.pieces import Piece, Shape, crop

# SGLang pads the embedding and the output layer to a multiple of this many rows.
ENGINE_VOCAB_MULTIPLE = 64


def _divided(shape: Shape, axis: int | None, parts: int) -> Shape:
    """Return the shape of each part of a tensor that is cut into `parts` equal parts along `axis`.

    shape: shape of the whole tensor.
    axis: axis along which the tensor is cut. None: every part is the whole tensor.
    """
    return tuple(size // parts if dimension == axis else size for dimension, size in enumerate(shape))


def _part(hf: str, shape: Shape, axis: int | None, parts: int, rank: int) -> Piece:
    """Return the part of an HF tensor that rank `rank` has, if the tensor is cut into `parts` equal parts.

    The result is a rectangle of the HF tensor that fills the rank's whole parameter.

    hf: name of the HF tensor.
    shape: shape of the HF tensor.
    axis: axis along which the tensor is cut. None: every part is the whole tensor.
    """
    part = _divided(shape, axis, parts)
    start = tuple(rank * size if dimension == axis else 0 for dimension, size in enumerate(part))
    return Piece(hf, start, part, (0,) * len(shape))


@dataclass(frozen=True)
class Plain:
    """Layout of a parameter that is one HF tensor, split into equal parts along one axis.

    This is also the base class of all layouts. `shape` and `pieces` describe a shard in Megatron.
    `engine_shape` and `engine_pieces` describe a shard in SGLang. Pieces are rectangles of HF tensors
    (model.pieces). The arguments of the methods are:

    hf: names of the HF tensors.
    shapes: full shapes of these tensors.
    axis: axis along which the parameter is split; None: the parameter is not split.
    parts: number of shards.
    rank: index of the shard, from 0.
    """

    def shape(self, shapes: tuple[Shape, ...], axis: int | None, parts: int) -> Shape:
        return _divided(shapes[0], axis, parts)

    def pieces(
        self, hf: tuple[str, ...], shapes: tuple[Shape, ...], axis: int | None, parts: int, rank: int
    ) -> list[Piece]:
        return [_part(hf[0], shapes[0], axis, parts, rank)]

    def engine_shape(self, shapes: tuple[Shape, ...], axis: int | None, parts: int) -> Shape:
        return self.shape(shapes, axis, parts)

    def engine_pieces(
        self, hf: tuple[str, ...], shapes: tuple[Shape, ...], axis: int | None, parts: int, rank: int
    ) -> list[Piece]:
        return self.pieces(hf, shapes, axis, parts, rank)


def stacked(pieces: Iterable[Piece]) -> list[Piece]:
    """Place pieces (rectangles of HF tensors) one below the other in a rank's parameter, in the given order.

    Returns copies of the pieces with the new positions (`Piece.at`), which begin at row 0.
    """
    found, row = [], 0
    for piece in pieces:
        found.append(Piece(piece.hf, piece.start, piece.shape, (row, *piece.at[1:])))
        row += piece.shape[0]
    return found


@dataclass(frozen=True)
class GateUp(Plain):
    """Layout of the gate and up projections of an MLP, [f, h] each, fused into one parameter [2f, h].

    Each rank has an equal share of the rows of both projections, with the gate's rows first.
    """

    def shape(self, shapes, axis, parts):
        return _divided((sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        return stacked(_part(name, shape, 0, parts, rank) for name, shape in zip(hf, shapes, strict=True))


@dataclass(frozen=True)
class InterleavedGateUp(GateUp):
    """Layout of GateUp if the engine's parameter has a gate row, an up row, a gate row, and so on.

    The engine's side is described as [2, f, ...]: the gate's rows, then those of the up projection. An
    engine presents its interleaved parameter [2f, ...] as a view of this shape.
    """

    def engine_shape(self, shapes, axis, parts):
        return (2, *_divided(shapes[0], 0, parts))

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        whole = (_part(name, shape, 0, parts, rank) for name, shape in zip(hf, shapes, strict=True))
        return [Piece(p.hf, p.start, p.shape, (half, *p.at)) for half, p in enumerate(whole)]


@dataclass(frozen=True)
class QKV(Plain):
    """Layout of the projections of queries, keys and values, fused into one parameter.

    HF: three tensors, q [heads·d, h], and k and v [kv_heads·d, h].
    Megatron: one tensor [(heads + 2 kv_heads)·d, h], ordered by query group. A group has its query heads,
        its key head and its value head. The rows are cut into equal parts, one per rank. If there are more
        ranks than groups, a part is only a portion of a group.
    SGLang: on each rank the rank's queries, then its keys, then its values. If there are more ranks than KV
        heads, several ranks have the same KV head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def shape(self, shapes, axis, parts):
        return _divided((sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        grouped = []
        for group in range(self.num_kv_heads):
            grouped += self._queries(hf[0], shapes[0], group)
            grouped += [_part(hf[i], shapes[i], 0, self.num_kv_heads, group) for i in (1, 2)]
        rows = self.shape(shapes, axis, parts)[0]
        return crop(stacked(grouped), rank * rows, rows)

    def _queries(self, hf: str, shape: Shape, group: int) -> list[Piece]:
        """Return the pieces of a query group's queries, in Megatron's order."""
        return [_part(hf, shape, 0, self.num_kv_heads, group)]

    def engine_shape(self, shapes, axis, parts):
        queries = shapes[0][0] // parts
        return (queries + 2 * max(1, self.num_kv_heads // parts) * self.head_dim, *shapes[0][1:])

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        kv_parts = min(parts, self.num_kv_heads)
        of = ((parts, rank), *[(kv_parts, rank * kv_parts // parts)] * 2)
        return stacked(_part(hf[i], shapes[i], 0, *of[i]) for i in range(3))


@dataclass(frozen=True)
class OfHeads(Plain):
    """Layout of a vector with an equal part for each head, such as a norm's weight over all heads.

    SGLang: if there are more ranks than heads, several ranks have the same head's part.
    """

    num_heads: int

    def engine_shape(self, shapes, axis, parts):
        return self.shape(shapes, axis, min(parts, self.num_heads))

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        own = min(parts, self.num_heads)
        return self.pieces(hf, shapes, axis, own, rank * own // parts)


@dataclass(frozen=True)
class GatedQKV(QKV):
    """Layout of QKV if q also has the rows of an output gate, as many as queries: [2 heads·d, h].

    HF and SGLang: a query head's rows, then its gate's rows, then those of the next head.
    Megatron: in each query group all query heads, then their gates, then the key head and the value head.
    """

    def _queries(self, hf, shape, group):
        per_group = self.num_heads // self.num_kv_heads
        heads = range(group * per_group, (group + 1) * per_group)
        rows = [2 * head + gate for gate in range(2) for head in heads]
        return [_part(hf, shape, 0, 2 * self.num_heads, row) for row in rows]


@dataclass(frozen=True)
class Sections(Plain):
    """Layout of a parameter that consists of sections of rows, of which every rank has equal shares.

    A rank has its share of the first section, then of the second section, and so on.

    sections: for each section, its items (i, first, count): `count` rows of HF tensor i, from `first` on.
    """

    sections: tuple[tuple[tuple[int, int, int], ...], ...]

    def shape(self, shapes, axis, parts):
        rows = sum(count for section in self.sections for *_, count in section)
        return _divided((rows, *shapes[0][1:]), 0, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        found = []
        for section in self.sections:
            whole = []
            for i, first, count in section:
                start = (0,) * len(shapes[i])
                whole.append(Piece(hf[i], (first, *start[1:]), (count, *shapes[i][1:]), start))
            rows = sum(count for *_, count in section) // parts
            found += crop(stacked(whole), rank * rows, rows)
        return stacked(found)


@dataclass(frozen=True)
class Vocab(Plain):
    """Layout of the embedding or the output layer, padded with zero rows.

    The padding gives all ranks the same number of rows: Megatron pads to a multiple of the number of shards,
    SGLang to a multiple of ENGINE_VOCAB_MULTIPLE.
    """

    def shape(self, shapes, axis, parts):
        words, *rest = shapes[0]
        return (padded_to(words, parts) // parts, *rest)

    def pieces(self, hf, shapes, axis, parts, rank):
        rows = self.shape(shapes, axis, parts)[0]
        return self._rows(hf, shapes, rows, rank)

    def engine_shape(self, shapes, axis, parts):
        words, *rest = shapes[0]
        return (padded_to(words, ENGINE_VOCAB_MULTIPLE) // parts, *rest)

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return self._rows(hf, shapes, self.engine_shape(shapes, axis, parts)[0], rank)

    @staticmethod
    def _rows(hf, shapes, rows: int, rank: int) -> list[Piece]:
        return crop([_part(hf[0], shapes[0], None, 1, 0)], rank * rows, rows)


@dataclass(frozen=True)
class UndividedVocab(Vocab):
    """Layout of Vocab if every rank of the engine has the whole embedding, without padding, as in Gemma 3."""

    def engine_shape(self, shapes, axis, parts):
        return shapes[0]

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return [_part(hf[0], shapes[0], None, 1, 0)]


@dataclass(frozen=True)
class OfFirstRank(Plain):
    """Layout of a bias that only the first engine rank has. On the other ranks it is zero.

    SGLang adds up the outputs of all ranks that share an expert, with their biases.
    """

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return self.pieces(hf, shapes, axis, parts, rank) if rank == 0 else []

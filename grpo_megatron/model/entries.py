"""One parameter in all three name spaces, HF, Megatron and engine, and which rectangles of it lie on which rank.

Import, export, weight sync, reference weights and conversion read these entries and nothing else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.config.engine import EngineConfig, Quantization
from grpo_megatron.model.pieces import Piece, Shape, crop

# SGLang pads embedding and output layer to a multiple of this many words.
ENGINE_VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class EngineLayout:
    """How an SGLang engine divides a model over its ranks.

    tp: its ranks. ep: parts that the experts of a layer are divided into; each part is on tp / ep ranks, over which every expert's
    matrices are split. attention_dp: groups of neighbouring ranks that each have the whole of every attention layer and of the
    token embedding, and split it over their tp / attention_dp ranks. fp8: linear layers have FP8 weights with scales, see
    model.block_scaled.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    fp8: bool = False

    @classmethod
    def from_config(cls, engine: EngineConfig) -> "EngineLayout":
        fp8 = engine.quantization == Quantization.fp8
        return cls(engine.tensor_parallel, engine.expert_parallel, engine.data_parallel_attention, fp8)

    @property
    def attention_tp(self) -> int:
        return self.tp // self.attention_dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep


def _divided(shape: Shape, axis: int | None, parts: int) -> Shape:
    """The shape of one of equal parts along `axis`; None: every part is the whole."""
    return tuple(size // parts if dimension == axis else size for dimension, size in enumerate(shape))


def _part(hf: str, shape: Shape, axis: int | None, parts: int, rank: int) -> Piece:
    """One of equal parts of a tensor, alone in its parameter."""
    part = _divided(shape, axis, parts)
    start = tuple(rank * size if dimension == axis else 0 for dimension, size in enumerate(part))
    return Piece(hf, start, part, (0,) * len(shape))


@dataclass(frozen=True)
class Plain:
    """One tensor, the same on both sides; split in equal parts along the sharded axis.

    Every kind answers four questions. hf, shapes: the HF tensors and their full shapes. axis: the sharded axis. parts, rank: of
    how many shards, and which one. `shape` and `pieces` are of Megatron's shard, `engine_shape` and `engine_pieces` of SGLang's.
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
    """The same pieces one below the other in one parameter."""
    found, row = [], 0
    for piece in pieces:
        found.append(Piece(piece.hf, piece.start, piece.shape, (row, *piece.at[1:])))
        row += piece.shape[0]
    return found


@dataclass(frozen=True)
class GateUp(Plain):
    """gate and up projections [f, h] each -> one [2f, h], gate first; each rank has its part of both."""

    def shape(self, shapes, axis, parts):
        return _divided((sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        return stacked(_part(name, shape, 0, parts, rank) for name, shape in zip(hf, shapes, strict=True))


@dataclass(frozen=True)
class QKV(Plain):
    """q, k, v projections -> one.

    HF: q [heads·d, h], k and v [kv_heads·d, h]. Megatron: [(heads + 2 kv_heads)·d, h], ordered by query group (its queries, its
    key, its value) and cut into equal parts, which hold whole groups unless there are more ranks than groups. SGLang: a rank's
    queries, then its keys, then its values; where there are more ranks than KV heads, several ranks have the same one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def shape(self, shapes, axis, parts):
        return _divided((sum(rows for rows, *_ in shapes), *shapes[0][1:]), 0, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        grouped = [
            _part(hf[i], shapes[i], 0, self.num_kv_heads, group)
            for group in range(self.num_kv_heads)
            for i in range(3)
        ]
        rows = self.shape(shapes, axis, parts)[0]
        return crop(stacked(grouped), rank * rows, rows)

    def engine_shape(self, shapes, axis, parts):
        heads = self.num_heads // parts + 2 * max(1, self.num_kv_heads // parts)
        return (heads * self.head_dim, *shapes[0][1:])

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        kv_parts = min(parts, self.num_kv_heads)
        of = ((parts, rank), *[(kv_parts, rank * kv_parts // parts)] * 2)
        return stacked(_part(hf[i], shapes[i], 0, *of[i]) for i in range(3))


@dataclass(frozen=True)
class Vocab(Plain):
    """Rows beyond the vocabulary, which are zero, make the number of rows divisible by that of the ranks."""

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
class Expert:
    """The number of an expert, and of how many in its layer."""

    number: int
    count: int


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter.

    hf: the HF tensors it is made of. shapes: of each of them. megatron: its name with global layer and expert numbers. axis: the
    axis split over TP (an expert's over expert-tensor parallel ranks), None if every rank has all of it. engine, engine_axis: the
    same in the engine. engine_row: where several Megatron parameters share one of the engine's, the first row of this one in it.
    exported is False for a second copy (the tied embedding on the last pipeline stage). expert: whose parameter it is, which only
    the ranks that hold this expert have; in the engine, one of a stack. float32: it is a buffer, which is in float32 everywhere,
    whatever the dtype of the parameters. attention: in the engine it is divided as attention layers are. engine_dtype: in the engine,
    where that is not the dtype which the engine computes in.
    """

    hf: tuple[str, ...]
    shapes: tuple[Shape, ...]
    megatron: str
    axis: int | None
    engine: str
    engine_axis: int | None
    kind: Plain = Plain()
    exported: bool = True
    expert: Expert | None = None
    engine_row: int = 0
    float32: bool = False
    attention: bool = False
    engine_dtype: torch.dtype | None = None

    def megatron_shape(self, parts: int) -> Shape:
        """Of one rank's shard if there are `parts` of them."""
        return self.kind.shape(self.shapes, self.axis, parts)

    def megatron_pieces(self, parts: int, rank: int) -> list[Piece]:
        """What shard `rank` of `parts` is made of; what it has beyond that is padding."""
        return self.kind.pieces(self.hf, self.shapes, self.axis, parts, rank)

    def engine_shape(self, layout: EngineLayout) -> Shape:
        """Of the engine's parameter on each of its ranks, for engines that store what the checkpoint stores."""
        rows, *rest = self.kind.engine_shape(self.shapes, self.engine_axis, self.engine_parts(layout))
        if self.expert:
            return (self.expert.count // layout.ep, rows, *rest)
        return (self.engine_row + rows, *rest)

    def engine_pieces(self, layout: EngineLayout, rank: int) -> list[Piece]:
        """What of the engine's parameter comes from this entry on TP rank `rank` of the engine."""
        parts = self.engine_parts(layout)
        if self.expert is None:
            pieces = self.kind.engine_pieces(self.hf, self.shapes, self.engine_axis, parts, rank % parts)
            return [Piece(p.hf, p.start, p.shape, (self.engine_row + p.at[0], *p.at[1:])) for p in pieces]
        ep_rank, part = divmod(rank, parts)
        holder, number = divmod(self.expert.number, self.expert.count // layout.ep)
        if holder != ep_rank:
            return []
        pieces = self.kind.engine_pieces(self.hf, self.shapes, self.engine_axis, parts, part)
        return [Piece(p.hf, p.start, p.shape, (number, *p.at)) for p in pieces]

    def engine_parts(self, layout: EngineLayout) -> int:
        """What the engine divides each of its matrices into."""
        if self.expert:
            return layout.moe_tp
        return layout.attention_tp if self.attention else layout.tp

    @property
    def numel(self) -> int:
        """Elements of the full HF tensors."""
        return sum(prod(shape) for shape in self.shapes)


def hf_shapes(entries: dict[str, Entry]) -> dict[str, Shape]:
    """{HF tensor: its full shape} of all that a weight map reads."""
    return {
        name: shape for entry in entries.values() for name, shape in zip(entry.hf, entry.shapes, strict=True)
    }


def engine_shapes(entries: Iterable[Entry], layout: EngineLayout) -> dict[str, Shape]:
    """{engine's parameter: its shape on each rank}."""
    shapes: dict[str, Shape] = {}
    for entry in entries:
        if entry.exported:
            shape = entry.engine_shape(layout)
            # Of several entries in one parameter, the last one reaches to its end.
            shapes[entry.engine] = max(shape, shapes.get(entry.engine, shape))
    return shapes


def engine_stacks(entries: Iterable[Entry]) -> dict[str, str]:
    """{HF tensor: engine's parameter} of those that several Megatron parameters are stacked in, experts left out."""
    stacked = {entry.engine for entry in entries if entry.engine_row}
    return {hf: entry.engine for entry in entries if entry.engine in stacked for hf in entry.hf}

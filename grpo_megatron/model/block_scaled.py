"""Weight map entries for engines whose linear layers have FP8 weights with one scale per block.

A block has 128 x 128 elements. The engine has two parameters for each weight: the FP8 elements and the
scales. Each of the two has its own entry in the weight map.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from grpo_megatron.model.adapters import is_adapter
from grpo_megatron.model.arrangement import Plain, stacked
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.pieces import Piece, Shape

# Rows and columns of a block.
BLOCK = 128


def is_block_scaled(entry: Entry) -> bool:
    """Return True if a weight map entry is a linear layer's weight, which an FP8 engine stores in FP8.

    LoRA adapters of the layer are not: the engine stores them in the dtype in which it computes.
    """
    is_weight = ".linear_" in entry.megatron and len(entry.shapes[0]) == 2
    return is_weight and not is_adapter(entry.megatron)


def elements_name(megatron: str) -> str:
    return f"{megatron}.fp8"


def scales_name(megatron: str) -> str:
    return f"{megatron}.fp8_scales"


def elements(entry: Entry) -> Entry:
    """Return the weight map entry of a weight's FP8 elements (float8_e4m3fn).

    An entry says how a parameter is named and sharded in Hugging Face files, Megatron and the engine. In this
    entry, the rows of each HF tensor are together on a trainer rank. In Megatron's own weight, the rows of
    several HF tensors can be interleaved.

    entry: entry of the weight.
    """
    return replace(
        entry,
        megatron=elements_name(entry.megatron),
        kind=_ByTensor(entry.kind),
        engine_dtype=torch.float8_e4m3fn,
    )


def scales(entry: Entry) -> Entry:
    """Return the weight map entry of a weight's block scales, float32 [rows / 128, columns / 128].

    An entry says how a parameter is named and sharded in Hugging Face files, Megatron and the engine. A value
    of the weight is its FP8 element times the scale of its 128 x 128 block.

    entry: entry of the weight.

    Raises ValueError if rows or columns of an HF tensor are not divisible by 128.
    """
    return replace(
        entry,
        hf=tuple(f"{name}_scale_inv" for name in entry.hf),
        shapes=tuple(_in_blocks(shape, entry.hf[0]) for shape in entry.shapes),
        megatron=scales_name(entry.megatron),
        engine=f"{entry.engine}_scale_inv",
        engine_row=_in_blocks((entry.engine_row,), entry.hf[0])[0],
        kind=_Scales(_ByTensor(entry.kind)),
        engine_dtype=torch.float32,
    )


def stacked_by_tensor(pieces: Iterable[Piece]) -> list[Piece]:
    """Reorder a shard's rows so that the rows of each HF tensor are together. Return the reordered pieces.

    Quantisation needs this order, because a block consists of neighbouring rows of one HF tensor. Megatron's
    shard can interleave rows of several HF tensors. In the shard of QKV, for example, each query group has
    rows of q, k and v.

    pieces: rectangles of HF tensors that make up the shard, with their positions in the shard (model.pieces).
    """
    whole: dict[str, Piece] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        before = whole.setdefault(piece.hf, piece)
        if before is not piece:
            whole[piece.hf] = replace(before, shape=(before.shape[0] + piece.shape[0], *before.shape[1:]))
    return stacked(whole.values())


def cut_blocks(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces of a shard that do not consist of whole 128 x 128 blocks, for an error message.

    A piece consists of whole blocks if it begins and ends at a block's edge in the HF tensor, and begins at a
    multiple of 128 in the rank's shard.

    pieces: rectangles of HF tensors that make up a rank's shard (model.pieces).
    """
    return [p for p in pieces if any(size % BLOCK for size in (*p.start, *p.shape, *p.at[-2:]))]


def _in_blocks(sizes: Shape, hf: str) -> Shape:
    if any(size % BLOCK for size in sizes):
        raise ValueError(f"{hf}: the shape {sizes} is not divisible by the FP8 block size {BLOCK}")
    return tuple(size // BLOCK for size in sizes)


@dataclass(frozen=True)
class _ByTensor(Plain):
    """Layout of a weight's FP8 elements.

    In the engine, the elements have the same layout as the weight. On a trainer rank, the rows of each HF
    tensor are together, while the weight's own layout can interleave rows of several HF tensors.

    kind: layout of the weight.
    """

    kind: Plain

    def shape(self, shapes, axis, parts):
        return self.kind.shape(shapes, axis, parts)

    def pieces(self, hf, shapes, axis, parts, rank):
        return stacked_by_tensor(self.kind.pieces(hf, shapes, axis, parts, rank))

    def engine_shape(self, shapes, axis, parts):
        return self.kind.engine_shape(shapes, axis, parts)

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return self.kind.engine_pieces(hf, shapes, axis, parts, rank)


@dataclass(frozen=True)
class _Scales(Plain):
    """Layout of a weight's block scales: the layout of the elements, with all sizes divided by 128.

    The methods raise ValueError if a shard would cut a block.

    kind: layout of the elements.
    """

    kind: Plain

    @staticmethod
    def _of_elements(shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
        return tuple(tuple(size * BLOCK for size in shape) for shape in shapes)

    def shape(self, shapes, axis, parts):
        return _in_blocks(self.kind.shape(self._of_elements(shapes), axis, parts), "the shard")

    def pieces(self, hf, shapes, axis, parts, rank):
        return [self._scaled(p) for p in self.kind.pieces(hf, self._of_elements(shapes), axis, parts, rank)]

    def engine_shape(self, shapes, axis, parts):
        return _in_blocks(
            self.kind.engine_shape(self._of_elements(shapes), axis, parts), "the engine's shard"
        )

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return [
            self._scaled(p) for p in self.kind.engine_pieces(hf, self._of_elements(shapes), axis, parts, rank)
        ]

    @staticmethod
    def _scaled(piece: Piece) -> Piece:
        return Piece(
            piece.hf, *(_in_blocks(sizes, piece.hf) for sizes in (piece.start, piece.shape, piece.at))
        )

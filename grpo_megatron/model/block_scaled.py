"""Matrices that an engine holds in FP8 with a scale for each block: two of its parameters in place of one, both cut from HF tensors."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from grpo_megatron.model.entries import EngineLayout, Entry, Plain, stacked
from grpo_megatron.model.pieces import Piece, Shape

# Rows, and columns, of a block.
BLOCK = 128


def is_block_scaled(entry: Entry) -> bool:
    """Whether it is the weight of a linear layer, which are what engines in FP8 have in FP8."""
    return ".linear_" in entry.megatron and len(entry.shapes[0]) == 2


def elements_name(megatron: str) -> str:
    return f"{megatron}.fp8"


def scales_name(megatron: str) -> str:
    return f"{megatron}.fp8_scales"


def engine_entries(entries: Iterable[Entry], layout: EngineLayout) -> list[Entry]:
    """Those of all parameters of an engine. One in FP8 has two for the weight of a linear layer: elements, and scales."""
    found = []
    for entry in entries:
        found += [elements(entry), scales(entry)] if layout.fp8 and is_block_scaled(entry) else [entry]
    return found


def elements(entry: Entry) -> Entry:
    """Of the elements float8_e4m3fn. On the trainer's rank they lie as `stacked_by_tensor` says."""
    return replace(
        entry,
        megatron=elements_name(entry.megatron),
        kind=_ByTensor(entry.kind),
        engine_dtype=torch.float8_e4m3fn,
    )


def scales(entry: Entry) -> Entry:
    """Of what elements are multiplied with, float32 [rows / 128, columns / 128]."""
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
    """A rank's rows of each HF tensor lie together, one tensor below the other, whatever lies between them in Megatron's shard.

    Blocks are of an HF tensor's rows, and Megatron has those of one between those of others (QKV, by query groups).
    """
    whole: dict[str, Piece] = {}
    for piece in sorted(pieces, key=lambda piece: piece.start):
        before = whole.setdefault(piece.hf, piece)
        if before is not piece:
            whole[piece.hf] = replace(before, shape=(before.shape[0] + piece.shape[0], *before.shape[1:]))
    return stacked(whole.values())


def cut_blocks(pieces: Iterable[Piece]) -> list[Piece]:
    """Those of the pieces that do not consist of whole blocks, on either side."""
    return [p for p in pieces if any(size % BLOCK for size in (*p.start, *p.shape, *p.at[-2:]))]


def _in_blocks(sizes: Shape, hf: str) -> Shape:
    if any(size % BLOCK for size in sizes):
        raise ValueError(f"{hf}: {sizes} cuts a block of {BLOCK} x {BLOCK}")
    return tuple(size // BLOCK for size in sizes)


@dataclass(frozen=True)
class _ByTensor(Plain):
    """In the engine as of `kind`."""

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
    """`kind` is of the elements, and all here is in units of blocks. Raises ValueError where a block is cut."""

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

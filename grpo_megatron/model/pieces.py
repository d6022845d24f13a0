"""Rectangles that map a part of a local tensor to a part of a Hugging Face (HF) tensor.

A local tensor is a rank's shard in the trainer or in an engine. All layouts describe their shards in the
coordinates of the HF tensors, so that weights can be copied between any two layouts.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

Shape = tuple[int, ...]


def box(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """Return the index that selects a rectangle of a tensor: one slice per dimension.

    start: first index in each dimension.
    shape: size in each dimension.
    """
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Piece:
    """A rectangle of an HF tensor, and its position in a local tensor such as a rank's shard.

    hf[start : start + shape] has the same values as local[at : at + shape]. If `at` has more dimensions than
    `start`, the leading dimensions are indices, such as the index of an expert in a stack of experts.

    hf: name of the HF tensor.
    start: first index of the rectangle in the HF tensor.
    shape: shape of the rectangle.
    at: first index of the rectangle in the local tensor.
    """

    hf: str
    start: Shape
    shape: Shape
    at: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return a view of this piece's part of the tensor `local`: the rectangle that begins at `at`."""
        return _view(local, self.at, self.shape)


def _view(tensor: torch.Tensor, at: Shape, shape: Shape) -> torch.Tensor:
    lead = len(at) - len(shape)
    return tensor[(*at[:lead], *box(at[lead:], shape))]


def crop(pieces: Iterable[Piece], first: int, rows: int) -> list[Piece]:
    """Return the pieces (rectangles of HF tensors) of some rows of a local tensor, as a tensor of their own.

    This cuts one rank's shard out of a larger tensor. Pieces outside these rows are left out, and pieces that
    are partly outside are cut. The positions of the returned pieces count from row `first`.

    pieces: rectangles of HF tensors that make up the larger tensor.
    first: index of the shard's first row in the larger tensor.
    rows: number of rows of the shard.
    """
    kept = []
    for piece in pieces:
        low, high = max(piece.at[0], first), min(piece.at[0] + piece.shape[0], first + rows)
        if low < high:
            start = (piece.start[0] + low - piece.at[0], *piece.start[1:])
            kept.append(
                replace(
                    piece, start=start, shape=(high - low, *piece.shape[1:]), at=(low - first, *piece.at[1:])
                )
            )
    return kept


@dataclass(frozen=True)
class Move:
    """A copy of values between two local tensors, such as shards. The values are a rectangle of an HF tensor.

    source[source_at : source_at + shape] is copied to target[target_at : target_at + shape]. The copied
    values are hf[start : start + shape].
    """

    hf: str
    """Name of the HF tensor."""
    start: Shape
    """First index of the rectangle in the HF tensor."""
    shape: Shape
    """Shape of the rectangle."""
    source_at: Shape
    """First index in the source tensor."""
    target_at: Shape
    """First index in the target tensor."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the values in the source tensor."""
        return _view(tensor, self.source_at, self.shape)

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the place in the target tensor to which the values are copied."""
        return _view(tensor, self.target_at, self.shape)


def moves(sources: Iterable[Piece], targets: Iterable[Piece]) -> list[Move]:
    """Return the copies that fill the target pieces with values of the source pieces.

    A piece is a rectangle of an HF tensor, with its position in a local tensor such as a shard. There is one
    copy for each pair of a source and a target that overlap in the same HF tensor. The copies are in the
    order of the targets.
    """
    by_name = defaultdict(list)
    for source in sources:
        by_name[source.hf].append(source)
    return [move for target in targets for source in by_name[target.hf] if (move := _common(source, target))]


def _common(source: Piece, target: Piece) -> Move | None:
    start, shape = [], []
    for first, size, other_first, other_size in zip(
        source.start, source.shape, target.start, target.shape, strict=True
    ):
        low, high = max(first, other_first), min(first + size, other_first + other_size)
        if low >= high:
            return None
        start.append(low)
        shape.append(high - low)
    return Move(source.hf, tuple(start), tuple(shape), _shifted(source, start), _shifted(target, start))


def _shifted(piece: Piece, start: list[int]) -> Shape:
    lead = len(piece.at) - len(start)
    inner = zip(piece.at[lead:], start, piece.start, strict=True)
    return (*piece.at[:lead], *(at + low - first for at, low, first in inner))

"""Rectangles that an HF tensor and a local tensor share; HF's coordinates are where all layouts meet."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import torch

Shape = tuple[int, ...]


def box(start: Shape, shape: Shape) -> tuple[slice, ...]:
    """The index of a rectangle."""
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


@dataclass(frozen=True)
class Piece:
    """hf[start : start + shape] of an HF tensor is local[at : at + shape] of a parameter, or of its shard.

    `at` may have more dimensions than `start`: those in front are indices, such as an expert's in a stack of them.
    """

    hf: str
    start: Shape
    shape: Shape
    at: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of the local tensor that holds this piece."""
        return _view(local, self.at, self.shape)


def _view(tensor: torch.Tensor, at: Shape, shape: Shape) -> torch.Tensor:
    lead = len(at) - len(shape)
    return tensor[(*at[:lead], *box(at[lead:], shape))]


def crop(pieces: Iterable[Piece], first: int, rows: int) -> list[Piece]:
    """What is left of the pieces if only `rows` rows of the local tensor stay, from row `first`."""
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
    """source[source_at : + shape] of one local tensor is target[target_at : + shape] of another; both are hf[start : + shape]."""

    hf: str
    start: Shape
    shape: Shape
    source_at: Shape
    target_at: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        return _view(tensor, self.source_at, self.shape)

    def target(self, tensor: torch.Tensor) -> torch.Tensor:
        return _view(tensor, self.target_at, self.shape)


def moves(sources: Iterable[Piece], targets: Iterable[Piece]) -> list[Move]:
    """Everything that both have, as rectangles that go from one to the other; in the order of the targets."""
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

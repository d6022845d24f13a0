"""Where in a Megatron checkpoint each HF tensor lies; megatron/saved_model.py asks the model itself for it."""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from grpo_megatron.model.pieces import Piece, Shape


@dataclass(frozen=True)
class SavedPart:
    """One parameter, or one of the parts that Megatron saves it in: key[at : at + shape] of the checkpoint.

    shape has the dimensions of the whole tensor, with ones for indices such as the layer's. full: the shape of the whole tensor. pieces:
    the HF rectangles it is made of, their `at` within the whole tensor. dtype: of what has the same in every precision, such as a
    bias of routers; None: that of the model's parameters. padded: the size depends on the layout that saved it.
    """

    key: str
    full: Shape
    dtype: torch.dtype | None
    at: Shape
    shape: Shape
    pieces: tuple[Piece, ...]
    padded: bool


@dataclass(frozen=True)
class SavedModel:
    """parts: of all parameters. objects: {key: bytes} of what Megatron stores beside them."""

    parts: list[SavedPart]
    objects: dict[str, bytes]


def clipped(piece: Piece, at: Shape, shape: Shape) -> Piece | None:
    """What of a piece lies in local[at : at + shape], with `at` of the piece counted from there; None if nothing does."""
    lead = len(piece.at) - len(piece.shape)
    low = np.maximum(piece.at, at)
    size = np.minimum(np.add(piece.at, (1,) * lead + piece.shape), np.add(at, shape)) - low
    if (size <= 0).any():
        return None
    start = np.add(piece.start, (low - piece.at)[lead:])
    return Piece(piece.hf, tuple(start.tolist()), tuple(size[lead:].tolist()), tuple((low - at).tolist()))


def rows_within(shape: Shape, itemsize: int, limit: int, multiple: int = 1) -> list[tuple[Shape, Shape]]:
    """A tensor cut along its first dimension that is not 1: [(start, shape)] of at most `limit` bytes, and at least `multiple` rows."""
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        return [((0,) * len(shape), tuple(shape))]
    row = prod(shape[axis + 1 :]) * itemsize
    step = max(limit // row // multiple, 1) * multiple
    return [
        (
            tuple(first if i == axis else 0 for i in range(len(shape))),
            (*shape[:axis], min(step, shape[axis] - first), *shape[axis + 1 :]),
        )
        for first in range(0, shape[axis], step)
    ]

"""The location of each HF tensor in a Megatron checkpoint.

megatron/state/model_layout.py builds these records from the model itself.
"""

from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from grpo_megatron.model.pieces import Piece, Shape


@dataclass(frozen=True)
class SavedPart:
    """One saved parameter, or one of the parts that it is saved in: checkpoint[key][at : at + shape]."""

    key: str
    """Key of the tensor in the checkpoint."""
    full: Shape
    """Shape of the whole tensor under this key."""
    dtype: torch.dtype | None
    """Dtype if it does not depend on the training precision, as for a router's bias. None: it does."""
    at: Shape
    """Start of this part within the whole tensor."""
    shape: Shape
    """Shape of this part, with as many dimensions as `full`; an index such as the layer has size 1."""
    pieces: tuple[Piece, ...]
    """The HF rectangles that the part consists of. Their `at` counts from the start of the whole tensor."""
    padded: bool
    """True if the tensor is padded, so that its size depends on the parallel layout that saved it."""


@dataclass(frozen=True)
class SavedModel:
    """The contents of a Megatron model checkpoint.

    parts: the parts of all parameters.
    objects: {key: bytes} of the other objects that Megatron stores.
    """

    parts: list[SavedPart]
    objects: dict[str, bytes]


def clipped(piece: Piece, at: Shape, shape: Shape) -> Piece | None:
    """Return the part of a piece that lies in the rectangle local[at : at + shape] of its local tensor.

    Return None if they do not overlap. The `at` of the returned piece counts from the start of the rectangle,
    so that a conversion can process one rectangle of a large tensor at a time.
    """
    lead = len(piece.at) - len(piece.shape)
    low = np.maximum(piece.at, at)
    size = np.minimum(np.add(piece.at, (1,) * lead + piece.shape), np.add(at, shape)) - low
    if (size <= 0).any():
        return None
    start = np.add(piece.start, (low - piece.at)[lead:])
    return Piece(piece.hf, tuple(start.tolist()), tuple(size[lead:].tolist()), tuple((low - at).tolist()))


def rows_within(shape: Shape, itemsize: int, limit: int, multiple: int = 1) -> list[tuple[Shape, Shape]]:
    """Cut a tensor into rectangles of at most `limit` bytes, so that it is never in memory as a whole.

    Return (start, shape) of each. The cuts are along the first dimension whose size is not 1, here called
    rows. A rectangle has at least `multiple` rows, even if these exceed `limit`. The row count of every
    rectangle except the last is divisible by `multiple`.

    itemsize: bytes of an element.
    """
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

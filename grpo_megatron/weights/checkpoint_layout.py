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
    """The place of a Megatron parameter, or of a part of a parameter, in a Megatron checkpoint.

    The place is the rectangle checkpoint[key][at : at + shape].
    """

    key: str
    """Key of the tensor in the checkpoint."""
    full: Shape
    """Shape of the whole tensor that the checkpoint has under `key`."""
    dtype: torch.dtype | None
    """Dtype of a parameter whose dtype does not depend on the training precision, such as a router's bias.
    None: the parameter has the training precision."""
    at: Shape
    """Index of this part's first element in the whole tensor, one number per dimension."""
    shape: Shape
    """Shape of this part, with as many dimensions as `full`. A dimension that selects one layer or expert
    has size 1."""
    pieces: tuple[Piece, ...]
    """Rectangles of HF tensors that together form this part. `Piece.at` is the position of a rectangle in the
    whole Megatron tensor."""
    padded: bool
    """True if the checkpoint pads the tensor. Its size then depends on the parallel layout that saved it."""


@dataclass(frozen=True)
class SavedModel:
    """Everything that a Megatron checkpoint of a model contains, except optimizer states.

    parts: the place of every parameter in the checkpoint.
    objects: everything that is not a tensor, as {key in the checkpoint: bytes that torch.save wrote}.
    """

    parts: list[SavedPart]
    objects: dict[str, bytes]


def clipped(piece: Piece, at: Shape, shape: Shape) -> Piece | None:
    """Return the part of a piece that lies within a window of the Megatron tensor; None if no part does.

    A piece is a rectangle of an HF tensor, together with the rectangle's position in a Megatron tensor. The
    window is megatron[at : at + shape]. The position of the returned piece counts from the window's first
    element.
    """
    lead = len(piece.at) - len(piece.shape)
    low = np.maximum(piece.at, at)
    size = np.minimum(np.add(piece.at, (1,) * lead + piece.shape), np.add(at, shape)) - low
    if (size <= 0).any():
        return None
    start = np.add(piece.start, (low - piece.at)[lead:])
    return Piece(piece.hf, tuple(start.tolist()), tuple(size[lead:].tolist()), tuple((low - at).tolist()))


def rows_within(shape: Shape, itemsize: int, limit: int, multiple: int = 1) -> list[tuple[Shape, Shape]]:
    """Divide a large tensor into rectangles of at most `limit` bytes, to process one rectangle at a time.

    Return [(index of the first element, shape)] of the rectangles. The tensor is cut only along its first
    dimension whose size is not 1. The indices of this dimension are called rows here.

    shape: shape of the tensor.
    itemsize: bytes of an element.
    multiple: number that the rows of every rectangle except the last must be divisible by. If this many rows
        take more than `limit` bytes, the rectangles have exactly this many rows and exceed `limit`.
    """
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        return [((0,) * len(shape), tuple(shape))]
    row = max(prod(shape[axis + 1 :]) * itemsize, 1)
    step = max(limit // row // multiple, 1) * multiple
    return [
        (
            tuple(first if i == axis else 0 for i in range(len(shape))),
            (*shape[:axis], min(step, shape[axis] - first), *shape[axis + 1 :]),
        )
        for first in range(0, shape[axis], step)
    ]

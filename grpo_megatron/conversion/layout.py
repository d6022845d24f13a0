"""Where in a Megatron checkpoint each HF tensor lies: asked of the model itself, which is built without memory."""

import io
import tempfile
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import Piece, Shape

# Of the model that is asked; another than that of what stays in float32.
_PARAMETERS = torch.bfloat16


@dataclass(frozen=True)
class Part:
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
class Layout:
    """parts: of all parameters. objects: {key: bytes} of what Megatron stores beside them."""

    parts: list[Part]
    objects: dict[str, bytes]


def megatron_layout(arch: Architecture) -> Layout:
    """The checkpoint of a model on one rank; one of any other layout has the same tensors, cut otherwise."""
    from megatron.core import parallel_state as mpu

    from grpo_megatron.megatron import process_groups
    from grpo_megatron.megatron.model import build_model
    from grpo_megatron.megatron.spec import ModelSpec
    from grpo_megatron.model.families import weight_map

    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        try:
            with torch.device("meta"):
                (model,) = build_model(arch, ModelSpec(ParallelSizes(), _PARAMETERS, without_memory=True))
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            state = model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})
            return _read(model, state, weight_map(arch))
        finally:
            process_groups.destroy()


def _read(model, state: dict, entries: dict) -> Layout:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts, objects = [], {}
    for name, value in state.items():
        if isinstance(value, ShardedObject):
            raw = io.BytesIO()
            torch.save([value.data], raw)
            objects[value.unique_key] = raw.getvalue()
            continue
        tensors = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        pieces = entries[name].megatron_pieces(1, 0)
        parts += [_part(tensor, whole[name], pieces) for tensor in tensors]
    return Layout(parts, objects)


def _part(tensor, parameter: torch.Tensor, pieces: list[Piece]) -> Part:
    """tensor: Megatron's ShardedTensor, whose data is a view of the parameter. pieces: of the parameter."""
    view, lead = tensor.data, tensor.prepend_axis_num
    if view.stride() != parameter.stride():
        raise RuntimeError(f"{tensor.key}: Megatron saves another view of the parameter than a rectangle")
    first = np.unravel_index(view.storage_offset() - parameter.storage_offset(), parameter.shape)
    found = [within for piece in pieces if (within := clipped(piece, tuple(map(int, first)), tuple(view.shape)))]
    at = tuple(tensor.global_offset)
    shape = (1,) * lead + tuple(view.shape)
    placed = tuple(replace(piece, at=(*at[:lead], *np.add(at[lead:], piece.at).tolist())) for piece in found)
    dtype = None if tensor.dtype == _PARAMETERS else tensor.dtype
    return Part(tensor.key, tuple(tensor.global_shape), dtype, at, shape, placed, tensor.allow_shape_mismatch)


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

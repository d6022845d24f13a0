"""Names, shapes and offsets of a model's tensors in Megatron checkpoints, for conversion from and to HF.

To find them, `saved_model` builds Megatron's model without memory for its weights.
"""

import io
import tempfile
from dataclasses import replace

import numpy as np
import torch
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from grpo_megatron.config.schema import Config, MegatronConfig, Precision
from grpo_megatron.errors import UserError
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.layers.build import build_model
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import Piece
from grpo_megatron.weights.checkpoint_layout import SavedModel, SavedPart, clipped

# Precision and dtype of the parameters of the model built here. The dtype must not be float32, the dtype of
# the buffers, because `_part` tells the two apart by it.
_PRECISION, _PARAMETERS = Precision.bf16, torch.bfloat16


def saved_model(arch: Architecture) -> SavedModel:
    """Return the tensors and other objects that a Megatron checkpoint of this architecture contains.

    The result is valid for all parallel layouts, because all save the same tensors, only cut differently. The
    function creates process groups of one rank, and destroys them at the end, so this process must have none
    before the call.

    Raises UserError if the weight map has no entry for a parameter.
    """
    with tempfile.TemporaryDirectory() as folder:
        process_groups.initialize(ParallelSizes(), 0, f"file://{folder}/store", seed=0)
        try:
            with torch.device("meta"):
                config = Config(megatron=MegatronConfig(precision=_PRECISION))
                (model,) = build_model(arch, config, without_memory=True)
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            state = model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})
            return _read(model, state, weight_map(arch))
        finally:
            process_groups.destroy()


def _read(model, state: dict, entries: dict) -> SavedModel:
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts, objects = [], {}
    for name, value in state.items():
        if isinstance(value, ShardedObject):
            raw = io.BytesIO()
            torch.save([value.data], raw)
            objects[value.unique_key] = raw.getvalue()
            continue
        if name not in entries:
            raise UserError(
                f"the weight map has no entry for Megatron's parameter {name}; add "
                "it to the map of this architecture in grpo_megatron/model/families"
            )
        tensors = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        pieces = entries[name].megatron_pieces(1, 0)
        parts += [_part(tensor, whole[name], pieces) for tensor in tensors]
    return SavedModel(parts, objects)


def _part(tensor, parameter: torch.Tensor, pieces: list[Piece]) -> SavedPart:
    """Describe one tensor of a checkpoint: its name, shape and offset, and the parts of HF tensors in it.

    tensor: Megatron's ShardedTensor, whose data is a view of the parameter.
    parameter: the whole parameter.
    pieces: parts of HF tensors that the parameter consists of, with their positions in the parameter.
    """
    view, lead = tensor.data, tensor.prepend_axis_num
    if view.stride() != parameter.stride():
        raise RuntimeError(f"{tensor.key}: the part that Megatron saves is not a rectangle of the parameter")
    first = np.unravel_index(view.storage_offset() - parameter.storage_offset(), parameter.shape)
    found = [
        within for piece in pieces if (within := clipped(piece, tuple(map(int, first)), tuple(view.shape)))
    ]
    at = tuple(tensor.global_offset)
    shape = (1,) * lead + tuple(view.shape)
    placed = tuple(replace(piece, at=(*at[:lead], *np.add(at[lead:], piece.at).tolist())) for piece in found)
    dtype = None if tensor.dtype == _PARAMETERS else tensor.dtype
    return SavedPart(
        tensor.key, tuple(tensor.global_shape), dtype, at, shape, placed, tensor.allow_shape_mismatch
    )

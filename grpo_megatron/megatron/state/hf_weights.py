"""Transfer of weights from an HF checkpoint to the ranks of a Megatron model, and back under HF names.

Global names are Megatron's parameter names with the layer and expert indices of the whole model, as in the
weight map.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.layers.router import is_correction_bias
from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.model.adapters import is_adapter
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.pieces import box
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint

_EXPERTS = "mlp.experts.local_experts."
# Names of TransformerEngine's experts, where one module has all the weights.
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


def local_parameters(chunks, adapters: bool = False) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of this rank's model chunks, {global name: parameter}.

    A global name is Megatron's name with the layer and expert indices of the whole model.

    adapters: if True, return only the LoRA adapters' parameters. If False, return all other parameters.
    """
    return _under_global_names(
        chunks, lambda chunk: ((n, p) for n, p in chunk.named_parameters() if is_adapter(n) == adapters)
    )


def local_weights(chunks) -> dict[str, torch.Tensor]:
    """Return this rank's tensors that belong in an HF checkpoint, {global name: tensor}.

    The tensors are all parameters that are not LoRA adapters, plus the routers' correction biases, which are
    buffers. A global name is Megatron's name with the layer and expert indices of the whole model.
    """
    biases = _under_global_names(
        chunks, lambda chunk: ((n, b) for n, b in chunk.named_buffers() if is_correction_bias(n))
    )
    return local_parameters(chunks) | biases


def _under_global_names(chunks, named: Callable) -> dict:
    """Return tensors of the model chunks under their global names: {global name: tensor}.

    A global name has the layer and expert indices of the whole model. Megatron's own names count layers per
    chunk and experts per rank.

    named: function that returns the (Megatron's own name, tensor) pairs of a chunk to rename.
    """
    first_expert = mpu.get_expert_model_parallel_rank()
    found = {}
    for chunk in chunks:
        for name, parameter in named(chunk):
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(local)]
                if rest.startswith(_EXPERTS):
                    local_expert, rest = rest.removeprefix(_EXPERTS).split(".", 1)
                    rest = (
                        f"{_EXPERTS}{first_expert * layer.mlp.num_local_experts + int(local_expert)}.{rest}"
                    )
                elif grouped := _GROUPED.fullmatch(rest):
                    matrix, local_expert = grouped.groups()
                    rest = (
                        f"{_EXPERTS}{first_expert * layer.mlp.num_local_experts + int(local_expert)}."
                        f"{matrix}.weight"
                    )
                name = f"decoder.layers.{layer.layer_number - 1}.{rest}"
            found[name] = parameter
    return found


def _entry_of(entries: dict[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise UserError(
            f"the weight map has no entry for Megatron's parameter {name}; add "
            "it to the map of this architecture in grpo_megatron/model/families"
        )
    return entries[name]


def mark_parallel(chunks, entries: dict[str, Entry]) -> None:
    """Mark the parameters that are split over TP, and the parameters of experts, as Megatron expects.

    Megatron marks split parameters while it initialises weights, which this project skips. Without this mark,
    the gradient norm would count a split parameter on the first TP rank only, and be silently too small.

    The mark of experts decides which ranks sum the gradient. Megatron sets it only with expert_parallel > 1.
    Without this mark, TP ranks that each hold whole experts would keep the gradients of their own tokens
    only.

    entries: weight map of the model: {Megatron parameter name: how TP splits it, and if it is an expert's}.

    Raises UserError if the weight map has no entry for a parameter.
    """
    for name, parameter in local_parameters(chunks).items():
        entry = _entry_of(entries, name)
        if entry.axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=entry.axis, stride=1)
        if entry.expert:
            parameter.allreduce = False


@torch.no_grad()
def load_hf(
    chunks, checkpoint: HFCheckpoint, entries: dict[str, Entry], left_out: Container[str] = ()
) -> None:
    """Fill this rank's parameters with their slices of an HF checkpoint, cast to each parameter's dtype.

    chunks: model chunks of this rank.
    entries: weight map of the model: {Megatron parameter name: description of its HF tensors}.
    left_out: Megatron names of parameters that are not filled, because the checkpoint does not have them.

    Raises UserError if names, shapes or types of tensors in the checkpoint differ from the weight map, so
    that no tensor of the checkpoint is ignored silently. Also raises UserError if the model has a parameter
    that the weight map lacks or gives another shape.
    """
    entries = {name: entry for name, entry in entries.items() if name not in left_out}
    violations = checkpoint.violations(entries)
    if violations:
        raise UserError("; ".join(violations))
    for name, parameter in local_weights(chunks).items():
        if name in left_out:
            continue
        entry = _entry_of(entries, name)
        group = _split_over(entry)
        if parameter.shape != entry.megatron_shape(group.size()):
            raise UserError(
                f"{name} has shape {tuple(parameter.shape)} in Megatron, but "
                f"{entry.megatron_shape(group.size())} in the weight map; correct the map of this "
                "architecture in grpo_megatron/model/families"
            )
        pieces = entry.megatron_pieces(group.size(), group.rank())
        if sum(piece.numel for piece in pieces) < parameter.numel():
            parameter.zero_()  # rows beyond the vocabulary
        for piece in pieces:
            piece.of(parameter).copy_(checkpoint.read_slice(piece.hf, piece.start, piece.shape))


def _split_over(entry: Entry):
    """Return the process group whose ranks split a parameter: for an expert the experts' TP group, else TP.

    entry: description of the parameter in the weight map.
    """
    return mpu.get_expert_tensor_parallel_group() if entry.expert else mpu.get_tensor_model_parallel_group()


def iterate_hf(
    chunks,
    entries: dict[str, Entry],
    dtype: torch.dtype | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather the model's parameters for an HF export. Yield (HF name, full tensor).

    Each tensor is yielded on one rank only. All ranks must exhaust the iterator.

    entries: weight map of the model: {Megatron parameter name: description of its HF tensors}.
    dtype: dtype of the yielded tensors, except for float32 buffers. None: do not change the dtype.
    values: {Megatron name: this rank's shard} of the parameters. None: the values in the chunks.

    Only ranks of the first replica take part (of the first expert replica for experts). If a parameter is
    split over TP ranks (expert-TP ranks for experts), the first rank of the group receives the other ranks'
    shards and yields the tensors. Only one gathered parameter is in memory at a time, plus what the caller
    keeps.

    Experts come last. A rank that yields only experts has then sent its shards of all other parameters before
    its caller spends time on experts, so no rank waits for these shards.
    """
    rank = rank_info()
    values = local_weights(chunks) if values is None else values
    for entry in sorted((_entry_of(entries, name) for name in values), key=lambda entry: bool(entry.expert)):
        if not entry.exported or not (
            rank.in_first_expert_replica if entry.expert else rank.in_first_replica
        ):
            continue
        group, own = _split_over(entry), values[entry.megatron].detach()
        shards = [own]
        if entry.axis is not None and group.size() > 1:
            first = group.rank() == 0
            shards = [torch.empty_like(own) for _ in range(group.size())] if first else None
            dist.gather(own.contiguous(), shards, group=group, group_dst=0)
        if group.rank() == 0:
            for name, tensor in whole_tensors(entry, shards):
                yield name, tensor if entry.float32 or dtype is None else tensor.to(dtype)


def whole_tensors(entry: Entry, shards: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Assemble the HF tensors that one Megatron parameter contains from the parameter's shards.

    entry: description of the parameter in the weight map.
    shards: all shards of the parameter in rank order; a single shard if the parameter is not split.

    Returns (HF name, full tensor) for each HF tensor.
    """
    full = {hf: shards[0].new_empty(shape) for hf, shape in zip(entry.hf, entry.shapes, strict=True)}
    for rank, shard in enumerate(shards):
        for piece in entry.megatron_pieces(len(shards), rank):
            full[piece.hf][box(piece.start, piece.shape)] = piece.of(shard)
    return list(full.items())

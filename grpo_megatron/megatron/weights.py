"""HF tensors into the ranks of a Megatron model, and out of them again, tensor by tensor."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.process_groups import rank_info
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.maps import Entry

_EXPERTS = "mlp.experts.local_experts."


def local_parameters(chunks) -> dict[str, torch.nn.Parameter]:
    """Parameters of this rank's model chunks under their global names.

    Megatron numbers layers per chunk and experts per rank.
    """
    first_expert = mpu.get_expert_model_parallel_rank()
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                layer = chunk.decoder.layers[int(local)]
                if rest.startswith(_EXPERTS):
                    number, rest = rest.removeprefix(_EXPERTS).split(".", 1)
                    rest = f"{_EXPERTS}{first_expert * layer.mlp.num_local_experts + int(number)}.{rest}"
                name = f"decoder.layers.{layer.layer_number - 1}.{rest}"
            found[name] = parameter
    return found


def _entry_of(entries: dict[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise UserError(
            f"the weight map has no entry for Megatron's parameter {name}; the map of this architecture is incomplete"
        )
    return entries[name]


def mark_parallel(chunks, entries: dict[str, Entry]) -> None:
    """Tell Megatron which parameters are split over TP, and which belong to experts.

    It notes the first while initialising weights, which we skip. Without the mark the gradient norm
    counts a split parameter on the first TP rank only: too small, and nothing says so. The second
    says which ranks sum the gradient; Megatron sets it with expert_parallel > 1 only, and without it
    TP ranks that each have the whole expert would keep the gradients of their own tokens.
    """
    for name, parameter in local_parameters(chunks).items():
        entry = _entry_of(entries, name)
        if entry.axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=entry.axis, stride=1)
        if entry.expert:
            parameter.allreduce = False


@torch.no_grad()
def load_hf(chunks, checkpoint: HFCheckpoint, entries: dict[str, Entry]) -> None:
    """Fill this rank's parameters from HF tensors, casting to the parameters' dtype.

    Raises UserError on a missing tensor, a wrong shape, or tensors in the checkpoint that no entry
    reads (they would be lost without a word).
    """
    unread = checkpoint.unread(entries)
    if unread:
        raise UserError(f"{checkpoint.folder}: no weight map entry reads {', '.join(unread[:5])} ({len(unread)} tensors)")
    for name, parameter in local_parameters(chunks).items():
        entry = _entry_of(entries, name)
        full = entry.transform.to_megatron([checkpoint.read(hf) for hf in entry.hf])
        group = _split_over(entry)
        shard = entry.transform.shard(full, entry.axis, group.size(), group.rank())
        if shard.shape != parameter.shape:
            raise UserError(
                f"{checkpoint.folder}: {' + '.join(entry.hf)} gives a shard of {tuple(shard.shape)}, "
                f"config.json promises {tuple(parameter.shape)}"
            )
        parameter.copy_(shard)


def _split_over(entry: Entry):
    """The process group that holds a parameter's shards."""
    return mpu.get_expert_tensor_parallel_group() if entry.expert else mpu.get_tensor_model_parallel_group()


def iterate_hf(chunks, entries: dict[str, Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of this rank's parameters, each on one rank of all.

    That is the first rank of the group that holds its shards, in the first replica; the others take
    part in the gathering. A generator: at most one gathered tensor is alive beyond what the consumer
    keeps. Must be exhausted on all ranks. Experts come last: a rank that hands out experts only has
    then done its part in all gathering before its consumer makes it wait.
    """
    rank = rank_info()
    parameters = [(_entry_of(entries, name), parameter) for name, parameter in local_parameters(chunks).items()]
    for entry, parameter in sorted(parameters, key=lambda item: item[0].expert):
        if not entry.exported or not (rank.in_first_expert_replica if entry.expert else rank.in_first_replica):
            continue
        group = _split_over(entry)
        shards = [parameter.detach()]
        if entry.axis is not None and group.size() > 1:
            first = group.rank() == 0
            shards = [torch.empty_like(parameter) for _ in range(group.size())] if first else None
            dist.gather(parameter.detach().contiguous(), shards, group=group, group_dst=0)
        if group.rank() == 0:
            full = entry.transform.unshard(shards, entry.axis)
            yield from zip(entry.hf, entry.transform.to_hf(full), strict=True)

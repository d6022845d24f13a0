"""HF tensors into the ranks of a Megatron model, and out of them again, tensor by tensor."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from grpo_megatron.errors import UserError
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.maps import Entry


def local_parameters(model) -> dict[str, torch.nn.Parameter]:
    """Parameters of this stage under their global names (Megatron numbers layers per stage)."""
    found = {}
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            name = f"decoder.layers.{model.decoder.layers[int(local)].layer_number - 1}.{rest}"
        found[name] = parameter
    return found


def _entry_of(entries: dict[str, Entry], name: str) -> Entry:
    if name not in entries:
        raise UserError(
            f"the weight map has no entry for Megatron's parameter {name}; the map of this architecture is incomplete"
        )
    return entries[name]


def mark_tensor_parallel(model, entries: dict[str, Entry]) -> None:
    """Tell Megatron which parameters are split over TP.

    It notes that while initialising weights, which we skip. Without the mark the gradient norm
    counts a split parameter on the first TP rank only: too small, and nothing says so.
    """
    for name, parameter in local_parameters(model).items():
        entry = _entry_of(entries, name)
        if entry.axis is not None and not getattr(parameter, "tensor_model_parallel", False):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=entry.axis, stride=1)


@torch.no_grad()
def load_hf(model, checkpoint: HFCheckpoint, entries: dict[str, Entry], tp: int, tp_rank: int) -> None:
    """Fill this rank's parameters from HF tensors, casting to the parameters' dtype.

    Raises UserError on a missing tensor, a wrong shape, or tensors in the checkpoint that no entry
    reads (they would be lost without a word).
    """
    unread = checkpoint.names - {name for entry in entries.values() for name in entry.hf}
    # Written by some tools although the embedding is tied or the buffer is computed.
    unread = {n for n in unread if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")}
    if unread:
        raise UserError(
            f"{checkpoint.folder}: no weight map entry reads {', '.join(sorted(unread)[:5])} ({len(unread)} tensors)"
        )
    for name, parameter in local_parameters(model).items():
        entry = _entry_of(entries, name)
        full = entry.transform.to_megatron([checkpoint.read(hf) for hf in entry.hf])
        shard = entry.transform.shard(full, entry.axis, tp, tp_rank)
        if shard.shape != parameter.shape:
            raise UserError(
                f"{checkpoint.folder}: {' + '.join(entry.hf)} gives a shard of {tuple(shard.shape)}, "
                f"config.json promises {tuple(parameter.shape)}"
            )
        parameter.copy_(shard)


def iterate_hf(model, entries: dict[str, Entry], tp_group) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of this stage's parameters, on the TP group's first rank.

    The other ranks of the TP group take part in the gathering and get nothing. A generator: at most
    one gathered tensor is alive beyond what the consumer keeps. Must be exhausted on all ranks.
    """
    for name, parameter in local_parameters(model).items():
        entry = _entry_of(entries, name)
        if not entry.exported:
            continue
        shards = [parameter.detach()]
        if entry.axis is not None and tp_group.size() > 1:
            first = tp_group.rank() == 0
            shards = [torch.empty_like(parameter) for _ in range(tp_group.size())] if first else None
            dist.gather(parameter.detach().contiguous(), shards, group=tp_group, group_dst=0)
        if tp_group.rank() == 0:
            full = entry.transform.unshard(shards, entry.axis)
            yield from zip(entry.hf, entry.transform.to_hf(full), strict=True)

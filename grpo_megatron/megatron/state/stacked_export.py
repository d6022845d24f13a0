"""Export of experts to HF checkpoints whose files have all experts of a layer in one tensor."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from grpo_megatron.weights.stacked_experts import Stack


def with_stacks(
    tensors: Iterable[tuple[str, torch.Tensor]], stacks: list[Stack]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace tensors of single experts by stacks of all experts of a layer. Yield (HF name, tensor).

    The ranks that share a layer's experts send their parts of a stack to the first of them, which yields the
    stack in host memory. All ranks must exhaust the iterator. At most one layer's experts are kept at a time.

    tensors: (HF name, tensor) pairs of this rank, as iterate_hf yields them: expert by expert.
    stacks: all stacks of the model.
    """
    group = mpu.get_expert_model_parallel_group()
    stack_of = {name: stack for stack in stacks for names in stack.experts for name in names}
    kept: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name not in stack_of:
            yield name, tensor
            continue
        kept[name], stack = tensor if group.size() > 1 else tensor.cpu(), stack_of[name]
        count = len(stack.experts) // group.size()
        own = stack.experts[group.rank() * count : (group.rank() + 1) * count]
        if name != own[-1][-1]:
            continue
        part = torch.stack([stack.expert(kept.pop(member) for member in names) for names in own])
        parts = [part]
        if group.size() > 1:
            is_first = group.rank() == 0
            parts = [torch.empty_like(part) for _ in range(group.size())] if is_first else None
            dist.gather(part, parts, group=group, group_dst=0)
        if group.rank() == 0:
            yield stack.name, torch.cat([each.cpu() for each in parts])

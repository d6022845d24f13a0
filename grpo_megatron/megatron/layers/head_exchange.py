"""Exchange of heads for tokens among context-parallel ranks, as in DeepSpeed Ulysses (arXiv:2309.14509)."""

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import all_to_all

from grpo_megatron.megatron.layers.packs import PackedSequences


class HeadExchange:
    """Exchange of heads for tokens among the n CP ranks of a group. Without CP, nothing changes.

    A rank has its t tokens of the pack with all heads of its TP rank. After the exchange it has all t * n
    tokens, in the order of the padded stream, with the r-th n-th of these heads on rank r. A rank sends and
    receives t * channels * (n - 1) / n values in each direction, and as many gradients.

    Channels come in sections, such as queries and keys, each with the same order of heads. n must divide the
    heads of every section.
    """

    def __init__(self, group: torch.distributed.ProcessGroup):
        self.group, self.size = group, group.size()

    def share(self, parameter: torch.Tensor, sections: Sequence[int]) -> torch.Tensor:
        """Return this rank's heads of a parameter [channels, ...]: [channels / n, ...].

        Other heads' gradient is zero here. Their own rank has it for all tokens, so the sum over CP ranks,
        which every parameter gets, is right.

        sections: number of channels of each section.
        """
        if self.size == 1:
            return parameter
        return torch.cat([x.chunk(self.size)[self.group.rank()] for x in parameter.split(sections)])

    def to_heads(
        self, tensors: Sequence[tuple[torch.Tensor, Sequence[int]]], packed: PackedSequences
    ) -> Sequence[torch.Tensor]:
        """Exchange heads for tokens: return [t * n, channels / n] for each tensor [t, channels].

        tensors: (tensor, number of channels of each of its sections). One collective exchanges them all.
        packed: description of the pack.
        """
        if self.size == 1:
            return [tensor for tensor, _ in tensors]
        parts = [
            section.unflatten(-1, (self.size, -1))
            for tensor, sections in tensors
            for section in tensor.split(sections, dim=-1)
        ]
        received = all_to_all(self.group, torch.cat(parts, dim=-1).transpose(0, 1)).flatten(0, 1)
        in_order = received.index_select(0, packed.pack.tensor("gathered_index", received.device))
        return in_order.split([tensor.shape[-1] // self.size for tensor, _ in tensors], dim=-1)

    def to_tokens(self, x: torch.Tensor, packed: PackedSequences) -> torch.Tensor:
        """Exchange tokens for heads: return [t, channels] of x [t * n, channels / n], which is one section.

        packed: description of the pack.
        """
        if self.size == 1:
            return x
        by_rank = x.index_select(0, packed.pack.tensor("gathered_place", x.device))
        received = all_to_all(self.group, by_rank.unflatten(0, (self.size, -1)))
        return received.transpose(0, 1).flatten(1)

"""How one Megatron tensor is made of HF tensors, and split over tensor-parallel ranks.

A transform is pure: HF tensors (full) <-> Megatron tensor (full) <-> the shards of TP ranks. It also knows what shape the
engine's own, fused and sharded, parameter has.
"""

from dataclasses import dataclass

import torch

from grpo_megatron.batch.layout import padded_to

Shape = tuple[int, ...]
# SGLang pads embedding and output layer to a multiple of this many words.
ENGINE_VOCAB_MULTIPLE = 64


def divided(shape: Shape, axis: int | None, parts: int) -> Shape:
    """The shape of one of equal parts along `axis`; None: every part is the whole."""
    if axis is None:
        return tuple(shape)
    return tuple(size // parts if dimension == axis else size for dimension, size in enumerate(shape))


@dataclass(frozen=True)
class Copy:
    """One tensor, the same on both sides; split in equal parts along the sharded axis."""

    def to_megatron(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    def to_hf(self, full: torch.Tensor) -> list[torch.Tensor]:
        return [full]

    def shard(self, full: torch.Tensor, axis: int | None, tp: int, rank: int) -> torch.Tensor:
        return full if axis is None else full.chunk(tp, dim=axis)[rank]

    def unshard(self, shards: list[torch.Tensor], axis: int | None) -> torch.Tensor:
        return shards[0] if axis is None else torch.cat(shards, dim=axis)

    def engine_shape(self, hf_shapes: tuple[Shape, ...], axis: int | None, tp: int) -> Shape:
        """Shape of the engine's parameter on each of `tp` ranks, which divide it along `axis`."""
        return divided(hf_shapes[0], axis, tp)


@dataclass(frozen=True)
class FuseQKV(Copy):
    """q, k, v projections -> one, ordered by query group: its queries, its key, its value.

    HF: q [heads·d, h], k and v [kv_heads·d, h]. Megatron: [(heads + 2 kv_heads)·d, h]. In this
    order equal parts along axis 0 hold whole groups, which is what TP ranks need.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def to_megatron(self, tensors):
        q, k, v = tensors
        groups, rest = self.num_kv_heads, q.shape[1:]
        parts = [x.reshape(groups, -1, *rest) for x in (q, k, v)]
        return torch.cat(parts, dim=1).reshape(-1, *rest)

    def engine_shape(self, hf_shapes, axis, tp):
        # The engine repeats KV heads where there are fewer of them than ranks.
        heads = self.num_heads // tp + 2 * max(1, self.num_kv_heads // tp)
        return (heads * self.head_dim, *hf_shapes[0][1:])

    def to_hf(self, full):
        rest = full.shape[1:]
        queries = self.num_heads // self.num_kv_heads * self.head_dim
        grouped = full.reshape(self.num_kv_heads, queries + 2 * self.head_dim, *rest)
        parts = grouped.split([queries, self.head_dim, self.head_dim], dim=1)
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class FuseGateUp(Copy):
    """gate and up projections [f, h] each -> one [2f, h], gate first; each rank has both halves."""

    def to_megatron(self, tensors):
        return torch.cat(tensors, dim=0)

    def to_hf(self, full):
        return list(full.chunk(2, dim=0))

    def engine_shape(self, hf_shapes, axis, tp):
        gate, up = hf_shapes
        return divided((gate[0] + up[0], *gate[1:]), axis, tp)

    def shard(self, full, axis, tp, rank):
        return torch.cat([half.chunk(tp, dim=0)[rank] for half in full.chunk(2, dim=0)], dim=0)

    def unshard(self, shards, axis):
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=0)


@dataclass(frozen=True)
class PadVocab(Copy):
    """Rows beyond the vocabulary are zero on the Megatron side, so that TP divides their number."""

    vocab_size: int
    padded_size: int

    def to_megatron(self, tensors):
        padding = tensors[0].new_zeros(self.padded_size - self.vocab_size, *tensors[0].shape[1:])
        return torch.cat([tensors[0], padding], dim=0)

    def to_hf(self, full):
        return [full[: self.vocab_size]]

    def engine_shape(self, hf_shapes, axis, tp):
        rows = padded_to(self.vocab_size, ENGINE_VOCAB_MULTIPLE)
        return divided((rows, *hf_shapes[0][1:]), axis, tp)

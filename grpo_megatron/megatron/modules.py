"""Building blocks for Megatron's local layer spec: a norm that knows SP, attention over packs.

Megatron's own torch norm refuses sequence parallelism, its own core attention refuses packed
sequences. Both of ours also run on CUDA without TransformerEngine.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch.autograd.function import once_differentiable

from grpo_megatron.batch.layout import Pack


class RMSNorm(torch.nn.RMSNorm):
    """Constructed the way Megatron's layer specs construct norms."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Under SP each TP rank sees other tokens: finalize_model_grads sums marked gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        if x.is_cpu and x.dtype == torch.float32:
            return _FloatRMSNorm.apply(x, self.weight, self.eps)
        return super().forward(x)


class _FloatRMSNorm(torch.autograd.Function):
    """torch's rms_norm is no kernel of its own on a CPU but a chain of operations; this chain is shorter."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        along = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * weight).sub_(normed.mul_(along)).mul_(scale)
        return grad_x, grad_weight, None


class _Rotate(torch.autograd.Function):
    """Rotary embedding: x [t, heads, d], cos and sin [t, 1, d], the first half of sin negated -> like x."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x, cos, sin):
    return x.roll(x.shape[-1] // 2, -1).mul_(sin).addcmul_(x, cos)


@dataclass(frozen=True)
class Bucket:
    """Queries whose attention is computed together: n stretches of q.

    Their keys are the first n * k rows of key part `part`. q = k: causal; q < k: the queries belong to
    the last q of the k keys.
    """

    n: int
    q: int
    k: int
    part: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with the plan by which PackedAttention computes it.

    position_ids int64 [t]. query_rows int64: rows of this rank's part of the pack in the order of the
    buckets (shorter members of a bucket repeat their last row); key_rows: rows of the keys of all CP
    ranks in the order of the key parts, of key_sizes rows each; inverse int64 [t]: where each position
    of the pack is found in the buckets' outputs. None: in place already.
    """

    position_ids: torch.Tensor | None = None
    buckets: tuple[Bucket, ...] = ()
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None
    key_sizes: tuple[int, ...] = ()
    inverse: torch.Tensor | None = None
    _kept: dict = field(default_factory=dict, repr=False)

    def rotation(self, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for _Rotate, both [t, 1, d]. Kept: frequencies must be the same in every layer."""
        if dtype not in self._kept:
            angle = self.position_ids.to(frequencies.dtype)[:, None] * frequencies.to(self.position_ids.device)
            cos, sin = angle.cos(), angle.sin()
            self._kept[dtype] = tuple(torch.cat(halves, dim=-1)[:, None].to(dtype) for halves in ((cos, cos), (-sin, sin)))
        return self._kept[dtype]

    def mask(self, bucket: Bucket, dtype: torch.dtype) -> torch.Tensor | None:
        """[q, k] to be added to the scores; None: causal. Kept: attention saves it, in every layer the same one."""
        key = (bucket.q, bucket.k, dtype)
        if bucket.q == bucket.k:
            return None
        if key not in self._kept:
            hidden = torch.full((bucket.q, bucket.k), -torch.inf, dtype=dtype, device=self.position_ids.device)
            self._kept[key] = hidden.triu_(bucket.k - bucket.q + 1)
        return self._kept[key]


# A bucket takes sequences down to this share of its longest one; more would waste attention FLOPs
# on padding, less would make many small kernels.
_BUCKET_RANGE = 0.8
# Queries that share a mask. Its size is this times the keys of a sequence, whatever the pack holds.
_MASKED_QUERIES = 1024


def describe_pack(pack: Pack, device: torch.device, buckets: bool = True, equal_only: bool | None = None) -> PackedSequences:
    """The pack as Megatron and PackedAttention need it, tensors on `device`.

    buckets: with the plan for PackedAttention; TransformerEngine's attention needs none. equal_only: without CP, only
    neighbours of equal length share a bucket. That wastes nothing and moves no row, but makes more kernels; None: on a
    CPU, where a kernel costs little to start.
    """
    cu_seqlens = torch.from_numpy(pack.cu_seqlens).to(device)
    cu_seqlens_padded = torch.from_numpy(pack.cu_seqlens_padded).to(device)
    longest = int(pack.padded_lengths.max())
    plan = {}
    if buckets and pack.layout.cp > 1:
        plan = _masked_stretches(pack, device)
    elif buckets:
        plan = _whole_sequences(pack, device, device.type == "cpu" if equal_only is None else equal_only)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=torch.from_numpy(pack.position_ids).to(device),
        **plan,
    )


def _whole_sequences(pack: Pack, device: torch.device, equal_only: bool) -> dict:
    """Without CP: sequences of similar length share a bucket."""
    lengths, starts = pack.padded_lengths, pack.cu_seqlens_padded[:-1].astype(np.int64)
    buckets, rows, real = [], [], []
    for members in _equal_neighbours(lengths) if equal_only else _similar(lengths):
        length = lengths[members][:, None]
        column = np.arange(length.max())
        rows.append((starts[members][:, None] + np.minimum(column, length - 1)).ravel())
        real.append((column < length).ravel())
        buckets.append(Bucket(len(members), len(column), len(column), len(buckets)))
    rows, real = np.concatenate(rows), np.concatenate(real)
    plan = {"buckets": tuple(buckets), "key_sizes": tuple(b.n * b.k for b in buckets)}
    if not np.array_equal(rows, np.arange(lengths.sum())):
        inverse = np.empty(lengths.sum(), dtype=np.int64)
        inverse[rows[real]] = np.flatnonzero(real)
        plan["query_rows"] = plan["key_rows"] = torch.from_numpy(rows).to(device)
        plan["inverse"] = torch.from_numpy(inverse).to(device)
    return plan


def _equal_neighbours(lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(np.arange(len(lengths)), np.flatnonzero(lengths[1:] != lengths[:-1]) + 1)


def _similar(lengths: np.ndarray) -> list[np.ndarray]:
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while len(order):
        fits = lengths[order] >= _BUCKET_RANGE * lengths[order[0]]
        groups.append(order[fits])
        order = order[~fits]
    return groups


def _masked_stretches(pack: Pack, device: torch.device) -> dict:
    """Under CP: the queries in stretches, the keys in the order of the sequences."""
    buckets = []
    firsts, lengths = pack.pieces(pack.layout.cp_rank)
    for sequence in range(len(firsts)):
        for first, length in zip(firsts[sequence].tolist(), lengths[sequence].tolist(), strict=True):
            for start in range(0, length, _MASKED_QUERIES):
                queries = min(_MASKED_QUERIES, length - start)
                buckets.append(Bucket(1, queries, first + start + queries, sequence))
    return {
        "buckets": tuple(buckets),
        "key_rows": torch.from_numpy(pack.gathered_index).to(device),
        "key_sizes": tuple(pack.padded_lengths.tolist()),
    }


class PackedAttention(MegatronModule):
    """Causal self-attention over a pack of sequences with rotary embedding, on torch's scaled_dot_product_attention.

    query [t, heads, d], key and value [t, kv_heads, d] of one TP and CP rank, not yet rotated
    -> [t, heads * d]. rope_frequencies: float32 [d / 2], of all layers alike; Megatron's own rotation of packs asks for
    the lengths of all sequences (a synchronisation) and computes cosines anew in every layer, twice.
    Padding sits behind a sequence's real tokens, where the causal mask hides it. Under CP every rank
    gathers the keys and values of the pack, and no mask is larger than 1024 times a sequence.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
        *,
        rope_frequencies: torch.Tensor,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if config.attention_dropout or attention_dropout:
            raise NotImplementedError("attention dropout makes log-probs random; RL needs 0")
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.rope_frequencies = rope_frequencies

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        packed = packed_seq_params
        rotation = packed.rotation(self.rope_frequencies, query.dtype)
        query, key = _Rotate.apply(query, *rotation), _Rotate.apply(key, *rotation)
        if self.cp_group.size() > 1:
            # One collective for both; its backward sums every rank's gradients (reduce-scatter).
            both = torch.cat([key, value], dim=1)
            both = gather_from_sequence_parallel_region(both, group=self.cp_group)
            key, value = both.split(key.shape[1], dim=1)
        queries = _take(query, packed.query_rows).split([bucket.n * bucket.q for bucket in packed.buckets])
        keys, values = (_take(x, packed.key_rows).split(packed.key_sizes) for x in (key, value))
        outputs = [
            self._attend(bucket, of_bucket, keys[bucket.part], values[bucket.part], packed.mask(bucket, query.dtype))
            for bucket, of_bucket in zip(packed.buckets, queries, strict=True)
        ]
        return _take(torch.cat(outputs), packed.inverse)

    def _attend(self, bucket: Bucket, query, key, value, mask) -> torch.Tensor:
        """[n * q, heads, d], [at least n * k, kv_heads, d] twice -> [n * q, heads * d]"""
        seen = bucket.n * bucket.k
        if seen < len(key):
            key, value = key[:seen], value[:seen]
        query, key, value = (x.unflatten(0, (bucket.n, -1)).transpose(1, 2) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def _take(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)

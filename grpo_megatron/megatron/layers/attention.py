"""Causal attention with rotary embedding over packs of sequences, for Megatron's local layers.

It replaces Megatron's local attention, which refuses packed sequences. It runs on a CPU, and on CUDA without
TransformerEngine.
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

from grpo_megatron.batch.layout import Pack, on_device


class _Rotate(torch.autograd.Function):
    """Autograd function of the rotary embedding. It saves only cos and sin for the backward pass, not x.

    x: [t, heads, d]. cos, sin: [t, 1, d]; the first half of sin's channels is negated.
    """

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


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return queries or keys x [t, heads, d] rotated by the rotary embedding.

    rotation: (cos, sin) from PackedSequences.rotation. If cos and sin have r < d channels, only the first r
        channels of x are rotated.
    """
    turned = rotation[0].shape[-1]
    if turned == x.shape[-1]:
        return _Rotate.apply(x, *rotation)
    return torch.cat([_Rotate.apply(x[..., :turned], *rotation), x[..., turned:]], dim=-1)


@dataclass(frozen=True)
class AttentionBatch:
    """Sizes of one attention kernel call, which computes n sequences, or n sections of sequences, together.

    n: number of sequences or sections. All have the same size.
    q: number of queries per sequence or section. They are consecutive tokens.
    k: number of keys per sequence or section. The queries are at the last q of the k positions.
    part: index of the key tensor whose first n * k rows are the keys. The pack's keys are split into several
        such tensors (PackedSequences.key_sizes).
    """

    n: int
    q: int
    k: int
    part: int


@dataclass
class PackedSequences(PackedSeqParams):
    """Description of a pack (sequences concatenated along the token axis) that all attention layers use.

    It adds to Megatron's PackedSeqParams the batches in which this project's PackedAttention computes
    attention. Fields that reorder rows are None if the order does not change.
    """

    position_ids: torch.Tensor | None = None
    """int64 [t]: position of each token in its sequence."""
    batches: tuple[AttentionBatch, ...] = ()
    """Batches of queries, in the order in which they are computed."""
    query_rows: torch.Tensor | None = None
    """int64: for each query of the concatenated batches, its row in this rank's part of the pack.

    Sequences shorter than the longest sequence of their batch repeat their last row.
    """
    key_rows: torch.Tensor | None = None
    """int64: order of the keys, gathered from all CP ranks, before they are split into parts."""
    key_sizes: tuple[int, ...] = ()
    """Number of keys in each tensor into which the keys are split (see AttentionBatch.part)."""
    inverse: torch.Tensor | None = None
    """int64 [t]: for each token of the pack, its row in the batches' concatenated outputs."""
    short: bool = False
    """True if all sequences are so short that batched matrix products replace torch's flash kernel."""
    _kept: dict = field(default_factory=dict, repr=False)
    """Cached rotations and masks, which are the same in every layer."""

    def rotation(
        self, frequencies: torch.Tensor, dtype: torch.dtype, factor: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), both [t, 1, d], with which `rotate` rotates the pack's queries and keys.

        The result is cached by dtype, so all layers must pass the same frequencies and factor.

        frequencies: [d / 2], angle per position of each channel pair, in radians.
        dtype: dtype of the result.
        factor: number that cos and sin are multiplied by.
        """
        if dtype not in self._kept:
            angle = self.position_ids.to(frequencies.dtype)[:, None] * frequencies.to(
                self.position_ids.device
            )
            cos, sin = angle.cos() * factor, angle.sin() * factor
            self._kept[dtype] = tuple(
                torch.cat(halves, dim=-1)[:, None].to(dtype) for halves in ((cos, cos), (-sin, sin))
            )
        return self._kept[dtype]

    def mask(self, batch: AttentionBatch, dtype: torch.dtype) -> torch.Tensor:
        """Return the causal mask [q, k] to add to the batch's attention scores: -inf on later keys, else 0.

        The mask is cached, so all layers save the same tensor for the backward pass.
        """
        key = (batch.q, batch.k, dtype)
        if key not in self._kept:
            hidden = torch.full((batch.q, batch.k), -torch.inf, dtype=dtype, device=self.position_ids.device)
            self._kept[key] = hidden.triu_(batch.k - batch.q + 1)
        return self._kept[key]


# Least length of a sequence in a batch, as a share of the longest one. A smaller share would waste attention
# FLOPs on padding; a larger one would make many small kernels.
_BATCH_RANGE = 0.8
# On a CPU, packs whose sequences have at most this many tokens are computed by batched matrix products,
# because torch's flash kernel makes a small product for each head of each sequence.
_SHORT = 128
# The same share for short sequences, where starting a product costs more than padding does.
_SHORT_BATCH_RANGE = 0.5
# Most queries (rows) of a mask. Its columns are the keys of one sequence, so it does not grow with the pack.
_MASKED_QUERIES = 1024


def describe_pack(
    pack: Pack, device: torch.device, own_attention: bool = True, equal_only: bool | None = None
) -> PackedSequences:
    """Return the PackedSequences of a pack, which the attention of all layers uses. Tensors are on `device`.

    own_attention: True if this project's PackedAttention computes attention, False if TransformerEngine does.
    equal_only: if True, only neighbouring sequences of equal length are computed together. This avoids
        padding and reordering, but needs more kernel calls. If False, any sequences of similar length are.
        None: True on a CPU if a sequence has more than 128 tokens. Ignored under CP, or if
        own_attention is False.
    """
    cu_seqlens = on_device(torch.from_numpy(pack.cu_seqlens), device)
    cu_seqlens_padded = on_device(torch.from_numpy(pack.cu_seqlens_padded), device)
    longest = int(pack.padded_lengths.max())
    plan = {}
    if not own_attention:
        # Padding counts as tokens here. The kernel writes no statistics for rows outside of all sequences.
        # Under CP, whatever that memory held (NaN at worst) would spread from the padding to every gradient.
        # This also saves TransformerEngine's comparisons with the real lengths: two synchronisations per
        # layer.
        cu_seqlens, cu_seqlens_padded = cu_seqlens_padded, None
    elif pack.layout.cp > 1:
        plan = _sequence_sections(pack, device)
    else:
        short = device.type == "cpu" and longest <= _SHORT
        if equal_only is None:
            equal_only = device.type == "cpu" and not short
        lengths, share = pack.padded_lengths, _SHORT_BATCH_RANGE if short else _BATCH_RANGE
        groups = _equal_neighbours(lengths) if equal_only else _similar(lengths, share)
        plan = _whole_sequences(pack, device, groups) | {"short": short}
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        position_ids=on_device(torch.from_numpy(pack.position_ids), device),
        **plan,
    )


def _whole_sequences(pack: Pack, device: torch.device, groups: list[np.ndarray]) -> dict:
    """Return the fields of PackedSequences that divide a pack into batches of whole sequences, without CP.

    groups: for each batch, the indices of its sequences.

    Returns {name of the field: value}.
    """
    lengths, starts = pack.padded_lengths, pack.cu_seqlens_padded[:-1].astype(np.int64)
    batches, rows, real = [], [], []
    for members in groups:
        length = lengths[members][:, None]
        column = np.arange(length.max())
        rows.append((starts[members][:, None] + np.minimum(column, length - 1)).ravel())
        real.append((column < length).ravel())
        batches.append(AttentionBatch(len(members), len(column), len(column), len(batches)))
    rows, real = np.concatenate(rows), np.concatenate(real)
    plan = {"batches": tuple(batches), "key_sizes": tuple(b.n * b.k for b in batches)}
    if not np.array_equal(rows, np.arange(lengths.sum())):
        inverse = np.empty(lengths.sum(), dtype=np.int64)
        inverse[rows[real]] = np.flatnonzero(real)
        plan["query_rows"] = plan["key_rows"] = on_device(torch.from_numpy(rows), device)
        plan["inverse"] = on_device(torch.from_numpy(inverse), device)
    return plan


def _equal_neighbours(lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(np.arange(len(lengths)), np.flatnonzero(lengths[1:] != lengths[:-1]) + 1)


def _similar(lengths: np.ndarray, share: float) -> list[np.ndarray]:
    order = np.argsort(-lengths, kind="stable")
    groups = []
    while len(order):
        fits = lengths[order] >= share * lengths[order[0]]
        groups.append(order[fits])
        order = order[~fits]
    return groups


def _sequence_sections(pack: Pack, device: torch.device) -> dict:
    """Return the fields of PackedSequences that divide a pack into batches, under context parallelism (CP).

    Each batch is a section of one sequence: at most 1024 (_MASKED_QUERIES) of this rank's queries, and the
    keys of all CP ranks up to the last of these queries. Returns {name of the field: value}.
    """
    batches = []
    firsts, lengths = pack.pieces(pack.layout.cp_rank)
    for sequence in range(len(firsts)):
        for first, length in zip(firsts[sequence].tolist(), lengths[sequence].tolist(), strict=True):
            for start in range(0, length, _MASKED_QUERIES):
                queries = min(_MASKED_QUERIES, length - start)
                batches.append(AttentionBatch(1, queries, first + start + queries, sequence))
    return {
        "batches": tuple(batches),
        "key_rows": on_device(torch.from_numpy(pack.gathered_index), device),
        "key_sizes": tuple(pack.padded_lengths.tolist()),
    }


class PackedAttention(MegatronModule):
    """Causal self-attention with rotary embedding over a pack of sequences.

    It uses torch's scaled_dot_product_attention or, for short sequences on a CPU, batched matrix products.
    Padding comes after a sequence's real tokens, so the causal mask hides it. Under CP every rank gathers the
    keys and values of the whole pack.

    forward: takes query [t, heads, d], key [t, kv_heads, d] and value [t, kv_heads, e] of one TP and CP rank.
        Returns [t, heads * e].
    rope_frequencies: float32 [at most d / 2], the same in all layers, with which `forward` rotates query and
        key. None: query and key are rotated already.
    rope_factor: number that the cosines and sines of the rotary embedding are multiplied by.
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
        k_channels=None,
        v_channels=None,
        *,
        rope_frequencies: torch.Tensor | None = None,
        rope_factor: float = 1.0,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if config.attention_dropout or attention_dropout:
            raise NotImplementedError("attention dropout must be 0, because it makes log-probs random")
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.rope_frequencies, self.rope_factor = rope_frequencies, rope_factor

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ):
        packed = packed_seq_params
        if self.rope_frequencies is not None:
            rotation = packed.rotation(self.rope_frequencies, query.dtype, self.rope_factor)
            query, key = rotate(query, rotation), rotate(key, rotation)
        if self.cp_group.size() > 1:
            # One collective for both. Its backward pass sums the ranks' gradients (reduce-scatter).
            both = torch.cat([key, value], dim=-1)
            both = gather_from_sequence_parallel_region(both, group=self.cp_group)
            key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        queries = _take(query, packed.query_rows).split([batch.n * batch.q for batch in packed.batches])
        keys, values = (_take(x, packed.key_rows).split(packed.key_sizes) for x in (key, value))
        outputs = [
            self._attend(packed, batch, own, keys[batch.part], values[batch.part])
            for batch, own in zip(packed.batches, queries, strict=True)
        ]
        return _take(torch.cat(outputs), packed.inverse)

    def _attend(self, packed: PackedSequences, batch: AttentionBatch, query, key, value) -> torch.Tensor:
        """Return the attention output of one batch, [n * q, heads * e]. `batch` has the sizes n, q and k.

        query: [n * q, heads, d]. key: [rows, kv_heads, d] and value: [rows, kv_heads, e], of which the first
            n * k rows are used.
        """
        seen = batch.n * batch.k
        if seen < len(key):
            key, value = key[:seen], value[:seen]
        query, key, value = (x.unflatten(0, (batch.n, -1)) for x in (query, key, value))
        if packed.short:
            return _ShortAttention.apply(query, key, value, packed.mask(batch, torch.float32), self.scale)
        causal = batch.q == batch.k
        attended = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=None if causal else packed.mask(batch, query.dtype),
            is_causal=causal,
            scale=self.scale,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


class _ShortAttention(torch.autograd.Function):
    """Autograd function for attention over short sequences on a CPU, by batched matrix products.

    It computes softmax(scale * q k^T + mask) v, twice as fast as torch's flash kernel on a CPU.
    Inputs: query [n, q, heads, d], key [n, k, kv_heads, d], value [n, k, kv_heads, e], float32 mask [q, k].
    Output: [n * q, heads * e]. The query heads that share a kv head become rows of one matrix. bf16 inputs
    are computed in float32, so that scores are not rounded.
    """

    @staticmethod
    def forward(ctx, query, key, value, mask, scale):
        ctx.shape, ctx.scale, dtype = query.shape, scale, query.dtype
        groups = query.shape[2] // key.shape[2]
        query = _rows_of_heads(query.float() * scale, groups)
        key, value = _rows_of_heads(key.float()), _rows_of_heads(value.float())
        share = torch.baddbmm(mask.repeat(groups, 1), query, key.transpose(1, 2)).softmax(dim=-1)
        ctx.save_for_backward(query, key, value, share)
        return _heads_of_rows((share @ value).to(dtype), ctx.shape).flatten(2).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        query, key, value, share = ctx.saved_tensors
        n, q, heads, _ = ctx.shape
        key_shape, value_shape = ((n, x.shape[1], len(x) // n, x.shape[2]) for x in (key, value))
        dtype, grad = grad.dtype, _rows_of_heads(grad.view(n, q, heads, -1).float(), heads // key_shape[2])
        grad_value = share.transpose(1, 2) @ grad
        grad_scores = torch._softmax_backward_data(grad @ value.transpose(1, 2), share, -1, share.dtype)
        grad_query = (grad_scores @ key).mul_(ctx.scale)
        grad_key = grad_scores.transpose(1, 2) @ query
        shapes = (ctx.shape, key_shape, value_shape)
        grads = (
            _heads_of_rows(x.to(dtype), shape)
            for x, shape in zip((grad_query, grad_key, grad_value), shapes, strict=True)
        )
        return *grads, None, None


def _rows_of_heads(x: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """Return x [n, length, kv_heads * groups, d] reordered to [n * kv_heads, groups * length, d].

    groups: number of query heads that share a kv head.
    """
    return x.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3).flatten(0, 1)


def _heads_of_rows(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undo `_rows_of_heads`: return x [n * kv_heads, groups * length, d] as [n, length, heads, d].

    shape: n, length and heads of the result, and a last number that is ignored, because d is that of x.
    """
    n, length, heads, _ = shape
    kv_heads, d = len(x) // n, x.shape[-1]
    return (
        x.view(n, kv_heads, heads // kv_heads, length, d).permute(0, 3, 1, 2, 4).reshape(n, length, heads, d)
    )


def _take(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)

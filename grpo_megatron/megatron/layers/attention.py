"""Causal attention with rotary embedding over packs of sequences, for Megatron's local layers.

It replaces Megatron's local attention, which refuses packed sequences. It runs on a CPU, and on CUDA without
TransformerEngine.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.autograd.function import once_differentiable

from grpo_megatron.megatron.layers.packs import AttentionBatch, PackedSequences

# Channels that are added to queries and keys for sinks: fused kernels want multiples of 8.
_SINK_CHANNELS = 8


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


class PackedAttention(MegatronModule):
    """Causal self-attention with rotary embedding over a pack of sequences.

    It uses torch's scaled_dot_product_attention or, for short sequences on a CPU, batched matrix products.
    Padding comes after a sequence's real tokens, so the causal mask hides it. Under CP every rank gathers the
    keys and values of the whole pack.

    forward: takes query [t, heads, d], key [t, kv_heads, d] and value [t, kv_heads, e] of one TP and CP rank.
        Returns [t, heads * e].
    rope_frequencies: float32 [at most d / 2] on the host, with which `forward` rotates query and key. None:
        query and key are rotated already.
    rope_factor: number that the cosines and sines of the rotary embedding are multiplied by.
    window: number of tokens that a token sees, including itself; None: all that are not later.
    sinks: if True, there is a parameter softmax_offset [heads], under the name and with the division over TP
        that it has in Megatron's own attention. A head's number is one more score of its softmax, of a key
        without a value (arXiv:2309.17453). False: softmax_offset is None.
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
        window: int | None = None,
        sinks: bool = False,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = groups.tp
        if config.attention_dropout or attention_dropout:
            raise NotImplementedError("attention dropout must be 0, because it makes log-probs random")
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.rope_frequencies, self.rope_factor = rope_frequencies, rope_factor
        self.window = window
        self.softmax_offset = None
        if sinks:
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            heads = config.num_attention_heads // self.tp_group.size()
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(heads, dtype=config.params_dtype, device=device)
            )

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
        if self.window is not None:
            packed = packed.within(self.window)
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

        query: [n * q, heads, d]. key: [rows, kv_heads, d] and value: [rows, kv_heads, e], of which n * k rows
            from batch.first on are used.
        """
        seen = batch.n * batch.k
        if seen < len(key):
            key, value = (x[batch.first : batch.first + seen] for x in (key, value))
        query, key, value = (x.unflatten(0, (batch.n, -1)) for x in (query, key, value))
        if packed.short:
            mask = packed.mask(batch, torch.float32)
            if self.softmax_offset is not None:
                (query, key, value), mask = self._with_sinks(query, key, value), F.pad(mask, (1, 0))
            return _ShortAttention.apply(query, key, value, mask, self.scale)
        channels = value.shape[-1]
        causal = batch.q == batch.k and not (packed.window and packed.window < batch.q)
        mask = None if causal else packed.mask(batch, query.dtype)
        if self.softmax_offset is not None:
            query, key, value = self._with_sinks(query, key, value)
            # torch's flash kernel needs values with as many channels as keys.
            value = F.pad(value, (0, _SINK_CHANNELS))
            if causal:  # a query for the sink's row, so that the next query sees the sink and its own key
                query = F.pad(query, (0, 0, 0, 0, 1, 0))
            else:
                mask = F.pad(mask, (1, 0))
        attended = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=True,
        )
        attended = attended[:, :, -batch.q :, :channels]
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)

    def _with_sinks(self, query, key, value) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values with the heads' sinks as the first key of every sequence.

        The added channels are chosen so that a query times this key gives the sink of the query's head, and
        that all other products stay the same. The value of this key is zero.

        query: [n, q, heads, d]. key: [n, k, kv_heads, d]. value: [n, k, kv_heads, e].
        Returns [n, q, heads, d + 8], [n, 1 + k, kv_heads, d + 8] and [n, 1 + k, kv_heads, e].
        """
        further = query.new_zeros(*query.shape[:3], _SINK_CHANNELS)
        further[..., 0] = self.softmax_offset / self.scale
        query = torch.cat([query, further], dim=-1)
        sink = key.new_zeros(key.shape[0], 1, key.shape[2], query.shape[-1])
        sink[..., -_SINK_CHANNELS] = 1
        key = torch.cat([sink, F.pad(key, (0, _SINK_CHANNELS))], dim=1)
        return query, key, F.pad(value, (0, 0, 0, 0, 1, 0))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        state = self.state_dict(keep_vars=True)
        split = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(state, prefix, split, sharded_offsets, **groups)


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

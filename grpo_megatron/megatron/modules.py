"""Building blocks for Megatron's local layer spec: a norm that knows SP, attention over packs.

Megatron's own torch norm refuses sequence parallelism, its own core attention refuses packed
sequences. Both of ours also run on CUDA without TransformerEngine.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from grpo_megatron.batch.layout import Pack


class RMSNorm(torch.nn.RMSNorm):
    """Constructed the way Megatron's layer specs construct norms."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # Under SP each TP rank sees other tokens: finalize_model_grads sums marked gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, with the plan by which PackedAttention computes it.

    buckets: int64 [n, L] each: positions in the pack of n sequences of nearly equal length, the
    shorter ones padded at the end by repeating their last position. inverse int64 [t]: where each
    position of the pack is found in the concatenated bucket outputs.
    """

    buckets: tuple[torch.Tensor, ...] = ()
    inverse: torch.Tensor | None = None


# A bucket takes sequences down to this share of its longest one; more would waste attention
# FLOPs on padding, less would make many small kernels.
_BUCKET_RANGE = 0.8


def describe_pack(pack: Pack, device: torch.device) -> PackedSequences:
    lengths = pack.padded_lengths
    starts = pack.cu_seqlens_padded[:-1].astype(np.int64)
    order = np.argsort(-lengths, kind="stable")
    buckets, flat = [], []
    first = 0
    while first < len(order):
        longest = lengths[order[first]]
        members = order[first:][lengths[order[first:]] >= _BUCKET_RANGE * longest]
        offset = np.minimum(np.arange(longest)[None, :], lengths[members][:, None] - 1)
        buckets.append(starts[members][:, None] + offset)
        real = np.arange(longest)[None, :] < lengths[members][:, None]
        flat.append(np.where(real, buckets[-1], -1).ravel())
        first += len(members)
    flat = np.concatenate(flat)
    inverse = np.empty(int(lengths.sum()), dtype=np.int64)
    inverse[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    cu_seqlens = torch.from_numpy(pack.cu_seqlens).to(device)
    cu_seqlens_padded = torch.from_numpy(pack.cu_seqlens_padded).to(device)
    longest = int(lengths.max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=tuple(torch.from_numpy(bucket).to(device) for bucket in buckets),
        inverse=torch.from_numpy(inverse).to(device),
    )


class PackedAttention(MegatronModule):
    """Causal self-attention over a pack of sequences, on torch's scaled_dot_product_attention.

    query [t, heads, d], key and value [t, kv_heads, d] of one TP rank -> [t, heads * d]. Sequences
    of similar length are computed together. Padding sits behind a sequence's real tokens, where the
    causal mask hides it, so no mask tensor is ever built.
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
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        if groups.cp.size() > 1:
            raise NotImplementedError("PackedAttention computes whole sequences: context_parallel must be 1")
        if config.attention_dropout or attention_dropout:
            raise NotImplementedError("attention dropout makes log-probs random; RL needs 0")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None):
        outputs = []
        for bucket in packed_seq_params.buckets:
            index = bucket.flatten()
            q, k, v = (x.index_select(0, index).view(*bucket.shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, packed_seq_params.inverse)

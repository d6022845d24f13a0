"""Gated delta networks (Qwen3-Next, Qwen3.5) for SGLang on CPUs.

SGLang computes these layers with Triton kernels, or with a package for AMX processors. This module replaces
the kernels by `delta_rule`, and further kernels of these models by PyTorch operators.

Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from sglang.srt.models import qwen2_moe, qwen3_5, qwen3_next

from grpo_megatron.sglang.without_gpu import delta_rule


def register() -> None:
    """Replace SGLang's kernels for gated delta networks by this module's functions, in this process."""
    gdn_backend.causal_conv1d_fn = _convolve_prompts
    gdn_backend.causal_conv1d_update = _convolve_tokens
    gdn_backend.fused_gdn_gating = _gates_of_prompts
    gdn_backend.TritonGDNKernel = TorchDeltaRule
    fused_norm_gate.FusedRMSNormGated.forward = layernorm_gated.RMSNorm.forward = _gated_norm
    qwen3_next.fused_qkvzba_split_reshape_cat = _sections_by_head
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = _sections
    qwen3_5.fused_sigmoid_mul = _gated_attention
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated_expert


def _convolve_prompts(
    x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, **unused
):
    return delta_rule.convolve_prompts(
        x.t(), weight, conv_states, cache_indices.long(), query_start_loc.long(), has_initial_state
    ).t()


def _convolve_tokens(x, conv_states, weight, bias, activation, conv_state_indices):
    return delta_rule.convolve_tokens(x, weight, conv_states, conv_state_indices.long())


def _gates_of_prompts(A_log, a, b, dt_bias):
    log_decay, beta = delta_rule.gates(A_log, a, b, dt_bias)
    return log_decay[None], beta[None]


class TorchDeltaRule(LinearAttnKernelBase):
    """The gated delta rule in place of SGLang's Triton kernels."""

    supports_packed_decode = False

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, **unused):
        own = delta_rule.gates(A_log, a, b, dt_bias)
        return delta_rule.decode(q[0], k[0], v[0], *own, ssm_states, cache_indices.long())[None]

    def extend(
        self,
        q,
        k,
        v,
        g,
        beta,
        *,
        ssm_states,
        cache_indices,
        query_start_loc,
        extend_prefix_lens,
        **unused,
    ):
        outputs = delta_rule.extend(
            *(x[0] for x in (q, k, v, g, beta)),
            ssm_states,
            cache_indices.long(),
            query_start_loc.long(),
            extend_prefix_lens > 0,
        )
        return outputs[None], None, None


def _gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return delta_rule.gated_norm(x, gate, self.weight, self.eps)


def _sections(qkvz, ba, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Split the outputs of Qwen3.5's input projections.

    Return (queries, keys and values in one tensor; gates; betas before the sigmoid; alphas, which
    decays are computed from).
    """
    values = value_heads * value_dim
    mixed, gate = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return mixed, gate.unflatten(-1, (value_heads, value_dim)), b, a


def _sections_by_head(qkvz, ba, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Split Qwen3-Next's outputs, which are ordered by key head. Return the same as `_sections`."""
    values = value_heads // key_heads * value_dim
    parts = qkvz.unflatten(-1, (key_heads, -1)).split([key_dim, key_dim, values, values], dim=-1)
    *mixed, gate = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in ba.unflatten(-1, (key_heads, -1)).chunk(2, dim=-1))
    return torch.cat(mixed, dim=-1), gate.unflatten(-1, (value_heads, value_dim)), b, a


def _gated_attention(attended: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Return the outputs of attention [t, heads * d] times the sigmoid of their gates [t, heads, d]."""
    return (attended * gate.reshape(attended.shape).float().sigmoid()).to(attended.dtype)


def _add_gated_expert(hidden, gate_weight, shared, out) -> None:
    """Add the shared expert's output [t, h] to `out`, times the sigmoid of its gate's projection."""
    out += shared * (hidden @ gate_weight).sigmoid()[:, None]

"""Gated delta networks (Qwen3-Next, Qwen3.5) for SGLang on CPUs, with PyTorch operators.

SGLang computes these layers with Triton kernels, or with a package for AMX processors. This module replaces
the kernels. SGLang keeps for each running request a window of inputs of the convolution and a state of the
delta rule, in slots of a pool. The prefix cache copies slots.

Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels.kernel_backend import LinearAttnKernelBase
from sglang.srt.models import qwen2_moe, qwen3_5, qwen3_next
from torch.nn.functional import pad, rms_norm, silu, softplus

# Tokens of a prompt that are computed together.
_CHUNK = 64
# Added to the sum of squares by which queries and keys are normalised, as in the published models.
_NORM_EPS = 1e-6


def register() -> None:
    """Replace SGLang's kernels for gated delta networks by this module's functions, in this process."""
    gdn_backend.causal_conv1d_fn = convolve_prompts
    gdn_backend.causal_conv1d_update = convolve_tokens
    gdn_backend.fused_gdn_gating = _gates_of_prompts
    gdn_backend.TritonGDNKernel = DeltaRule
    fused_norm_gate.FusedRMSNormGated.forward = layernorm_gated.RMSNorm.forward = gated_norm
    qwen3_next.fused_qkvzba_split_reshape_cat = _sections_by_head
    qwen3_5.fused_qkvzba_split_reshape_cat_contiguous = _sections
    qwen3_5.fused_sigmoid_mul = _gated_attention
    qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated_shared_expert


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **unused,
) -> torch.Tensor:
    """Convolve each channel over the new tokens of each sequence, and apply silu. Return [channels, t].

    It replaces SGLang's causal_conv1d_fn.

    x: [channels, t], the new tokens of all sequences.
    weight: [channels, k]. The last column is the weight of the token itself.
    bias: None, because these models have no bias.
    conv_states: [slots, channels, k - 1], the last k - 1 inputs of each running sequence. It is updated.
    query_start_loc: int [n + 1], first token of each sequence, and t.
    cache_indices: int [n], slot of each sequence.
    has_initial_state: bool [n], False for a sequence that begins here, whatever its slot contains.
    """
    window = weight.shape[1] - 1
    starts, slots = query_start_loc.long(), cache_indices.long()
    count = len(slots)
    lengths = starts.diff()
    before = torch.where(has_initial_state[:, None, None], conv_states[slots], 0).transpose(1, 2)
    # `inputs` has for each sequence the window before it, then its new tokens.
    sequence = torch.arange(count).repeat_interleave(lengths)
    own = torch.arange(x.shape[1]) + (sequence + 1) * window
    firsts = starts[:-1] + torch.arange(count) * window
    offsets = torch.arange(window)
    inputs = before.new_empty(x.shape[1] + count * window, x.shape[0], dtype=torch.float32)
    inputs[(firsts[:, None] + offsets).flatten()] = before.flatten(0, 1).float()
    inputs[own] = x.t().float()
    total = sum(inputs[own - back] * weight[:, window - back].float() for back in range(window + 1))
    last = (firsts + lengths)[:, None] + offsets
    conv_states[slots] = inputs[last].transpose(1, 2).to(conv_states.dtype)
    return silu(total).to(x.dtype).t()


def convolve_tokens(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one new token of each sequence (decoding), and apply silu. Return [n, channels].

    It replaces SGLang's causal_conv1d_update. Arguments are those of `convolve_prompts`, with x [n, channels].
    """
    slots = conv_state_indices.long()
    inputs = torch.cat([conv_states[slots].float(), x.float()[..., None]], dim=-1)
    conv_states[slots] = inputs[..., 1:].to(conv_states.dtype)
    return silu((inputs * weight.float()).sum(-1)).to(x.dtype)


def _gates(A_log, a, b, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logarithm of each token's decay, its beta), float32 [..., value heads]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay, b.float().sigmoid()


def _gates_of_prompts(A_log, a, b, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    decay, beta = _gates(A_log, a, b, dt_bias)
    return decay[None], beta[None]


class DeltaRule(LinearAttnKernelBase):
    """The gated delta rule (arXiv:2412.06464) in place of SGLang's Triton kernels. Computed in float32.

    Queries and keys are normalised to length 1. States are [slots, value heads, value dim, key dim].
    """

    supports_packed_decode = False

    def decode(self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, **unused):
        """Return the outputs for one new token of each sequence, [1, n, value heads, value dim].

        q, k: [1, n, key heads, key dim]. v: [1, n, value heads, value dim]. a, b: [n, value heads].
        ssm_states: the pool of states, which is updated. cache_indices: [n], slot of each sequence.
        """
        slots, groups = cache_indices.long(), v.shape[2] // k.shape[2]
        query, key = (_normalised(x[0]).repeat_interleave(groups, 1)[..., None] for x in (q, k))
        decay, beta = (x[..., None, None] for x in _gates(A_log, a, b, dt_bias))
        state = ssm_states[slots].float() * decay.exp()
        change = (v[0].float()[..., None] - state @ key) * beta
        state = torch.baddbmm(state.flatten(0, 1), change.flatten(0, 1), key.flatten(0, 1).mT)
        state = state.view(*change.shape[:2], *state.shape[1:])
        ssm_states[slots] = state.to(ssm_states.dtype)
        return (state @ (query * k.shape[-1] ** -0.5)).squeeze(-1)[None].to(v.dtype)

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
        """Return (outputs for the new tokens of prompts [1, t, value heads, value dim], None, None).

        q, k, v: as for `decode`, with all new tokens of the sequences in place of n.
        g, beta: [1, t, value heads], logarithm of each token's decay, and its beta.
        query_start_loc: int [n + 1], first token of each sequence, and t.
        extend_prefix_lens: int [n], number of earlier tokens of each sequence. A sequence without earlier
            tokens begins with a state of zero, whatever its slot contains.
        """
        slots, groups = cache_indices.long(), v.shape[2] // k.shape[2]
        query, key = (_normalised(x[0]).repeat_interleave(groups, 1) for x in (q, k))
        query = query * k.shape[-1] ** -0.5
        tokens = torch.cat([query, key, v[0].float(), g[0, ..., None], beta[0, ..., None]], dim=-1)
        sizes = [query.shape[-1], key.shape[-1], v.shape[-1], 1, 1]
        states = torch.where((extend_prefix_lens > 0)[:, None, None, None], ssm_states[slots].float(), 0)
        starts, lengths = query_start_loc[:-1].long(), query_start_loc.long().diff()
        out = torch.empty(v.shape[1:])
        for first in range(0, int(lengths.max()), _CHUNK):
            rows = (lengths > first).nonzero()[:, 0]
            count = (lengths[rows] - first).clamp(max=_CHUNK)
            place = torch.arange(int(count.max()))
            real = place < count[:, None]
            index = (starts[rows] + first)[:, None] + place
            # Unused places at the end of a chunk have key 0, beta 0 and decay 1. They keep the state.
            chunk = torch.where(real[..., None, None], tokens[index.where(real, 0)], 0).transpose(1, 2)
            outputs, states[rows] = _chunk(*chunk.split(sizes, dim=-1), states[rows])
            out[index[real]] = outputs.transpose(1, 2)[real]
        ssm_states[slots] = states.to(ssm_states.dtype)
        return out[None].to(v.dtype), None, None


def _chunk(query, key, value, log_decay, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs [n, heads, c, value dim], new state) for c tokens of each sequence.

    A token's change of the state depends on the changes by the tokens before it. A triangular system
    resolves this for all tokens at once (arXiv:2412.06464, section 3.3).

    query, key: [n, heads, c, key dim]. value: [n, heads, c, value dim]. log_decay, beta: [n, heads, c, 1].
    state: [n, heads, value dim, key dim], before the first token.
    """
    total = log_decay.double().cumsum(-2)
    future = torch.ones(key.shape[-2], key.shape[-2], dtype=torch.bool).triu(1)
    decay = (total - total.mT).float().masked_fill(future, -torch.inf).exp()
    since, until = total.float().exp(), (total[..., -1:, :] - total).float().exp()
    system = (key @ key.mT) * decay * beta
    target = beta * (value - since * (key @ state.mT))
    change = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    outputs = ((query @ key.mT) * decay) @ change + since * (query @ state.mT)
    return outputs, state * since[..., -1:, :] + change.mT @ (key * until)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt()


def gated_norm(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return the RMS norm of x [..., d] times the silu of its gate. It replaces two classes' forward."""
    normed = rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
    return (normed * silu(gate.float())).to(x.dtype)


def _sections(qkvz, ba, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Split the outputs of Qwen3.5's input projections. Return (queries, keys and values; gates; b; a)."""
    values = value_heads * value_dim
    mixed, gate = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return mixed, gate.unflatten(-1, (value_heads, value_dim)), b, a


def _sections_by_head(qkvz, ba, key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Do what `_sections` does for Qwen3-Next, whose outputs are ordered by key head."""
    values = value_heads // key_heads * value_dim
    parts = qkvz.unflatten(-1, (key_heads, -1)).split([key_dim, key_dim, values, values], dim=-1)
    *mixed, gate = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in ba.unflatten(-1, (key_heads, -1)).chunk(2, dim=-1))
    return torch.cat(mixed, dim=-1), gate.unflatten(-1, (value_heads, value_dim)), b, a


def _gated_attention(attended: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Return the outputs of attention [t, heads * d] times the sigmoid of their gates [t, heads, d]."""
    return (attended * gate.reshape(attended.shape).float().sigmoid()).to(attended.dtype)


def _add_gated_shared_expert(hidden, gate_weight, shared, out) -> None:
    """Add the shared expert's output [t, h] to `out`, times the sigmoid of its gate's projection."""
    out += shared * (hidden @ gate_weight).sigmoid()[:, None]

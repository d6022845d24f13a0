"""Faster versions of SGLang's small operators for float32 on CPUs.

In a decoding step the tensors are so small that an operator's launch overhead dominates. SGLang's native
versions launch eight operators for a norm and thirty for a rotary embedding. The versions here launch fewer.
Other dtypes and the special cases of these classes keep the native versions.

Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

from functools import cache, partial

import torch
from sglang.kernels.fused_op import BaseFusedOp
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod, UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
from torch.nn.functional import linear, silu


def register(platform_key: str) -> None:
    """Replace SGLang's slow operators with the operators of this module, in this process, from now on.

    platform_key: key under which SGLang looks up the operators of the CPU platform
        (TorchCpuPlatform.get_dispatch_key_name).
    """
    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, platform_key)
    # These subclasses differ only in their frequencies.
    for kind in (RotaryEmbedding, LinearScalingRotaryEmbedding, Llama3RotaryEmbedding):
        BaseFusedOp.register_oot_forward(kind, rotate, platform_key)
    BaseFusedOp.register_oot_forward(UnquantizedFusedMoEMethod, experts, platform_key)


def store_weights(model: torch.nn.Module) -> None:
    """Store weights of SGLang's model as this module's operators and the weight syncs need them."""
    _store_by_column(model)
    for layer in model.modules():
        sinks = getattr(layer, "sinks", None)
        if isinstance(sinks, torch.nn.Parameter):
            # SGLang has gpt-oss's sinks in bfloat16, also if it computes in float32.
            dtype = layer.qkv_proj.weight.dtype
            layer.sinks = torch.nn.Parameter(sinks.data.to(dtype), requires_grad=False)


def _store_by_column(model: torch.nn.Module) -> None:
    """Store the weights [out, in] of linear layers by column: their transpose [in, out] becomes contiguous.

    Matrix products with about ten tokens are a quarter to a third faster with this layout. Names, shapes and
    values stay the same. Weight updates copy into the parameter, so they work with any layout.
    """
    for layer in model.modules():
        if isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod:
            weight = layer.weight
            if weight.dtype == torch.float32 and weight.dim() == 2:  # not the weights of a convolution
                weight.data = weight.data.t().contiguous().t()


@cache
def _scalar(value: float) -> torch.Tensor:
    """Return a constant as a cached scalar tensor, for torch operators that accept no Python numbers."""
    return torch.tensor(value)


def rms_norm(self: RMSNorm, x, residual=None, post_residual_addition=None, quant_linear=None):
    """Return RMSNorm(x) for x [..., h]. With a residual, return (RMSNorm(x + residual), x + residual).

    The function replaces RMSNorm's native forward for float32, and launches fewer operators. It calls the
    native forward for other dtypes and special settings.
    """
    special = self.variance_size_override is not None or self.fp32_residual or not self.has_weight
    if x.dtype != torch.float32 or special or post_residual_addition is not None:
        return self.forward_native(x, residual, post_residual_addition)
    if residual is not None:
        x = x + residual
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = torch.addcmul(_scalar(self.variance_epsilon), length, length, value=1 / x.shape[-1]).rsqrt_()
    normed = (x * inverse).mul_(self.weight)
    return normed if residual is None else (normed, x)


def rotate(self: RotaryEmbedding, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """Return (query, key), each [tokens, heads * head_size], with the rotary embedding applied.

    The function replaces RotaryEmbedding's native forward for float32, and launches fewer operators. It calls
    the native forward for other dtypes and special settings.
    """
    whole = self.is_neox_style and self.rotary_dim == self.head_size and not hasattr(self, "sin_cos_cache")
    if (
        query.dtype != torch.float32
        or not whole
        or offsets is not None
        or fused_set_kv_buffer_arg is not None
    ):
        return self.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
    of_positions = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype)
    cos, sin = of_positions.view(-1, 1, 2, self.head_size // 2).unbind(2)

    def rotated(x):
        halves = x.view(len(cos), -1, 2, self.head_size // 2)
        first, second = halves.unbind(2)
        turned = halves * cos[:, :, None]
        turned[:, :, 0].addcmul_(second, sin, value=-1)
        turned[:, :, 1].addcmul_(first, sin)
        return turned.view(x.shape)

    return rotated(query), rotated(key)


def replace_joint_norms(model: torch.nn.Module) -> None:
    """Replace MiniMax-M2's norms of queries and keys, whose kernels need a GPU or AMX.

    model: SGLang's model. Models without such norms are not changed.
    """
    for layer in model.modules():
        norms = getattr(layer, "qk_norm_impl", None)
        if norms is not None:
            norms._forward_impl = partial(_joint_norms, norms)


def _joint_norms(norms, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [tokens, heads * head_size], each normalised over the heads of all ranks.

    norms: SGLang's MiniMaxM2QKRMSNorm.
    """
    from sglang.srt.models.minimax_m2 import attn_tp_all_reduce

    weights, ranks = (norms._q_norm.weight, norms._k_norm.weight), norms._world_size
    squares = torch.stack([x.float().square().sum(-1, keepdim=True) for x in (query, key)])
    if ranks > 1:
        squares = attn_tp_all_reduce(squares)
    query, key = (
        (x * torch.rsqrt(own / (len(weight) * ranks) + norms._eps) * weight).to(x.dtype)
        for x, own, weight in zip((query, key), squares, weights, strict=True)
    )
    return query, key


def experts(self: UnquantizedFusedMoEMethod, layer, dispatch_output):
    """Return the output of an MoE layer's experts, as SGLang's StandardCombineInput.

    The function replaces SGLang's native version, which is wrong under expert parallelism: the index of an
    expert on another rank is -1, and the native version uses -1 as an index into this rank's experts. This
    function skips these experts. It also computes gpt-oss's experts, whose activation SGLang would compile.
    """
    x, (weights, chosen, _) = dispatch_output.hidden_states, dispatch_output.topk_output
    is_clamped = layer.moe_runner_config.gemm1_alpha is not None
    if not is_clamped and not (chosen < 0).any():
        return self.forward_native(layer, dispatch_output)
    out = torch.zeros_like(x)
    for index in range(len(layer.w13_weight)):
        tokens, places = (chosen == index).nonzero(as_tuple=True)
        if is_clamped:
            result = _clamped_expert(layer, index, x[tokens])
        else:
            gate, up = linear(x[tokens], layer.w13_weight[index]).chunk(2, dim=-1)
            result = linear(silu(gate) * up, layer.w2_weight[index])
        out.index_add_(0, tokens, result * weights[tokens, places, None].to(x.dtype))
    return StandardCombineInput(hidden_states=out)


def _clamped_expert(layer, index: int, x: torch.Tensor) -> torch.Tensor:
    """Return the output of one of gpt-oss's experts for x [tokens, h]. Gate and up rows are interleaved."""
    alpha, limit = layer.moe_runner_config.gemm1_alpha, layer.moe_runner_config.gemm1_clamp_limit
    fused = linear(x, layer.w13_weight[index], layer.w13_weight_bias[index].to(x.dtype))
    gate, up = fused[..., ::2].clamp(max=limit), fused[..., 1::2].clamp(-limit, limit)
    activated = gate * torch.sigmoid(gate * alpha) * (up + 1)
    return linear(activated, layer.w2_weight[index], layer.w2_weight_bias[index].to(x.dtype))

"""FP8 linear layers and experts for SGLang on a CPU.

They replace Triton kernels. Everything else is SGLang's own code.

A weight has one scale per block of 128 x 128. The input of a matrix product has one scale per 128 features of
a token. Sums are float32. Linear layers and experts choose the scale of an input differently, like the GPU
kernels:

- Linear layers use a power of two, as DeepGEMM's kernel for Hopper and TransformerEngine's blockwise recipe
  do.
- Experts use the largest magnitude divided by 448, as SGLang's kernel for experts on Ada and Hopper does.

Written for SGLang 0.5.23. Imported only in SGLang's own processes.
"""

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import fp8_utils
from torch.nn.functional import silu

from grpo_megatron.weights.fp8_blocks import quantise


def register() -> None:
    """Make SGLang use the FP8 linear layers and experts of this module, in this process.

    The functions of this module replace functions of SGLang that need Triton. Only layers that are created
    from now on use them.
    """
    fp8_utils.triton_w8a8_block_fp8_linear = linear
    fused_moe.fused_experts = experts


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a linear layer with FP8 weights on a CPU. Return [..., out] in the input's dtype.

    The function replaces SGLang's triton_w8a8_block_fp8_linear, which needs a GPU. Products are summed in
    float32.

    input: [..., n] of any float dtype. It is quantised to FP8 too.
    weight: float8_e4m3fn [out, n].
    block_size: (rows, columns) of the weight that share a scale.
    weight_scale: float32, one scale per block of the weight.
    input_scale: must be None. Raises NotImplementedError for an input that is quantised already.
    """
    if input_scale is not None:
        raise NotImplementedError("FP8 products on a CPU do not support an input that is already quantised")
    values, scales = quantise(input.reshape(-1, input.shape[-1]), rows=1)
    x = values.float() * scales.repeat_interleave(block_size[1], 1)
    out = (x @ _dequantised(weight, weight_scale, block_size).t()).to(input.dtype)
    return (out if bias is None else out + bias).view(*input.shape[:-1], len(weight))


def experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_output: StandardTopKOutput,
    moe_runner_config: MoeRunnerConfig,
    *,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    block_shape: list[int],
    use_fp8_w8a8: bool,
    **others,
) -> torch.Tensor:
    """Compute the experts of an MoE layer with FP8 weights on a CPU. Return [tokens, h] in the input's dtype.

    The function replaces SGLang's Triton kernels.

    hidden_states: [tokens, h], the input.
    w1: gate and up projections, float8_e4m3fn [experts, 2f, h].
    w2: down projections, float8_e4m3fn [experts, h, f].
    topk_output: indices and weights of each token's experts. The index of an expert on another rank is -1.
    moe_runner_config: SGLang's settings of the layer. Only plain SwiGLU is supported, see `_is_plain`.
    w1_scale, w2_scale: float32, one scale per block of `w1` and `w2`.
    block_shape: (rows, columns) of a block.
    others: further arguments of SGLang, which must be None or False.

    Four values are rounded to the input's dtype: the output of the first product, the output of SwiGLU, the
    output of the second product times the expert's weight, and the sum over a token's experts. The model's
    routed scaling factor is not applied here, because without CUDA the model applies it itself.

    Raises NotImplementedError for arguments that are not supported.
    """
    config = moe_runner_config
    unlike = {name for name, value in others.items() if value is not None and value is not False}
    if unlike or not use_fp8_w8a8 or not _is_plain(config):
        raise NotImplementedError(
            f"FP8 experts on a CPU do not support these arguments: {sorted(unlike)}, "
            f"use_fp8_w8a8={use_fp8_w8a8}, {config}"
        )
    dtype, (weights, chosen, _) = hidden_states.dtype, topk_output
    x, out = _rounded(hidden_states, block_shape[1]), torch.zeros_like(hidden_states, dtype=torch.float32)
    for expert in chosen[chosen >= 0].unique().tolist():
        tokens, places = (chosen == expert).nonzero(as_tuple=True)
        gate_up = (x[tokens] @ _dequantised(w1[expert], w1_scale[expert], block_shape).t()).to(dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = _rounded((silu(gate) * up).to(dtype), block_shape[1])
        down = inner @ _dequantised(w2[expert], w2_scale[expert], block_shape).t()
        out.index_add_(0, tokens, (down * weights[tokens, places, None]).to(dtype).float())
    return out.to(dtype)


def _is_plain(config: MoeRunnerConfig) -> bool:
    """Return True if the FP8 experts of this module can compute an MoE layer with this configuration.

    They support SwiGLU without limits or other parameters, if the experts' outputs are weighted after the
    second matrix product and summed per token.
    """
    limits = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    other = (
        config.apply_router_weight_on_input or config.no_combine or any(limit is not None for limit in limits)
    )
    return config.activation == "silu" and config.is_gated and not other


def _dequantised(weight: torch.Tensor, scale: torch.Tensor, block_size: list[int]) -> torch.Tensor:
    """Return the dequantised weight, float32 [out, n]: each element times the scale of its block."""
    rows, columns = block_size
    return weight.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _rounded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Round x [tokens, n] to FP8 numbers, as SGLang's GPU kernel for experts does. Return float32.

    Each group of `columns` features of a token has its own scale, which need not be a power of two.
    """
    groups = x.float().unflatten(-1, (-1, columns))
    # The minimum avoids a division by zero, as in the kernel.
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    return ((groups * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)).flatten(-2)

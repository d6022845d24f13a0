"""SGLang's linear layers and experts in FP8 on a CPU, where it would start Triton kernels.

A weight has a scale for each block of 128 x 128, the input of a product one for each token's 128 features; sums are float32.
Everything around is SGLang's own. What differs is the scale of an input. Linear layers are as DeepGEMM's kernel for Hopper computes
them, and as TransformerEngine's blockwise recipe: it is a power of two. SGLang's kernel for experts, on Ada and Hopper, takes the
largest magnitude over 448 as it is.

Written for SGLang 0.5.23. Imported in SGLang's own processes only.
"""

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import fp8_utils
from torch.nn.functional import silu

from grpo_megatron.weights.fp8_blocks import quantise


def register() -> None:
    """For layers that are made from now on."""
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
    """input [..., n] of any float type, weight float8_e4m3fn [out, n] -> [..., out] in the input's dtype, summed in float32."""
    if input_scale is not None:
        raise NotImplementedError("an input that is quantised already")
    values, scales = quantise(input.reshape(-1, input.shape[-1]), rows=1)
    x = values.float() * scales.repeat_interleave(block_size[1], 1)
    out = (x @ _multiplied(weight, weight_scale, block_size).t()).to(input.dtype)
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
    """hidden_states [tokens, h], gate and up w1 [experts, 2f, h] and down w2 [experts, h, f] in float8_e4m3fn -> [tokens, h].

    Rounded to the input's dtype are the outputs of both products, the second one times the expert's weight, SwiGLU, and the sum over
    a token's experts. An expert of another rank is -1. The model's factor of experts is left to the model, which multiplies by it
    where there is no CUDA.
    """
    config = moe_runner_config
    unlike = {name for name, value in others.items() if value is not None and value is not False}
    if unlike or not use_fp8_w8a8 or not _is_plain(config):
        raise NotImplementedError(f"experts in FP8 with {sorted(unlike)} and {config}")
    dtype, (weights, chosen, _) = hidden_states.dtype, topk_output
    x, out = _rounded(hidden_states, block_shape[1]), torch.zeros_like(hidden_states, dtype=torch.float32)
    for number in chosen[chosen >= 0].unique().tolist():
        tokens, places = (chosen == number).nonzero(as_tuple=True)
        gate_up = (x[tokens] @ _multiplied(w1[number], w1_scale[number], block_shape).t()).to(dtype)
        gate, up = gate_up.float().chunk(2, dim=-1)
        inner = _rounded((silu(gate) * up).to(dtype), block_shape[1])
        down = inner @ _multiplied(w2[number], w2_scale[number], block_shape).t()
        out.index_add_(0, tokens, (down * weights[tokens, places, None]).to(dtype).float())
    return out.to(dtype)


def _is_plain(config: MoeRunnerConfig) -> bool:
    """Whether experts are SwiGLU alone, each weighted after its second product."""
    limits = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    other = (
        config.apply_router_weight_on_input or config.no_combine or any(limit is not None for limit in limits)
    )
    return config.activation == "silu" and config.is_gated and not other


def _multiplied(weight: torch.Tensor, scale: torch.Tensor, block_size: list[int]) -> torch.Tensor:
    """float32 [out, n] of elements [out, n] and the scales of their blocks."""
    rows, columns = block_size
    return weight.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


def _rounded(x: torch.Tensor, columns: int) -> torch.Tensor:
    """float32 [tokens, n] of x [tokens, n]: elements of FP8 times the scale of their token's features, no power of two."""
    groups = x.float().unflatten(-1, (-1, columns))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10)  # as the kernel: not to divide by zero
    return ((groups * (448 / largest)).to(torch.float8_e4m3fn).float() * (largest / 448)).flatten(-2)

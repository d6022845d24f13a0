"""SGLang's linear layers in FP8 on a CPU, where it would start Triton kernels.

As DeepGEMM's kernel for Hopper computes them, and TransformerEngine's blockwise recipe: the weight has a scale for each block of
128 x 128, the input one for each token's 128 features, all of them powers of two. Everything around is SGLang's own.

Written for SGLang 0.5.23. Imported in SGLang's own processes only.
"""

import torch
from sglang.srt.layers.quantization import fp8_utils

from grpo_megatron.weights.fp8_blocks import quantise


def register() -> None:
    """For layers that are made from now on."""
    fp8_utils.triton_w8a8_block_fp8_linear = linear


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
    rows, columns = block_size
    values, scales = quantise(input.reshape(-1, input.shape[-1]), rows=1)
    x = values.float() * scales.repeat_interleave(columns, 1)
    spread = weight_scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    out = (x @ (weight.float() * spread).t()).to(input.dtype)
    return (out if bias is None else out + bias).view(*input.shape[:-1], len(weight))

"""FP8 weights with one scale per block, as in DeepSeek-V3's checkpoints (arXiv:2412.19437, section 3.3)."""

import torch

from grpo_megatron.model.block_scaled import BLOCK

_LEAST_EXPONENT = -126  # the smallest exponent of a normal float32 number


def quantise(matrix: torch.Tensor, rows: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to FP8 with one scale per block of `rows` x 128 elements. Return (elements, scales).

    - elements: float8_e4m3fn [r, c]. An element times the scale of its block is the original value, rounded.
    - scales: float32 [ceil(r / rows), ceil(c / 128)].

    Each scale is the smallest power of two for which the largest magnitude of the block, divided by the
    scale, is at most 448. But no scale is below 2**-126, and a block of zeros has the scale 1.
    TransformerEngine's blockwise recipe chooses scales in the same way, so FP8 training and an engine compute
    with the same numbers. The rounding error is at most 2**-4 of the value, or 2**-10 of the scale where the
    element is subnormal in FP8.

    matrix: [r, c] of any float dtype.
    rows: number of rows of a block; 1 for activations.
    Raises ValueError if the matrix contains NaN or infinity.
    """
    height, width = matrix.shape
    padded = matrix.new_zeros(-(-height // rows) * rows, -(-width // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:height, :width] = matrix
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError("it contains NaN or infinity")
    # largest = fraction * 2**exponent and 448 = 0.875 * 2**9. frexp is exact, while a logarithm could be
    # rounded past a power of two.
    fraction, exponent = torch.frexp(largest)
    exponent = (exponent - 9 + (fraction > 0.875)).clamp_min(_LEAST_EXPONENT)
    # The scale of a block of zeros is arbitrary.
    scale = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    blocks.div_(scale[:, None, :, None])
    return padded[:height, :width].to(torch.float8_e4m3fn), scale


def settings(kept: list[str]) -> dict:
    """Return the `quantization_config` of config.json that describes block-scaled FP8 weights to SGLang.

    kept: names of the modules whose weights are not quantised.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",  # scales are powers of two, those of activations too
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }

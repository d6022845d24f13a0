"""FP8 weights with a scale for each block, as DeepSeek-V3's checkpoints have them (arXiv:2412.19437, section 3.3)."""

import torch

from grpo_megatron.model.block_scaled import BLOCK

_LEAST_EXPONENT = -126  # of normal float32 numbers


def quantise(matrix: torch.Tensor, rows: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [r, c], scales float32 [r / rows, c / 128], rounded up) of a matrix [r, c] of any float type.

    rows: of a block; 1 for activations. Elements times the scale of their block are the matrix: within half a step of e4m3, 2**-4 of
    the element, or 2**-10 of the scale for those that are subnormal in FP8. Scales are the least powers of two with which the largest
    of a block is at most 448, as TransformerEngine's blockwise recipe has them, so that training in it and an engine compute with the
    same numbers. Raises ValueError for NaN and infinity.
    """
    height, width = matrix.shape
    padded = matrix.new_zeros(-(-height // rows) * rows, -(-width // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:height, :width] = matrix
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError("it has NaN or infinite elements")
    # largest = fraction * 2**exponent and 448 = 0.875 * 2**9; no logarithm, which could be rounded over a power of two.
    fraction, exponent = torch.frexp(largest)
    exponent = (exponent - 9 + (fraction > 0.875)).clamp_min(_LEAST_EXPONENT)
    # A block of zeros has any scale.
    scale = torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    blocks.div_(scale[:, None, :, None])
    return padded[:height, :width].to(torch.float8_e4m3fn), scale


def settings(kept: list[str]) -> dict:
    """`quantization_config` of config.json. kept: modules whose matrices stay as they are."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",  # powers of two, for activations as well
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }

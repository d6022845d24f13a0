"""FP8 weights with a scale for each block, as DeepSeek-V3's checkpoints have them (arXiv:2412.19437, section 3.3)."""

import torch

BLOCK = 128
_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [r, c], weight_scale_inv float32 [r / 128, c / 128], rounded up) of a matrix [r, c] of any float type.

    Elements times the scale of their block are the weight: within half a step of e4m3, 2**-4 of the element, or 2**-10 of the scale for
    those that are subnormal in FP8. The largest of a block becomes 448. Raises ValueError for NaN and infinity.
    """
    rows, columns = weight.shape
    padded = weight.new_zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(largest).all():
        raise ValueError("it has NaN or infinite elements")
    # A block of zeros has any scale; the least normal number keeps tiny ones from being divided by zero.
    scale = torch.where(largest > 0, (largest / _LARGEST).clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    blocks.div_(scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    return padded[:rows, :columns].to(torch.float8_e4m3fn), scale


def settings(kept: list[str]) -> dict:
    """`quantization_config` of config.json. kept: modules whose matrices stay as they are."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }

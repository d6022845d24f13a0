"""FP8 weights with scales for blocks, against float64."""

import pytest
import torch

from grpo_megatron.weights.fp8_blocks import BLOCK, quantise


def dequantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return every element times the scale of its block, as DeepSeek defines it, in float64."""
    rows, columns = values.shape
    spread = scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    return values.double() * spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1), (128, 5)])
def test_quantised_is_the_nearest_within_each_block(shape, dtype):
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-6, 3, shape[1])).to(dtype)
    values, scale = quantise(weight)
    assert (values.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale.shape == tuple(-(-size // BLOCK) for size in shape)
    exact = weight.double()
    spread = dequantised(torch.ones(shape), scale)
    error = (dequantised(values, scale) - exact).abs()
    # Half a step is 2**-4 of the element, or 2**-10 of the scale among FP8's subnormal numbers. float32's
    # rounding of the quotient comes on top.
    assert (error <= torch.maximum(exact.abs() * 2**-4, spread * 2**-10) * (1 + 1e-5)).all()
    for row in range(0, shape[0], BLOCK):
        for column in range(0, shape[1], BLOCK):
            block = values[row : row + BLOCK, column : column + BLOCK].float()
            assert 224 <= block.abs().max() <= 448
    assert (torch.frexp(scale)[0] == 0.5).all()


def test_the_largest_of_a_block_is_the_largest_fp8_number_or_below():
    weight = torch.zeros(128, 3 * 128)
    weight[0, ::128] = torch.tensor([448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(1e9)), 3.5])
    values, scale = quantise(weight)
    assert scale.tolist() == [[1.0, 2.0, 2.0**-7]]
    assert values[0, ::128].tolist() == [448.0, 224.0, 448.0]


def test_a_row_has_scales_of_its_own():
    torch.manual_seed(0)
    values, scale = quantise(torch.randn(3, 256) * torch.tensor([[1.0], [100.0], [1e-4]]), rows=1)
    assert scale.shape == (3, 2)
    assert (values.float().abs().amax(1) >= 224).all()


def test_zeros_and_tiny_numbers_stay_finite():
    weight = torch.zeros(256, 128)
    weight[128:] = 1e-42  # subnormal in float32
    values, scale = quantise(weight)
    assert torch.isfinite(scale).all()
    assert torch.isfinite(values.float()).all()
    assert (dequantised(values, scale)[:128] == 0).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_has_no_scale_is_refused(wrong):
    weight = torch.ones(128, 128)
    weight[3, 4] = wrong
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        quantise(weight)

"""Functions for test_kernels.py that need TransformerEngine: its quantizers with emulated casts, against
float64.
"""

import torch
import torch.nn.functional as F

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def rounded(values: torch.Tensor, kind) -> torch.Tensor:
    """Round float64 values to the nearest FP8 number, ties to even, at most the largest one."""
    mantissa, lowest, top = kind
    exponent = torch.floor(torch.log2(values.abs().clamp_min(2.0**-60))).clamp_min(lowest)
    step = torch.exp2(exponent - mantissa)
    return (torch.round(values / step) * step).clamp(-top, top)


def _equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare, except for the rounding of the float32 scale."""
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


def _kinds():
    import transformer_engine_torch as tex

    return ((tex.DType.kFloat8E4M3, E4M3), (tex.DType.kFloat8E5M2, E5M2))


def scale_of_the_tensor() -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    for number, kind in _kinds():
        quantizer = Float8CurrentScalingQuantizer(number, device=torch.device("cpu"))
        x = torch.randn(4, 6, 16) * 3
        scale = kind[2] / x.double().abs().max()
        expected = rounded(x.double() * scale, kind) / scale
        cast = quantizer(x)
        _equal(cast.dequantize(), expected)
        _equal(
            cast._transpose.view(16, 24).view(_torch_type(kind)).double() * cast._scale_inv,
            expected.view(24, 16).T,
        )
        assert not quantizer(torch.zeros(16, 16)).dequantize().any()


def _torch_type(kind) -> torch.dtype:
    return torch.float8_e4m3fn if kind is E4M3 else torch.float8_e5m2


def scale_that_is_given() -> None:
    """Check delayed scaling: values beyond the range are clipped, and the amax is noted."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    for number, kind in _kinds():
        scale, amax = torch.tensor([100.0]), torch.tensor([0.5])
        x = torch.randn(16, 32) * kind[2] / 150
        found = Float8Quantizer(scale, amax, number)(x).dequantize()
        _equal(found, rounded(x.double() * 100, kind) / 100)
        assert float(found.abs().max()) < float(x.abs().max())
        assert float(amax) == float(x.abs().max())


def histories_become_scales() -> None:
    import transformer_engine_torch as tex

    histories = [torch.tensor([[0.0, 0.0], [8.0, 1.0], [2.0, 3.0]]), torch.zeros(2, 1)]
    scales, of_step = [torch.ones(2), torch.full((1,), 7.0)], torch.tensor([4.0, 5.0, 0.0])
    tex.fused_amax_and_scale_update_after_reduction(
        of_step, histories, scales, "max", tex.DType.kFloat8E4M3, 1
    )
    assert scales[0].tolist() == [448 / 8 / 2, torch.tensor(448 / 5 / 2).item()]
    assert scales[1].tolist() == [7.0]  # nothing was seen
    # The step's values went to the end, and the place for the next ones is free.
    assert histories[0].tolist() == [[0.0, 0.0], [2.0, 3.0], [4.0, 5.0]]


def _blocks(x: torch.Tensor, rows: int, kind) -> torch.Tensor:
    """Quantise x [M, K] with a power of two as the scale of each block of rows x 128."""
    m, k = x.shape
    padded = F.pad(x.double(), (0, -k % 128, 0, -m % rows)).unfold(0, rows, rows).unfold(1, 128, 128)
    scale = torch.exp2(torch.floor(torch.log2(kind[2] / padded.abs().amax((2, 3), keepdim=True))))
    values = rounded(padded * scale, kind) / scale
    return values.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:m, :k]


def scales_of_blocks() -> None:
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from grpo_megatron.megatron.without_gpu.emulation.quantization import operand

    number, kind = _kinds()[0]
    for dimension, rows in ((1, 1), (2, 128)):
        quantizer = Float8BlockQuantizer(
            number, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=dimension
        )
        for shape in ((256, 384), (200, 144)):
            x = torch.randn(shape) * torch.rand(shape[0], 1) * 10
            cast = quantizer(x)
            _equal(operand(cast, columnwise=False), _blocks(x, rows, kind))
            _equal(operand(cast, columnwise=True), _blocks(x.T.contiguous(), rows, kind).T)


def blocks_as_engines_have_them() -> None:
    """Check that trainer and engines in FP8 have the same bits: elements and scales, of weights and
    activations.
    """
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    from grpo_megatron.weights.fp8_blocks import quantise

    recipe = Float8BlockScaling()
    for settings, dimension, rows in (
        (recipe.fp8_quant_fwd_weight, 2, 128),
        (recipe.fp8_quant_fwd_inp, 1, 1),
    ):
        quantizer = Float8BlockQuantizer(
            _kinds()[0][0],
            rowwise=True,
            columnwise=False,
            amax_epsilon=settings.amax_epsilon,
            force_pow_2_scales=settings.power_2_scale,
            block_scaling_dim=dimension,
        )
        x = (torch.randn(256, 384) * torch.logspace(-9, 4, 256)[:, None]).bfloat16()
        x[128:, :128] = 0
        x[0, 128] = 448 * 2.0**20
        cast, (values, scales) = quantizer(x), quantise(x, rows)
        theirs = cast._rowwise_scale_inv if rows > 1 else cast._rowwise_scale_inv.t()
        assert torch.equal(cast._rowwise_data, values.view(torch.uint8))
        assert torch.equal(theirs[: scales.shape[0], : scales.shape[1]], scales)


def blocks_to_be_gathered() -> None:
    """Check the compact format, in the layout of the tensor, so that ranks' parts can follow each other."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    number, kind = _kinds()[0]
    quantizer = Float8BlockQuantizer(
        number, rowwise=True, columnwise=True, force_pow_2_scales=True, block_scaling_dim=1
    )
    quantizer.all_gather_usage = True
    x = torch.randn(256, 384)
    cast = quantizer(x)
    rows = cast._rowwise_data.view(torch.float8_e4m3fn).double()
    _equal(rows * cast._rowwise_scale_inv.double().repeat_interleave(128, 1), _blocks(x, 1, kind))
    columns = cast._columnwise_data.view(torch.float8_e4m3fn).double()
    _equal(
        columns * cast._columnwise_scale_inv.double().repeat_interleave(128, 0),
        _blocks(x.T.contiguous(), 1, kind).T,
    )


def experts_have_their_own_scales() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    number, kind = _kinds()[0]
    x = torch.randn(48, 16) * torch.arange(1, 49)[:, None]
    quantizers = [Float8CurrentScalingQuantizer(number, device=torch.device("cpu")) for _ in range(3)]
    for part, cast in zip(x.split([16, 0, 32]), tex.split_quantize(x, [16, 0, 32], quantizers), strict=True):
        if len(part):
            scale = kind[2] / part.double().abs().max()
            _equal(cast.dequantize(), rounded(part.double() * scale, kind) / scale)


def transposes_and_sums() -> None:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    data = torch.randint(0, 255, (2, 3, 4), dtype=torch.uint8)
    assert torch.equal(tex.fp8_transpose(data, tex.DType.kFloat8E4M3), data.permute(2, 0, 1))
    grad = torch.randn(2, 16, 32)
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E5M2, device=torch.device("cpu"))
    of_bias, cast = tex.bgrad_quantize(grad, quantizer)
    _equal(of_bias, grad.double().sum((0, 1)))
    _equal(tex.dequantize(cast, tex.DType.kFloat32), cast.dequantize().double())


def products_take_multiples_of_16() -> None:
    """Check that products need multiples of 16, like cuBLAS's, and two FP8 operands."""
    import pytest
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device=torch.device("cpu"))

    def product(a, b):
        rest = (
            None,
            None,
            tex.DType.kFloat32,
            None,
            tex.DType.kBFloat16,
            False,
            None,
            False,
            None,
            0,
            False,
            False,
        )
        return tex.generic_gemm(a, True, b, False, *rest)[0]

    weight, x = torch.randn(32, 16), torch.randn(48, 16)
    a, b = quantizer(weight), quantizer(x)
    _equal(product(a, b), b.dequantize().double() @ a.dequantize().double().T)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        product(quantizer(torch.randn(32, 24)), quantizer(torch.randn(48, 24)))
    with pytest.raises(RuntimeError, match="not FP8"):
        product(a, x)


CHECKS = (
    scale_of_the_tensor,
    scale_that_is_given,
    histories_become_scales,
    scales_of_blocks,
    blocks_as_engines_have_them,
    blocks_to_be_gathered,
    experts_have_their_own_scales,
    transposes_and_sums,
    products_take_multiples_of_16,
)

"""Emulated FP8 casts of TransformerEngine's compiled extension.

Casts round to nearest even and saturate, as the real kernels do. Quantizers and quantized tensors are
TransformerEngine's own objects. The functions here fill and read them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from grpo_megatron.megatron.without_gpu.emulation.extension import BlockScaleFormat, DType

FP8 = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}
TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
_BLOCK = 128
_LARGEST = torch.finfo(torch.float32).max


def is_blockwise(tensor) -> bool:
    return hasattr(tensor, "_is_2D_scaled")


def is_quantized(tensor) -> bool:
    return hasattr(tensor, "_fp8_dtype")


def _scale(amax: torch.Tensor, top: float, power_of_two: bool) -> torch.Tensor:
    """Return the FP8 scale, by which values are multiplied before a cast: it maps `amax` to `top`.

    The scale is 1 where amax is 0 or not finite.

    amax: largest absolute value of each tensor or block.
    top: largest number of the FP8 format.
    power_of_two: if True, round the scale down to a power of two.
    """
    scale = torch.where((amax == 0) | ~torch.isfinite(amax), torch.ones_like(amax), top / amax).clamp_max(
        _LARGEST
    )
    return torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale


def _cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top = torch.finfo(dtype).max
    return (values * scale).clamp(-top, top).to(dtype).view(torch.uint8)


def _transposed(rows: torch.Tensor) -> torch.Tensor:
    """Return `rows` [..., n] with its last axis moved to the front, [n, ...], as TransformerEngine does."""
    flat = rows.reshape(-1, rows.shape[-1]).t().contiguous()
    return flat.view(rows.shape[-1], *rows.shape[:-1])


# --- one scale for a tensor


def _store(tensor: torch.Tensor, quantizer, output) -> None:
    dtype = FP8[quantizer.dtype]
    values = tensor.detach().float()
    if hasattr(quantizer, "with_amax_reduction"):  # current scaling: the scale comes from this tensor
        if not quantizer.use_existing_amax:
            amax = values.abs().max() if values.numel() else values.new_zeros(())
            if quantizer.with_amax_reduction:
                dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
            quantizer.amax.copy_(amax)
        amax = quantizer.amax.clamp_min(quantizer.amax_epsilon)
        quantizer.scale.copy_(_scale(amax, torch.finfo(dtype).max, quantizer.force_pow_2_scales))
    elif values.numel():  # delayed scaling: the scale is given; record the amax for later scales
        quantizer.amax.copy_(torch.maximum(quantizer.amax, values.abs().max()))
    data = _cast(values, quantizer.scale, dtype)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(_transposed(data).view(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1.0 / quantizer.scale)
    output._fp8_dtype = quantizer.dtype


def _values(tensor) -> torch.Tensor:
    data = tensor._data
    if data is None:  # only the transpose is stored
        data = tensor._transpose.reshape(len(tensor._transpose), -1).t()
        data = data.reshape(*tensor._transpose.shape[1:], len(tensor._transpose))
    return data.view(FP8[tensor._fp8_dtype]).float() * tensor._scale_inv


# --- a scale for each block of 1 x 128 or 128 x 128 values


def _block_cast(
    values: torch.Tensor, dtype: torch.dtype, rows: int, quantizer
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast float32 values [M, K] to FP8 with one scale per block of `rows` x 128 values.

    Returns (FP8 values as uint8 [M, K], float32 inverse scales [ceil(M / rows), ceil(K / 128)]).
    """
    m, k = values.shape
    padded = F.pad(values, (0, -k % _BLOCK, 0, -m % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // _BLOCK, _BLOCK)
    amax = blocks.abs().amax((1, 3)).clamp_min(quantizer.amax_epsilon)
    scale = _scale(amax, torch.finfo(dtype).max, quantizer.force_pow_2_scales)
    data = _cast(blocks, scale[:, None, :, None], dtype).view(padded.shape)
    return data[:m, :k], 1.0 / scale


def _store_blocks(tensor: torch.Tensor, quantizer, output) -> None:
    values = tensor.detach().float().reshape(-1, tensor.shape[-1])
    rows = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    compact = output._data_format == BlockScaleFormat.COMPACT
    for data, scales, source, along in (
        (output._rowwise_data, output._rowwise_scale_inv, values, False),
        (output._columnwise_data, output._columnwise_scale_inv, values.t().contiguous(), True),
    ):
        if data is None:
            continue
        cast, inverse = _block_cast(source, FP8[quantizer.dtype], rows, quantizer)
        # In the GEMM_READY format, column-wise data are stored transposed, and the scales of 1 x 128 blocks
        # are stored with the block axis first. In the compact format, nothing is transposed.
        data.copy_((cast.t() if along and compact else cast).reshape(data.shape))
        inverse = inverse if rows > 1 or (compact and not along) else inverse.t()
        scales.zero_()[: inverse.shape[0], : inverse.shape[1]] = inverse


def _block_values(tensor, columnwise: bool) -> torch.Tensor:
    """Return the float32 values of a block-wise quantized tensor, which may hold two quantized copies.

    columnwise: if True, read the copy that is quantized along columns. If False, read the copy that is
        quantized along rows. With blocks of 1 x 128 values, the two copies are rounded differently.
    """
    if tensor._data_format == BlockScaleFormat.COMPACT:
        raise RuntimeError("a quantized tensor in the compact format cannot be multiplied, only gathered")
    data, scales = (
        (tensor._columnwise_data, tensor._columnwise_scale_inv)
        if columnwise
        else (tensor._rowwise_data, tensor._rowwise_scale_inv)
    )
    flat = data.reshape(len(data), -1) if columnwise else data.reshape(-1, data.shape[-1])
    m, k = flat.shape
    inverse = scales.repeat_interleave(_BLOCK, 0)[:m] if tensor._is_2D_scaled else scales.t()[:m]
    values = flat.view(FP8[tensor._fp8_dtype]).float() * inverse.repeat_interleave(_BLOCK, 1)[:, :k]
    return values.t().reshape(*data.shape[1:], len(data)) if columnwise else values.view(data.shape)


# --- functions of the extension


def operand(tensor, columnwise: bool) -> torch.Tensor:
    """Return the float32 values of a matrix product's operand. The operand may be quantized or not.

    columnwise: if True, read the copy that is quantized along columns. Only block-wise quantized tensors have
        two copies; for other tensors this has no effect.
    """
    if not is_quantized(tensor):
        return tensor.float()
    return _block_values(tensor, columnwise) if is_blockwise(tensor) else _values(tensor)


def quantize(tensor, quantizer, output=None, noop=None):
    if noop is not None and bool(noop):
        return output
    if output is None:
        output = quantizer.make_empty(list(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if getattr(quantizer, "internal", False) and not is_blockwise(output):
            output = _internal(output, quantizer)
    (_store_blocks if is_blockwise(output) else _store)(tensor, quantizer, output)
    return output


def _internal(tensor, quantizer):
    """Return an FP8 tensor as a Float8TensorStorage, a plain object that is not a torch.Tensor.

    `quantize` calls this if quantizer.internal is True, because TransformerEngine's compiled extension, which
    this module emulates, then returns an object of this class.

    tensor: FP8 tensor, whose memory the result shares.
    quantizer: quantizer that made `tensor`.
    """
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

    return Float8TensorStorage(
        data=tensor._data,
        fp8_scale_inv=tensor._scale_inv,
        fp8_dtype=tensor._fp8_dtype,
        data_transpose=tensor._transpose,
        quantizer=quantizer,
    )


def split_quantize(tensor, sections, quantizers):
    """Cast the rows of each expert to FP8 with the expert's own quantizer. Return a list of FP8 tensors.

    tensor: the rows of all experts, one expert after the other.
    sections: number of rows of each expert.
    """
    return [
        quantize(part, quantizer) for part, quantizer in zip(tensor.split(sections), quantizers, strict=True)
    ]


def dequantize(tensor, dtype):
    return _values(tensor).to(TORCH[dtype])


def fp8_transpose(data, dtype, *, out=None):
    transposed = _transposed(data)
    return transposed if out is None else out.copy_(transposed.view(out.shape))


def bgrad_quantize(grad, quantizer):
    """Return (gradient of a linear layer's bias, quantized `grad`).

    grad: gradient of the layer's output. Its sum over all rows is the gradient of the bias.
    """
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


def fused_amax_and_scale_update_after_reduction(amaxes, histories, scales, algorithm, dtype, margin):
    """Compute the FP8 scales of the next step for the recipe "delayed scaling". Update `scales` in place.

    The scale of a tensor whose largest value is 0 or not finite stays as it is. `histories` is updated too.

    amaxes: largest absolute value (amax) of each tensor in this step.
    histories: for each group of n tensors, their amaxes in the last steps, [steps, n]. The amaxes of this
        step are added.
    scales: for each group, the scales of its tensors, [n].
    algorithm: "max": compute the scale from the largest amax in the history. Any other name: compute it from
        the amax of this step.
    margin: the scale is divided by 2 ** margin.
    """
    top = torch.finfo(FP8[dtype]).max
    for history, scale, of_step in zip(
        histories, scales, amaxes.split([h.shape[1] for h in histories]), strict=True
    ):
        history[0].copy_(of_step)
        amax = history.max(0).values if algorithm == "max" else history[0].clone()
        usable = (amax > 0) & torch.isfinite(amax)
        scale.copy_(torch.where(usable, top / amax / 2**margin, scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()

"""Emulated kernels of TransformerEngine: matrix products, norm, rotary embedding, padding and optimizer.

Each public function replaces the function of the same name in TransformerEngine's compiled extension, with
the same arguments. Products are summed in float32, as in the real kernels, but in another order.
"""

import math

import torch

from grpo_megatron.megatron.without_gpu.emulation.extension import QKVFormat
from grpo_megatron.megatron.without_gpu.emulation.quantization import TORCH, is_quantized, operand, quantize

# cuBLAS's FP8 products accept only multiples of this size.
_FP8_MULTIPLE = 16


def _check_sizes(*shapes: tuple[int, ...]) -> None:
    for shape in shapes:
        rows = math.prod(shape[:-1])
        if shape[-1] % _FP8_MULTIPLE or rows % _FP8_MULTIPLE:
            raise RuntimeError(
                f"FP8 products need sizes divisible by {_FP8_MULTIPLE}, got a matrix of {rows} x {shape[-1]}"
            )


def _product(a, transa: bool, b, transb: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the matrix product of a cuBLAS call. Return (op(b) @ op(a), b dequantised), both float32.

    op(a) is a, or its transpose if transa is True; op(b) likewise. b comes first, because cuBLAS is
    column-major.

    Raises RuntimeError if only one operand is FP8, or if an FP8 operand has a size that is not a multiple of
    16.
    """
    left, right = operand(a, not transa), operand(b, transb)
    if is_quantized(a) or is_quantized(b):
        if not (is_quantized(a) and is_quantized(b)):
            raise RuntimeError("one operand of an FP8 product is not FP8")
        _check_sizes(tuple(left.shape), tuple(right.shape))
    rows = right.reshape(-1, right.shape[-1])
    left = left.reshape(-1, left.shape[-1])
    return (rows.t() if transb else rows) @ (left.t() if transa else left), right


def generic_gemm(
    A, transa, B, transb, out, quantizer, out_dtype, bias, bias_type, gelu, gelu_in, grad, workspace,
    workspace_size, accumulate, split_accumulator, *, comm_overlap=None, comm_type=None, extra_output=None,
    bulk_overlap=False, alpha=1.0, beta=None,
):  # fmt: skip
    """Emulate TransformerEngine's function for matrix products: op(B) @ op(A), where op may transpose.

    Returns (product, gradient of the bias, None, extra_output).

    - With a quantizer, the product is quantized and returned as a new tensor.
    - Without a quantizer, it is written to `out`, or added to `out` if `accumulate` is True, and `out` is
      returned. If `out` is None, the product is a new tensor.
    - With a bias and grad=False, the bias is added to the product, and the gradient of the bias is None. With
      grad=True, the gradient of the bias is computed instead.
    """
    if gelu or comm_overlap is not None:
        raise NotImplementedError("products with GELU or with overlapped communication are not emulated")
    product, right = _product(A, transa, B, transb)
    if alpha != 1.0:
        product = product * alpha
    dtype = TORCH[out_dtype] if out_dtype is not None else (out.dtype if out is not None else A.dtype)
    bias_grad = None
    if bias is not None and bias.numel():
        if grad:
            bias_grad = right.reshape(-1, right.shape[-1]).sum(0).to(bias.dtype)
        else:
            product = product + bias.float()
    if not transb:
        product = product.view(*right.shape[:-1], product.shape[-1])
    if quantizer is not None:
        return quantize(product.to(dtype), quantizer), bias_grad, None, extra_output
    if out is None:
        return product.to(dtype), bias_grad, None, extra_output
    _put(product, out, accumulate)
    return out, bias_grad, None, extra_output


def _put(product: torch.Tensor, out: torch.Tensor, accumulate: bool) -> None:
    product = product.view(out.shape).to(out.dtype)
    if accumulate:
        out.add_(product)
    else:
        out.copy_(product)


def te_general_grouped_gemm(
    A, transa, B, transb, out, out_dtype, m_splits, bias, bias_type, single_output, gelu_in, grad, workspaces,
    workspace_size, accumulate, split_accumulator, sm_count,
):  # fmt: skip
    """Compute the matrix product of A[i] and B[i] for each expert i, into `out`. Return `bias` unchanged.

    The product is op(B[i]) @ op(A[i]), where op transposes if transa or transb is True.

    out: list of output tensors.
    single_output: if True, out[0] gets the results of all experts, with m_splits[i] rows for expert i. If
        False, out[i] gets the result of expert i.
    accumulate: if True, the results are added to `out`.
    """
    if any(b.numel() for b in bias):
        raise NotImplementedError("grouped products with biases are not emulated")
    targets = out[0].split(m_splits) if single_output else out
    for a, b, target in zip(A, B, targets, strict=True):
        if target.numel():
            product, _ = _product(a, transa, b, transb)
            _put(product, target, accumulate)
    return bias


def rmsnorm_fwd(x, weight, eps, output, quantizer, out_dtype, sm_margin, zero_centered):
    """Compute the RMS norm of each row of x. Return (x / rms(x) * weight, None, 1 / rms(x) of each row).

    output: tensor that gets the first result. None: the result is a new tensor.
    quantizer: if not None, the first result is quantized with it.
    zero_centered: if True, the factor is weight + 1 instead of weight.
    """
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normed = (values * inverse * (weight.float() + zero_centered)).to(TORCH[out_dtype])
    if quantizer is not None:
        normed = quantize(normed, quantizer, output)
    elif output is not None:
        normed = output.copy_(normed)
    return normed, None, inverse.flatten()


def rmsnorm_bwd(grad, x, inverse, weight, sm_margin, zero_centered):
    """Compute the backward pass of rmsnorm_fwd. Return (gradient of x, gradient of the weight).

    inverse: 1 / rms(x) of each row, from the forward pass.
    """
    values, grads = (tensor.float().reshape(-1, x.shape[-1]) for tensor in (x, grad))
    inverse = inverse.reshape(-1, 1)
    normed = values * inverse
    of_normed = grads * (weight.float() + zero_centered)
    of_x = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * inverse
    return of_x.to(weight.dtype).view(x.shape), (grads * normed).sum(0).to(weight.dtype)


def _positions(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return the position of each token of a CP rank within the token's own sequence, int64 [t].

    A sequence is cut into 2 * cp chunks. Rank r holds the chunks r and 2 * cp - 1 - r, counted from 0.

    cu_seqlens: cumulative lengths of the whole sequences, over all CP ranks.
    """
    parts = []
    for length in (cu_seqlens[1:] - cu_seqlens[:-1]).tolist():
        if cp_size == 1:
            parts.append(torch.arange(length))
            continue
        chunk = length // (2 * cp_size)
        parts += [
            torch.arange(first * chunk, (first + 1) * chunk) for first in (cp_rank, 2 * cp_size - 1 - cp_rank)
        ]
    return torch.cat(parts)


def _rotate(x, freqs, layout, interleaved, cu_seqlens, cp_size, cp_rank, direction):
    if layout != QKVFormat.NVTE_THD or interleaved:
        raise NotImplementedError("only RoPE in the THD layout, without interleaving, is emulated")
    angles = freqs.float().flatten(1)[_positions(cu_seqlens, cp_size, cp_rank)][:, None]
    turned, rest = x[..., : angles.shape[-1]].float(), x[..., angles.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin() * direction
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)


def fused_rope_forward(x, freqs, start_positions, layout, interleaved, cu_seqlens, cp_size, cp_rank):
    """Apply the rotary embedding to a pack of sequences. Return x [t, heads, d], rotated.

    freqs: [s, 1, 1, r], angles of the positions 0 to s - 1. Only the first r channels of x are rotated.
    cu_seqlens: cumulative lengths of the whole sequences, over all CP ranks.
    """
    return _rotate(x, freqs, layout, interleaved, cu_seqlens, cp_size, cp_rank, 1)


def fused_rope_backward(grad, freqs, start_positions, layout, interleaved, cu_seqlens, cp_size, cp_rank):
    return _rotate(grad, freqs, layout, interleaved, cu_seqlens, cp_size, cp_rank, -1)


def fused_multi_row_padding(source, target, rows, padded_rows):
    """Copy the rows of each expert from `source` to `target`, followed by zero rows as padding for FP8.

    rows, padded_rows: number of rows of each expert in `source` and in `target`.
    """
    for part, place in zip(source.split(rows), target.split(padded_rows), strict=True):
        place[: len(part)] = part
        place[len(part) :] = 0


def fused_multi_row_unpadding(source, target, padded_rows, rows):
    for part, place in zip(source.split(padded_rows), target.split(rows), strict=True):
        place.copy_(part[: len(place)])


def multi_tensor_l2norm(chunk_size, overflow, lists, per_tensor):
    """Return (L2 norm of all n tensors together [1], L2 norm of each tensor [n]).

    lists: [tensors], a list that contains one list of tensors.
    """
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]]) if lists[0] else torch.zeros(1)
    return norms.norm().view(1), norms


def multi_tensor_scale(chunk_size, overflow, lists, scale):
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_adam(
    chunk_size, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay
):
    """Take one optimizer step of Adam or AdamW. Parameters and moments are updated in place.

    lists: [gradients, parameters, first moments, second moments], each a list of tensors.
    step: number of the step, from 1.
    mode: 0 for Adam (weight decay is added to the gradient), 1 for AdamW.
    bias_correction: if not 0, divide the moments by 1 - beta ** step.
    """
    correct1, correct2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1, 1)
    for grad, parameter, moment, second in zip(*lists, strict=True):
        values, grad = parameter.float(), grad.float()
        if mode == 0:
            grad = grad + weight_decay * values
        moment.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = (moment / correct1) / ((second / correct2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * values
        parameter.copy_(values - lr * update)

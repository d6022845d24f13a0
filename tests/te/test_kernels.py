"""Every emulated kernel against float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from grpo_megatron.megatron.without_gpu.emulation import layers, packed_attention
from grpo_megatron.megatron.without_gpu.emulation.extension import DType, MaskType, QKVFormat
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.te import casts

BF16, FP32 = DType.kBFloat16, DType.kFloat32


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def close(found, expected, tolerance=1e-5):
    """Compare in units of the largest value."""
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("check", casts.CHECKS, ids=lambda check: check.__name__)
def test_cast(te_ranks, check):
    te_ranks.run(check, ParallelSizes())


def gemm(a, transa, b, transb, out=None, dtype=FP32, bias=None, grad=False, accumulate=False, **rest):
    """Call cuBLAS's column-major op(a) op(b), which is op(b) op(a) of torch's matrices."""
    fixed = (None, BF16, False, None)
    found = layers.generic_gemm(
        a, transa, b, transb, out, None, dtype, bias, *fixed[1:], grad, None, 0, accumulate, False, **rest
    )
    return found[:2]


@pytest.mark.parametrize(
    ("transa", "transb", "a", "b"),
    [(True, False, (6, 4), (5, 4)), (False, False, (4, 6), (5, 4)), (False, True, (5, 6), (5, 4))],
)
def test_products(transa, transb, a, b):
    a, b = torch.randn(a), torch.randn(b)
    expected = (b.T if transb else b).double() @ (a.T if transa else a).double()
    close(gemm(a, transa, b, transb)[0], expected)
    close(gemm(a.bfloat16(), transa, b.bfloat16(), transb, dtype=BF16, alpha=2.0)[0], 2 * expected, 0.03)
    total = torch.randn(expected.shape)
    sums = total.double() + expected
    close(gemm(a, transa, b, transb, out=total, accumulate=True)[0], sums)


def test_biases_of_products():
    weight, x, bias = torch.randn(6, 4), torch.randn(2, 5, 4), torch.randn(6)
    close(gemm(weight, True, x, False, bias=bias)[0], F.linear(x.double(), weight.double(), bias.double()))
    grad = torch.randn(10, 6)
    product, of_bias = gemm(x.view(10, 4), False, grad, True, bias=bias, grad=True)
    close(product, grad.T.double() @ x.view(10, 4).double())
    close(of_bias, grad.double().sum(0))


def test_products_of_experts():
    weights, rows = [torch.randn(6, 4) for _ in range(3)], [2, 0, 5]
    x, grads = torch.randn(7, 4).split(rows), torch.randn(7, 6).split(rows)
    nothing, output, of_weights = (
        [torch.empty(0)] * 3,
        torch.full((7, 6), torch.nan),
        [torch.randn(6, 4) for _ in range(3)],
    )
    before = [weight.double() for weight in of_weights]

    def grouped(a, transa, b, transb, out, single, accumulate):
        types, ending = (
            (FP32, rows, nothing, BF16, single, nothing),
            (False, [torch.empty(0)], 0, accumulate, False, 0),
        )
        layers.te_general_grouped_gemm(a, transa, b, transb, out, *types, *ending)

    grouped(weights, True, x, False, [output], single=True, accumulate=False)
    close(
        output,
        torch.cat([part.double() @ weight.T.double() for part, weight in zip(x, weights, strict=True)]),
    )
    grouped(x, False, grads, True, of_weights, single=False, accumulate=True)
    for found, start, grad, part in zip(of_weights, before, grads, x, strict=True):
        close(found, start + grad.T.double() @ part.double())


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm(zero_centered):
    x, weight, grad = torch.randn(2, 5, 16), torch.randn(16), torch.randn(2, 5, 16)
    exact, gamma = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = F.rms_norm(exact, (16,), gamma + zero_centered, 1e-6)
    expected.backward(grad.double())
    normed, _, inverse = layers.rmsnorm_fwd(x, weight, 1e-6, None, None, FP32, 0, zero_centered)
    close(normed, expected.detach())
    of_x, of_weight = layers.rmsnorm_bwd(grad, x, inverse, weight, 0, zero_centered)
    close(of_x, exact.grad)
    close(of_weight, gamma.grad)


@pytest.mark.parametrize("cp", [1, 2])
def test_rotary_embedding(cp):
    lengths, heads, turned, d = (8, 4, 12), 3, 6, 10
    cu_seqlens = torch.tensor([0, 8, 12, 24], dtype=torch.int32)
    x, frequencies = torch.randn(24, heads, d), torch.rand(turned // 2)
    angles = torch.arange(12)[:, None] * frequencies
    freqs = torch.cat([angles, angles], -1)[:, None, None]
    complex_x = torch.complex(x[..., : turned // 2].double(), x[..., turned // 2 : turned].double())
    position = torch.cat([torch.arange(n) for n in lengths])
    rotated = complex_x * torch.exp(1j * (position[:, None] * frequencies)[:, None].double())
    expected = torch.cat([rotated.real, rotated.imag, x[..., turned:].double()], -1)
    for rank in range(cp):
        rows = (
            packed_attention.thd_get_partitioned_indices(cu_seqlens, 24, cp, rank)
            if cp > 1
            else torch.arange(24)
        )
        options = (None, QKVFormat.NVTE_THD, False, cu_seqlens, cp, rank)
        found = layers.fused_rope_forward(x[rows], freqs, *options)
        close(found, expected[rows], 1e-6)
        close(
            layers.fused_rope_backward(found, freqs, *options), x[rows].double(), 1e-6
        )  # the transpose is the inverse


def test_rows_of_experts_are_padded():
    rows, padded = [3, 0, 16, 5], [16, 0, 16, 16]
    source, target = torch.randn(24, 4), torch.full((48, 4), torch.nan)
    layers.fused_multi_row_padding(source, target, rows, padded)
    expected = torch.cat(
        [F.pad(part, (0, 0, 0, p - len(part))) for part, p in zip(source.split(rows), padded, strict=True)]
    )
    assert torch.equal(target, expected)
    back = torch.empty_like(source)
    layers.fused_multi_row_unpadding(target, back, padded, rows)
    assert torch.equal(back, source)


def test_norms_and_scaling_of_many_tensors():
    tensors = [torch.randn(3, 4), torch.randn(5).bfloat16()]
    whole, each = layers.multi_tensor_l2norm(0, None, [tensors], True)
    expected = torch.stack([tensor.double().norm() for tensor in tensors])
    close(each, expected)
    close(whole, expected.norm().view(1))
    targets = [torch.empty_like(tensor) for tensor in tensors]
    layers.multi_tensor_scale(0, None, [tensors, targets], 0.25)
    assert all(torch.equal(target, tensor * 0.25) for tensor, target in zip(tensors, targets, strict=True))


@pytest.mark.parametrize(("mode", "optimizer"), [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam(mode, optimizer):
    parameter, settings = (
        torch.randn(4, 3),
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.05},
    )
    exact = torch.nn.Parameter(parameter.double())
    reference = optimizer([exact], **settings)
    state = [torch.zeros_like(parameter) for _ in range(2)]
    for step in range(1, 4):
        grad = torch.randn(4, 3)
        exact.grad = grad.double()
        reference.step()
        layers.multi_tensor_adam(
            0, None, [[grad], [parameter], [state[0]], [state[1]]], 0.1, 0.8, 0.9, 1e-6, step, mode, 1, 0.05
        )
    close(parameter, exact.detach())


# --- attention

# starts and lengths of sequences in a pack of 20 rows; the last two rows belong to none
CU, CU_PADDED = (
    torch.tensor([0, 7, 8, 16], dtype=torch.int32),
    torch.tensor([0, 8, 10, 18], dtype=torch.int32),
)


def exact_attention(query, key, value, causal=True, scale=0.3):
    """Return attention of one sequence [t, heads, d], differentiable."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1).T


def forward(query, key, value, cu=CU, padded=CU_PADDED, mask=MaskType.NVTE_PADDING_CAUSAL_MASK, longest=8):
    settings = (longest, longest, True, 0.3, 0.0, True, None, None, mask, None, None)
    output, statistics, _ = packed_attention.fused_attn_fwd(
        *settings, cu, cu, query, key, value, None, padded, padded
    )
    return output, statistics


def random_pack(rows=20):
    return [torch.randn(rows, heads, d).bfloat16() for heads, d in ((4, 8), (2, 8), (2, 6))]


@pytest.mark.parametrize("mask", [MaskType.NVTE_PADDING_CAUSAL_MASK, MaskType.NVTE_PADDING_MASK])
def test_attention(monkeypatch, mask):
    monkeypatch.setattr(packed_attention, "PADDING_STATISTICS", math.nan)
    pack, grad = random_pack(), torch.randn(20, 4, 6).bfloat16()
    exact = [x.double().requires_grad_() for x in pack]
    output, statistics = forward(*pack, mask=mask)
    real = []
    for start, length in zip(CU_PADDED[:-1].tolist(), CU.diff().tolist(), strict=True):
        rows = slice(start, start + length)
        real += range(start, start + length)
        expected, sums = exact_attention(
            *(x[rows] for x in exact), causal=mask == MaskType.NVTE_PADDING_CAUSAL_MASK
        )
        close(output[rows], expected.detach(), 0.01)
        close(statistics[rows, :, 0], sums.detach())
        expected.backward(grad[rows].double())
    padding = [row for row in range(20) if row not in real]
    assert statistics[padding].isnan().all()
    assert not output[padding].any()
    settings = (8, 8, 0.3, 0.0, True, None, None, mask, None, None, False)
    tensors = (CU, CU, *pack, output, grad, None, None, [statistics], CU_PADDED, CU_PADDED)
    for found, wanted in zip(packed_attention.fused_attn_bwd(*settings, *tensors)[:3], exact, strict=True):
        close(found, wanted.grad, 0.02)


def test_attention_refuses_what_the_kernel_refuses():
    pack = random_pack()
    with pytest.raises(RuntimeError, match="bf16"):
        forward(*(x.float() for x in pack))
    with pytest.raises(RuntimeError, match="longer than"):
        forward(*pack, longest=6)
    with pytest.raises(NotImplementedError, match="CAUSAL_BOTTOM_RIGHT"):
        forward(*pack, mask=MaskType.NVTE_CAUSAL_BOTTOM_RIGHT_MASK)


def test_parts_of_the_keys_add_up_to_all():
    """A ring's two steps on rank 1 of 2: its own chunks causally, then all its queries with rank 0's first
    chunks.
    """
    cu = torch.tensor([0, 8, 20], dtype=torch.int32)
    pack = random_pack(20)
    rows = [packed_attention.thd_get_partitioned_indices(cu, 20, 2, rank).long() for rank in (0, 1)]
    own, others = [x[rows[1]] for x in pack], [x[rows[0]] for x in pack]
    half = cu // 2
    output, statistics = forward(*own, cu=half, padded=None, longest=10)
    first = [packed_attention.thd_read_half_tensor(x, half, 0) for x in others]
    settings = (10, 10, True, 0.3, 0.0, True, None, None, MaskType.NVTE_PADDING_MASK, None, None)
    query, (key, value) = own[0], first[1:]
    seen, theirs, _ = packed_attention.fused_attn_fwd(
        *settings, half, half // 2, query, key, value, None, None, None
    )
    total, of_first, of_second = (x[..., 0].T.contiguous() for x in (statistics, statistics, theirs))
    total = torch.logaddexp(total, of_second)
    summed = torch.zeros_like(output, dtype=torch.float32)
    packed_attention.thd_out_correction(summed, output, total, of_first, half, False, True)
    packed_attention.thd_out_correction(summed, seen, total, of_second, half, False, True)
    exact = [exact_attention(*(x[a:b].double() for x in pack))[0] for a, b in ((0, 8), (8, 20))]
    close(summed, torch.cat(exact)[rows[1]], 0.01)


def test_halves_of_parts_of_sequences():
    """The ring does this where only the second halves of its sequences have something new to see."""
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    first, second = [0, 1, 4, 5, 6], [2, 3, 7, 8, 9]
    x = torch.randn(10, 2, 3)
    assert torch.equal(packed_attention.thd_read_half_tensor(x, cu, 1), x[second])
    assert torch.equal(packed_attention.thd_read_half_tensor(torch.stack([x, x]), cu, 0)[1], x[first])
    statistics, of_step = torch.randn(2, 10), torch.randn(2, 5)
    expected = statistics.double()
    expected[:, second] = torch.log(expected[:, second].exp() + of_step.double().exp())
    packed_attention.thd_second_half_lse_correction(statistics, of_step, cu, True)
    close(statistics, expected)
    read = packed_attention.thd_read_second_half_lse(statistics, cu, True, 6)
    assert torch.equal(read[:, :5], statistics[:, second])
    output, part = torch.randn(10, 2, 3), torch.randn(5, 2, 3)
    expected = output.double()
    expected[second] += part.double() * (of_step.double() - statistics[:, second].double()).exp().T[..., None]
    packed_attention.thd_out_correction(output, part, statistics, of_step, cu, True, True)
    close(output, expected)


@pytest.mark.parametrize("how", ["add copy", "copy add", "none add", "add none", "none copy", "copy none"])
def test_gradients_of_halves(how):
    cu, hows = torch.tensor([0, 4, 10], dtype=torch.int32), how.split()
    halves = ([0, 1, 4, 5, 6], [2, 3, 7, 8, 9])
    grad = torch.randn(10, 2, 3)
    of_step = torch.randn(10 if "none" not in hows else 5, 2, 3)
    expected = grad.double()
    for rows, what in zip(halves, hows, strict=True):
        part = (of_step[rows] if "none" not in hows else of_step).double()
        if what == "add":
            expected[rows] += part
        elif what == "copy":
            expected[rows] = part
    packed_attention.thd_grad_correction(grad, of_step, cu, *hows)
    close(grad, expected, 1e-6)


def test_partitions_cover_every_row():
    cu = torch.tensor([0, 8, 24], dtype=torch.int32)
    parts = [packed_attention.thd_get_partitioned_indices(cu, 24, 2, rank).tolist() for rank in (0, 1)]
    assert parts[0] == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    np.testing.assert_array_equal(sorted(parts[0] + parts[1]), np.arange(24))

"""Attention over packs against plain float64 attention of each sequence: values, gradients, memory,
kernels.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_megatron.megatron.layers.attention import _ShortAttention
from grpo_megatron.megatron.layers.modules import RMSNorm, SwiGLU
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.parallel import attentions
from tests.parallel.attentions import Problem
from tests.parallel.heads import Recorder

CONTEXT = {"cp1": ParallelSizes(), "cp2": ParallelSizes(cp=2)}
NAMES = ("output", "query", "key", "value")
EQUAL = (24, 24, 24, 7, 24, 24)

PROBLEMS = {
    "unequal": Problem(),
    "equal": Problem(lengths=EQUAL),
    "one sequence": Problem(lengths=(90,)),
    "as many kv heads": Problem(heads=4, kv_heads=4),
    "one kv head": Problem(heads=4, kv_heads=1),
    "long": Problem(lengths=(150, 3, 129, 20, 150)),
    "padding": Problem(lengths=(37, 5, 41), alignment=16),
    "many masks": Problem(lengths=(90, 37, 64), masked_queries=5),
    "window": Problem(window=12),
    "window of several masks": Problem(lengths=(90, 37, 64, 150), window=20, masked_queries=7, alignment=16),
    "window of one token": Problem(window=1),
    "window without effect": Problem(window=64),
    "sinks": Problem(sinks=True),
    "sinks, long": Problem(sinks=True, lengths=(150, 3, 129, 20, 150), alignment=16),
    "sinks and a window": Problem(sinks=True, lengths=(90, 37, 64, 150), window=20, masked_queries=7),
}


def run(ranks, layout: str, problem: Problem) -> dict[str, np.ndarray]:
    """Join the ranks' parts in the order of the stream, and check the values of padding."""
    parts = ranks.run(attentions.values_and_gradients, CONTEXT[layout], problem)
    index = np.concatenate([part["index"] for part in parts])
    assert sorted(index[index >= 0]) == list(range(sum(problem.lengths)))
    found = {}
    for name in NAMES:
        values = np.concatenate([part[name] for part in parts])
        if name != "output":
            assert not values[index < 0].any(), f"gradient of {name} in padding"
        found[name] = values[index >= 0][np.argsort(index[index >= 0])]
    if problem.sinks:
        found["sinks"] = sum(part["sinks"] for part in parts)
    return found


def check(found, expected, tolerance=3e-6):
    assert found.keys() == expected.keys()
    for name in found:
        scale = max(1.0, np.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance * scale, err_msg=name)


@pytest.mark.slow_when(
    lambda layout, problem: layout != "cp2" or problem not in ("unequal", "one kv head", "padding", "window")
)
@pytest.mark.parametrize("equal_only", [True, False], ids=["in_place", "gathered"])
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("layout", CONTEXT)
def test_values_and_gradients(ranks, layout, problem, equal_only):
    problem = replace(PROBLEMS[problem], equal_only=equal_only)
    check(run(ranks, layout, problem), attentions.exact(problem))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_context_parallelism_changes_nothing(ranks, problem):
    problem = PROBLEMS[problem]
    check(run(ranks, "cp2", problem), run(ranks, "cp1", problem))


def test_sequences_are_kept_apart(ranks):
    """The comparison must notice a difference: one sequence of 60 tokens is not two of 30."""
    with pytest.raises(AssertionError, match="output"):
        check(run(ranks, "cp1", Problem(lengths=(60,))), attentions.exact(Problem(lengths=(30, 30))))


# --- memory and kernels

TOKENS = 2048
PACKS = {"one sequence": (TOKENS,), "many sequences": tuple(range(8, 264, 16))}
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def limit(lengths, layout: str) -> int:
    """Return the most elements that a tensor may have: query, output, keys and values of all CP ranks, or
    a mask.
    """
    problem = Problem(lengths=lengths, heads=4, kv_heads=2)
    tensors = TOKENS * max(problem.heads // CONTEXT[layout].cp, 2 * problem.kv_heads) * problem.dim
    return tensors if layout == "cp1" else max(tensors, 64 * max(lengths))


@pytest.mark.slow_when(lambda layout: layout != "cp2")
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("layout", CONTEXT)
def test_no_scores_and_no_mask_of_the_pack(ranks, layout, lengths):
    assert sum(lengths) == TOKENS
    problem = Problem(lengths=lengths, heads=4, kv_heads=2, masked_queries=64)
    for rank in ranks.run(attentions.recorded, CONTEXT[layout], problem):
        assert rank.largest <= limit(lengths, layout) < TOKENS**2 / 16
        assert rank.calls == {FLASH: rank.batches, f"{FLASH}_backward": rank.batches}


def test_short_sequences_have_few_scores(ranks):
    """Scores are kept on a CPU, but none across sequences: at most 128 for each query and head."""
    problem = Problem(lengths=(128,) * 8 + tuple(range(4, 68)), heads=4, kv_heads=2)
    (rank,) = ranks.run(attentions.recorded, CONTEXT["cp1"], problem)
    assert FLASH not in rank.calls
    assert rank.calls["aten::_softmax"] == rank.batches < 10
    assert (
        rank.largest
        <= sum(problem.lengths) * problem.heads * 128
        < sum(problem.lengths) ** 2 * problem.heads / 16
    )


def test_short_sequences_in_bf16_are_computed_in_float32():
    """Only inputs, output and gradients are rounded. Scores and shares are not, as in the flash kernels."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (3, 20, 6, 16), "key": (3, 20, 2, 16), "value": (3, 20, 2, 8)}
    given = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    grad = torch.randn(60, 48, generator=generator).bfloat16()
    mask = torch.full((20, 20), -torch.inf).triu_(1)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.detach().to(dtype).requires_grad_() for x in given.values()]
        output = _ShortAttention.apply(*inputs, mask, 0.25)
        output.backward(grad.to(dtype))
        found.append([output.detach(), *(x.grad for x in inputs)])
    for low, exact in zip(*found, strict=True):
        assert low.dtype == torch.bfloat16
        assert torch.equal(low, exact.bfloat16())


def test_the_recorder_sees_scores():
    """The same measurement finds scores if the fused kernel is not used."""
    query, key, value = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
    with Recorder() as recorder, sdpa_kernel(SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    assert recorder.largest >= 2 * 256**2
    assert FLASH not in recorder.calls


# --- the activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu(dtype):
    """Value and gradient equal the formula's to the bit, because they are computed by the same operators."""
    generator = torch.Generator().manual_seed(0)
    given = 3 * torch.randn(40, 1, 64, generator=generator)
    grad = torch.randn(40, 1, 32, generator=generator).to(dtype)
    found, expected = [], []
    plain = lambda x: torch.nn.functional.silu(x[..., :32]) * x[..., 32:]  # noqa: E731
    for function, values in ((SwiGLU(attentions.config(Problem())), found), (plain, expected)):
        x = given.to(dtype).requires_grad_()
        output = function(x)
        output.backward(grad)
        values.extend((output.detach(), x.grad))
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=0)


# --- the norms


@pytest.mark.parametrize("tp", [1, 2])
def test_the_norm_over_all_heads(ranks, tp):
    """Values and gradients equal the formula's in float64, on one rank and with two heads on each of two."""
    generator = torch.Generator().manual_seed(0)
    given = {name: torch.randn(30, 1, 4, 16, generator=generator) for name in ("x", "grad")}
    given["weight"] = torch.rand(64, generator=generator) + 0.5
    parts = ranks.run(attentions.joint_norm, ParallelSizes(tp=tp), given, 1e-2)
    x, weight = given["x"].double().requires_grad_(), given["weight"].double().requires_grad_()
    output = x * torch.rsqrt(x.square().mean((-2, -1), keepdim=True) + 1e-2) * weight.view(4, 16)
    output.backward(given["grad"].double())
    for name, dim, expected in (("output", 2, output), ("x", 2, x.grad), ("weight", 0, weight.grad)):
        found = torch.cat([part[name] for part in parts], dim=dim).double()
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(40, 1, 64), (40, 4, 16)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_rms_norm(shape, size):
    """Value and both gradients equal those of torch's norm in float64, for small and large inputs."""
    generator = torch.Generator().manual_seed(0)
    x, grad = size * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    norm = RMSNorm(attentions.config(Problem()), shape[-1], eps=1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=generator)
    found, expected = [], []
    for dtype, values in ((torch.float32, found), (torch.float64, expected)):
        norm.to(dtype).zero_grad()
        given = x.detach().to(dtype).requires_grad_()
        output = norm(given)
        output.backward(grad.to(dtype))
        assert output.dtype == dtype
        values.extend(value.detach().double() for value in (output, given.grad, norm.weight.grad))
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=2e-6 * reference.abs().max().item())

"""Fused kernels of gated delta networks compute what PyTorch's operators compute: values and gradients."""

import numpy as np
import pytest
import torch

from grpo_megatron.megatron.layers import delta_rule, fused_delta_rule
from grpo_megatron.megatron.layers.delta_rule import Chunks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

PACKS = {"one sequence": (150,), "ragged": (150, 1, 64, 65, 7, 200, 3)}
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 64, 128
CHANNELS, WIDTH = 96, 4


def rule_inputs(count: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries, keys, values, logarithms of decays, and betas of a pack of `count` tokens."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (random(count, KEY_HEADS, KEY_DIM) for _ in range(2))
    value = random(count, VALUE_HEADS, VALUE_DIM)
    decay, beta = (random(count, VALUE_HEADS) for _ in range(2))
    rounded = [x.to(device, dtype) for x in (query, key, value)]
    return [*rounded, -decay.exp().to(device), beta.sigmoid().to(device)]


def convolution_inputs(count: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the inputs of the convolution of a pack of `count` tokens, and its weights."""
    generator = torch.Generator().manual_seed(7)
    shapes = (count, CHANNELS), (CHANNELS, WIDTH)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]


def largest_errors(name: str, lengths: tuple[int, ...], device: str, dtype: torch.dtype) -> list[float]:
    """Return the largest error of the fused function's output and of each of its inputs' gradients.

    Each error is divided by the largest absolute value of the right result.

    name: name of the function in both modules.
    """
    make = rule_inputs if name == "gated_delta_rule" else convolution_inputs
    given, chunks = make(sum(lengths), device, dtype), Chunks.of(np.array(lengths), torch.device(device))
    found = []
    for module in (delta_rule, fused_delta_rule):
        inputs = [x.clone().requires_grad_() for x in given]
        output = getattr(module, name)(*inputs, chunks)
        weights = torch.linspace(-1, 1, output.numel(), device=device).view_as(output)
        (output.float() * weights).sum().backward()
        found.append([output.detach(), *(x.grad for x in inputs)])
    return [
        float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        for theirs, ours in zip(*found, strict=True)
    ]


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize("name", ["gated_delta_rule", "causal_convolution"])
def test_fused_kernels_compute_the_same(name, lengths):
    pytest.importorskip("fla")
    assert fused_delta_rule.fits(torch.ones(1, dtype=torch.bfloat16, device="cuda"))
    errors = largest_errors(name, lengths, "cuda", torch.bfloat16)
    assert max(errors) < 0.02, errors

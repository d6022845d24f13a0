"""Attention with a sliding window over packs, in one process, against a dense mask in float64."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from grpo_megatron.batch.layout import Layout
from grpo_megatron.megatron.layers import attention, packs
from grpo_megatron.megatron.layers.attention import PackedAttention
from tests.parallel.attentions import Problem, config, exact

PROBLEMS = {
    "unequal lengths": Problem(window=12),
    "one token": Problem(window=1),
    "as long as the longest sequence": Problem(window=64),
    "longer than the pack": Problem(window=1000),
    "several masks": Problem(lengths=(90, 37, 64, 150), window=20, masked_queries=7, alignment=16),
    "masks longer than the window": Problem(lengths=(150, 3), window=5, masked_queries=64),
}


class Given(Exception):
    """Keys beside values, which a rank gives to the collective."""


def given(problem: Problem, cp_rank: int) -> torch.Tensor:
    """Return what one of two CP ranks gives to the collective."""
    with pytest.raises(Given) as raised:
        attend(problem, 2, cp_rank)
    return raised.value.args[0].detach()


def attend(problem: Problem, cp: int = 1, cp_rank: int = 0, gathered=None):
    """Return (pack, output, inputs) of one CP rank.

    gathered: keys beside values of all CP ranks, which the collective returns.
    """
    group = SimpleNamespace(cp=SimpleNamespace(size=lambda: cp), tp=SimpleNamespace(size=lambda: 1))
    module = PackedAttention(
        config(problem, cp),
        1,
        None,
        "self",
        pg_collection=group,
        rope_frequencies=problem.frequencies,
        window=problem.window,
    )
    pack = Layout(cp=cp, cp_rank=cp_rank, alignment=problem.alignment).pack(problem.lengths)
    tensors = problem.tensors()
    grad = pack.scatter(tensors.pop("grad").numpy())
    inputs = {name: pack.scatter(x.numpy()).requires_grad_() for name, x in tensors.items()}

    def gather(both, group):
        if gathered is None:
            raise Given(both)
        return gathered

    with (
        patch.object(packs, "_MASKED_QUERIES", problem.masked_queries or packs._MASKED_QUERIES),
        patch.object(attention, "gather_from_sequence_parallel_region", gather),
    ):
        packed = packs.describe_pack(pack, torch.device("cpu"))
        output = module(**inputs, packed_seq_params=packed)
    return SimpleNamespace(pack=pack, packed=packed, output=output, inputs=inputs, grad=grad)


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients(name):
    problem = PROBLEMS[name]
    found, expected = attend(problem), exact(problem)
    found.output.backward(found.grad)
    real = found.pack.index >= 0
    values = {"output": found.output.detach(), **{name: x.grad for name, x in found.inputs.items()}}
    for part, value in values.items():
        np.testing.assert_allclose(value.numpy()[real], expected[part], rtol=0, atol=2e-5, err_msg=part)


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_of_context_parallel_ranks(name):
    problem = PROBLEMS[name]
    gathered = torch.cat([given(problem, rank) for rank in range(2)])
    expected = exact(problem)["output"]
    for rank in range(2):
        found = attend(problem, 2, rank, gathered)
        real = found.pack.index >= 0
        np.testing.assert_allclose(
            found.output.detach().numpy()[real], expected[found.pack.index[real]], rtol=0, atol=2e-5
        )


def test_keys_before_the_window_are_not_read():
    found = attend(Problem(lengths=(150, 40), window=20, masked_queries=10))
    batches = found.packed.within(20).batches
    assert max(batch.k for batch in batches) == 10 + 19
    assert found.packed.within(20) is found.packed.within(20)


def test_a_window_is_noticed():
    """The comparison must notice a difference: a window of 12 tokens is not one of 13."""
    found = attend(PROBLEMS["unequal lengths"]).output.detach().numpy()
    other = exact(replace(PROBLEMS["unequal lengths"], window=13))["output"]
    assert np.abs(found - other).max() > 1e-2

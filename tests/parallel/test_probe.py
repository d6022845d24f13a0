"""The selftest's measurements in every layout: probes of log-prob and entropy, and exact changes of the
weights.
"""

import numpy as np
import pytest
import torch

from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import random_batch, tiny_qwen3
from tests.parallel import actors

LAYOUTS = {
    "tp2sp_dp2": ParallelSizes(tp=2, sequence_parallel=True, dp=2),
    "pp2vpp2": ParallelSizes(pp=2, vpp=2),
    "cp2": ParallelSizes(cp=2),
}
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def batch():
    return random_batch(count=12)


@pytest.fixture(scope="module")
def probes(ranks, batch, tmp_path_factory):
    model = tiny_qwen3(tmp_path_factory.mktemp("model"))

    def run(sizes, **options):
        config = actor_config(model, sizes, rollout=RolloutConfig(temperature=1.3), **options)
        results = [r for r in ranks.run(actors.probes, sizes, config, batch, TEMPERATURE) if r is not None]
        return {name: sum(result[name] for result in results) for name in results[0]}

    return run


@pytest.fixture(scope="module")
def expected(probes):
    return probes(ParallelSizes())


def test_on_one_rank(ranks, batch, expected, tmp_path_factory):
    logp, entropy = expected["probe"]
    model = tiny_qwen3(tmp_path_factory.mktemp("model"))
    config = actor_config(model, rollout=RolloutConfig(temperature=TEMPERATURE))
    (same,) = ranks.run(actors.logprobs, ParallelSizes(), config, batch, True)
    np.testing.assert_array_equal(logp, same)  # as if the temperature were the configured one
    assert np.abs(logp - expected["logprobs"]).max() > 0.01
    assert (entropy >= 0).all()
    moved = {dtype: np.abs(expected[dtype][0] - logp).mean() for dtype in (torch.float32, torch.bfloat16)}
    assert 1e-9 < moved[torch.float32] < 1e-5
    assert 1e-4 < moved[torch.bfloat16] < 0.1
    assert np.abs(expected["doubled"] - expected["probe"]).max() > 0.01
    np.testing.assert_array_equal(expected["undone"], expected["probe"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(probes, expected, layout):
    found = probes(LAYOUTS[layout])
    for name in ("logprobs", "probe", "doubled"):
        np.testing.assert_allclose(
            found[name], expected[name], rtol=1e-5, atol=1e-4 if name == "doubled" else 2e-5
        )
    np.testing.assert_array_equal(found["undone"], found["probe"])
    for dtype in (torch.float32, torch.bfloat16):
        # Other random numbers, but of the same size.
        ours, theirs = (np.abs(result[dtype] - result["probe"]).mean() for result in (found, expected))
        assert 0.3 < ours / theirs < 3


def test_the_distributed_optimizers_gathering_does_not_undo_a_change(probes):
    found = probes(ParallelSizes(dp=2), distributed_optimizer=True, overlap=True)
    assert np.abs(found["doubled"] - found["probe"]).max() > 0.01
    np.testing.assert_array_equal(found["undone"], found["probe"])


@pytest.mark.slow
def test_a_weight_that_is_no_number_is_found_on_its_rank(ranks, batch, tmp_path):
    sizes = LAYOUTS["pp2vpp2"]
    config = actor_config(tiny_qwen3(tmp_path), sizes)
    first, last = ranks.run(actors.broken_weights, sizes, config, batch)
    assert first[:2] == ([], [])
    assert last[:2] == ([], [last[2]])

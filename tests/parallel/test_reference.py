"""The reference's weights: two exchanges per step, never used as the policy's, hidden states within a
bound.
"""

import numpy as np
import pytest
import torch

from grpo_megatron.config.schema import Config, OptimizerConfig, Precision, RefConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model
from tests.parallel import references
from tests.parallel.test_invariance import FULL_KL, TOKEN, make_batch

ONE = ParallelSizes()
OPTIMIZER = OptimizerConfig(lr=1e-3)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=seed) for seed in range(2)]


def with_reference(models, sizes=ONE, precision=Precision.fp32, ref: dict | None = None, **options) -> Config:
    reference = RefConfig(path=models[1], **(ref or {}))
    return actor_config(models[0], sizes, OPTIMIZER, precision, with_reference=True, ref=reference, **options)


@pytest.mark.slow_when(lambda mini_batches: mini_batches == 1)
@pytest.mark.parametrize("mini_batches", [1, 3])
def test_a_step_exchanges_the_weights_twice_however_many_mini_batches(ranks, models, mini_batches):
    config = with_reference(models)
    config.data.train_batch_size, config.train.ppo_mini_batch_size = 6, 6 // mini_batches
    config.rollout.n = 4
    config.train.max_tokens_per_micro_batch = 100
    step = ranks.run(references.before_training, ONE, config)[0]
    assert step.exchanges == 2
    assert len(step.logprobs) == mini_batches
    assert step.weights_stayed
    assert min(step.micro_batches) > 1
    for found in step.logprobs:
        assert np.array_equal(found["ref_logp"], found["alone"])
        assert np.abs(found["ref_logp"] - found["old_logp"]).max() > 0.1


@pytest.mark.slow_when(lambda piece: piece > 1000)
@pytest.mark.parametrize("piece", [1000, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param(ONE, {}, id="one"),
        pytest.param(ONE, {"ref": {"offload": False}, "precision": Precision.bf16}, id="bf16 on the device"),
        pytest.param(ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}, id="dp2 overlap"),
    ],
)
def test_weights_are_exchanged_bit_for_bit(ranks, models, sizes, options, piece):
    config = with_reference(models, sizes, **options)
    assert ranks.run(references.exchanged, sizes, config, piece) == [(True, True, True)] * sizes.world_size


def test_nothing_takes_the_references_weights_for_the_policys(ranks, models, tmp_path):
    config = with_reference(models)
    said = ranks.run(references.refusals, ONE, config, make_batch(0), TOKEN, str(tmp_path))[0]
    assert "only within Passes.reference()" in said.pop("reference pass")
    assert {name: text for name, text in said.items() if "leave Passes.reference() first" not in text} == {}
    assert len(said) == 10
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_hidden_states_beyond_the_bound_wait_on_the_host_and_change_nothing(ranks, models):
    batches = [make_batch(seed) for seed in range(2)]
    # float32, padded by no layout of one rank
    size = sum(batch.num_tokens for batch in batches) * 64 * 4
    found = {}
    for bound in (size, size // 2, 0):
        config = with_reference(models, ref={"hidden_gib": bound / 2**30})
        found[bound], on_host = ranks.run(references.gradients_of_full_kl, ONE, config, batches, FULL_KL)[0]
        assert len(set(on_host)) == 1, "the second step has the bound of the first"
        assert (on_host[0] > 0) == (bound < size)
        assert size - bound <= on_host[0] <= size
    for own, other in ((size, size // 2), (size, 0)):
        for one, two in zip(found[own], found[other], strict=True):
            assert all(torch.equal(one[name], two[name]) for name in one)
    first = found[size][0]
    assert any(not torch.equal(first[name], found[size][1][name]) for name in first), (
        "the mini-batches are different"
    )


def test_the_exact_kl_without_hidden_states_is_refused(ranks, models):
    said = ranks.run(references.without_hidden, ONE, with_reference(models), make_batch(0), FULL_KL)[0]
    assert "needs logprobs(reference=True, keep_hidden=True)" in said

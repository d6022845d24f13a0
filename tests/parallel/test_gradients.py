"""Gradients that several calls add up: those of one call, in every layout, and the same optimizer steps."""

import numpy as np
import pytest
import torch

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.named_loss import OwnLoss
from grpo_megatron.batch.datum import Datum, datum_batch
from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import random_samples, tiny_model
from tests.parallel.gradients import accumulated, together

LAYOUTS = {
    "one rank": (ParallelSizes(), {}),
    "dp2": (ParallelSizes(dp=2), {}),
    "dp2 distributed overlap": (ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}),
    "tp2 sp": (ParallelSizes(tp=2, sequence_parallel=True), {}),
    "pp2": (ParallelSizes(pp=2), {}),
    "cp2": (ParallelSizes(cp=2), {}),
}


def data_of(seed: int, count: int) -> list[Datum]:
    """Return sequences with weights that differ between tokens and do not add up to 1."""
    rng = np.random.default_rng(seed)
    data = []
    for sample in random_samples(count=count, seed=seed):
        datum = Datum.of(sample, advantage=rng.normal())
        weight = datum.weight * rng.uniform(0.1, 1, len(datum.weight)).astype(np.float32)
        data.append(Datum(datum.tokens, weight, datum.advantage, datum.logprobs))
    return data


# Calls with different numbers of tokens: a mean over each call's tokens would be another gradient.
CALLS = [data_of(0, 4), data_of(1, 12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def config_of(model, sizes, options):
    return actor_config(model, sizes, OptimizerConfig(lr=1e-3, eps=1e-3), **options)


@pytest.fixture(scope="module")
def expected(ranks, model):
    config = config_of(model, ParallelSizes(), {})
    batches = [datum_batch([*CALLS[0], *CALLS[1]])] * 2
    return ranks.run(together, ParallelSizes(), config, batches, PolicyLoss())[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_two_calls_add_up_to_one_and_so_do_two_steps(ranks, model, expected, layout):
    """The second step shows that the first one has left nothing behind.

    Planted bug: gradients accumulated over calls are lost, or added up over the replicas twice.
    """
    sizes, options = layout
    batches = [datum_batch(call) for call in CALLS]
    results = ranks.run(accumulated, sizes, config_of(model, sizes, options), batches, PolicyLoss())
    norms, parameters = expected
    for result in results:
        assert result.norms == pytest.approx(norms, rel=1e-5)
    found = results[0].tensors | {name: t for one in results for name, t in one.tensors.items()}
    assert found.keys() == parameters.keys()
    for name, tensor in parameters.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name


def minus_logp(logp, entropy, inputs):
    return -logp


def test_log_probs_of_the_training_pass_and_a_function_as_the_loss(ranks, model):
    data = CALLS[1]
    config = config_of(model, ParallelSizes(cp=2), {})
    result = ranks.run(
        accumulated, ParallelSizes(cp=2), config, [datum_batch(data)], OwnLoss(minus_logp), True
    )
    reported = next(one for one in result if one.logprobs is not None)
    batch = datum_batch(data)
    assert np.abs(reported.logprobs - reported.fresh)[batch.loss_mask].max() < 1e-5
    assert (reported.logprobs[~batch.loss_mask] == 0).all()
    expected = -(reported.fresh * batch.weight).sum()
    assert reported.loss == pytest.approx(expected, rel=1e-5)

"""A step of which the tokens stay on the ranks: the driver's sums and the ranks' columns in every layout."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from grpo_megatron.algorithm.coefficients import measure
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import (
    AlgorithmConfig,
    MaskAppliesTo,
    MismatchConfig,
    MismatchCorrection,
)
from grpo_megatron.config.schema import Config, OptimizerConfig, RefConfig, RolloutConfig, TrainConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import random_samples, tiny_model
from tests.parallel import mini_batches
from tests.parallel.mini_batches import Step

LAYOUTS = {
    "dp2": ParallelSizes(dp=2),
    "pp2": ParallelSizes(pp=2),
    "cp2": ParallelSizes(cp=2),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
}
SAMPLES = random_samples(count=24)
# Two mini-batches, each trained on twice.
OPTIMIZER_STEPS = 4


def config_of(models, sizes: ParallelSizes) -> Config:
    """Return a configuration in which every column and every sum has a use."""
    return actor_config(
        models[0],
        sizes,
        OptimizerConfig(lr=1e-3, eps=1e-3),
        algorithm=AlgorithmConfig(
            adv_estimator="reinforce_plus_plus",
            use_kl_in_reward=True,
            kl_penalty="k3",
            use_kl_loss=True,
            mask_applies_to=MaskAppliesTo.all,
        ),
        mismatch=MismatchConfig(correction=MismatchCorrection.icepop, ratio_low=0.02, ratio_high=1.0),
        ref=RefConfig(path=models[1]),
        rollout=RolloutConfig(n=4, max_response_length=40),
        train=TrainConfig(ppo_mini_batch_size=3, ppo_epochs=2, max_tokens_per_micro_batch=100),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return [tiny_model(tmp_path_factory.mktemp("model"), "qwen3", seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def alone(ranks, models) -> Step:
    return ranks.run(mini_batches.step, ParallelSizes(), config_of(models, ParallelSizes()), SAMPLES)[0]


def test_the_sums_are_those_of_the_columns_that_the_ranks_keep(alone, models):
    config = config_of(models, ParallelSizes())
    assert len(alone.sums) == 2
    assert min(alone.micro_batches) > 1
    for index, (sums, columns) in enumerate(zip(alone.sums, alone.columns, strict=True)):
        batch = TrainBatch.from_samples(SAMPLES[12 * index : 12 * index + 12])
        batch.set(old_logp=columns["old_logp"], ref_logp=columns["ref_logp"])
        expected = measure(batch, config.algorithm, Correction.from_config(config.mismatch))
        for spec in fields(sums):
            np.testing.assert_allclose(getattr(sums, spec.name), getattr(expected.sums, spec.name), rtol=1e-9)
        assert 0 < sums.kept.sum() < sums.trained.sum()
        np.testing.assert_array_equal(columns["loss_mask"], batch.loss_mask & expected.kept)
        trained = columns["loss_mask"]
        assert (columns["weight"][trained] > 0).all()
        assert not columns["weight"][~trained].any()
        assert len(np.unique(columns["advantage"][trained])) > 50


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_same_sums_and_columns_and_learns_the_same(ranks, models, alone, layout):
    sizes = LAYOUTS[layout]
    results = ranks.run(mini_batches.step, sizes, config_of(models, sizes), SAMPLES)
    for found in results:  # every rank has run the driver
        for sums, expected in zip(found.sums, alone.sums, strict=True):
            for spec in fields(sums):
                np.testing.assert_allclose(
                    getattr(sums, spec.name), getattr(expected, spec.name), rtol=1e-3, atol=1e-5
                )
        for columns, expected in zip(found.columns, alone.columns, strict=True):
            for name, values in columns.items():
                np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
        assert len(found.metrics) == 1 + OPTIMIZER_STEPS
        for metrics, expected in zip(found.metrics, alone.metrics, strict=True):
            assert metrics.keys() == expected.keys()
            worst, others = (one["mismatch/worst"].result() for one in (metrics, expected))
            assert [token[3:] for token in worst] == [token[3:] for token in others]
    weights = {name: value for found in results for name, value in found.weights.items()}
    assert weights.keys() == alone.weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, alone.weights[name], rtol=1e-4, atol=1e-5)

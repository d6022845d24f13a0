"""Every preset with the real actor, and the limits that drop a step."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.load import PRESETS
from grpo_megatron.config.schema import OptimizerConfig, RefConfig
from grpo_megatron.metrics import merge, to_floats
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.check import load_config
from tests.configs import actor_config, sizes_of
from tests.models import tiny_model
from tests.parallel import presets
from tests.parallel.test_invariance import Suite

NAMES = sorted(file.stem for file in PRESETS.glob("*.yaml"))
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3)


def configured(*overrides):
    return load_config(
        None, ["model.path=m", "data.train=d.jsonl", "rollout.max_response_length=40", *overrides]
    )


def scored_batch(mismatch: float = 0.0) -> TrainBatch:
    """Return 4 groups of 3 responses with different rewards. rollout_logp holds the engine's error, which
    is added later.
    """
    rng = np.random.default_rng(7)
    samples = []
    for i in range(12):
        length = int(rng.integers(3, 40))
        samples.append(
            Sample.of(
                group_id=i // 3,
                trajectory_id=i,
                prompt_ids=rng.integers(3, 61, 5).astype(np.int32),
                response_ids=rng.integers(3, 61, length).astype(np.int32),
                loss_mask=np.ones(length, dtype=bool),
                rollout_logprobs=rng.normal(0, mismatch, length).astype(np.float32)
                if mismatch
                else np.zeros(length, np.float32),
                finish_reason="stop",
                reward=float(rng.integers(0, 3)),
            )
        )
    return TrainBatch.from_samples(samples)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model, and another of the same shape for the reference."""
    return [tiny_model(tmp_path_factory.mktemp(f"model{seed}"), "qwen3", seed=seed) for seed in (0, 1)]


def run(ranks, folders, config, sizes, batch, **options):
    actor = actor_config(folders[0], sizes, OPTIMIZER, ref=RefConfig(path=folders[1]))
    config = replace(
        config, model=actor.model, ref=actor.ref, megatron=actor.megatron, optimizer=actor.optimizer
    )
    found = ranks.run(presets.steps, sizes, config, batch, *options.values())
    reporting = [step.results[0].metrics for step in found if step.results[0] is not None]
    return found, to_floats(merge(reporting))


def test_the_eight_presets_are_there():
    assert NAMES == [
        "cispo",
        "dapo",
        "dr_grpo",
        "grpo",
        "grpo_whole_response",
        "gspo",
        "reinforce_pp",
        "rloo",
    ]


@pytest.mark.slow_when(lambda name: name != "dapo")
@pytest.mark.parametrize("name", NAMES)
def test_one_step_of_a_preset_at_tp2_as_with_one_rank(ranks, folders, name):
    config = configured(f"algorithm.preset={name}")
    one, expected = run(ranks, folders, config, ParallelSizes(), scored_batch())
    two, metrics = run(ranks, folders, config, ParallelSizes(tp=2), scored_batch())
    result = next(step.results[0] for step in two if step.results[0])
    assert not result.dropped
    assert result.grad_norm == pytest.approx(one[0].results[0].grad_norm, rel=1e-4)
    assert result.grad_norm > 0
    assert all(change > 0 for step in two for change in step.moved.values())
    assert metrics["actor/ratio"] == pytest.approx(1, abs=1e-5)
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), key
    assert ("actor/kl_to_reference" in metrics) == config.algorithm.use_kl_loss
    if config.algorithm.use_kl_loss:
        assert metrics["actor/kl_to_reference"] > 0.01


@pytest.mark.slow
def test_the_presets_differ(ranks, folders):
    """Each preset makes a different step of the same samples. Some clip ratios of 1.3."""
    norms = {}
    for name in NAMES:
        step, _ = run(
            ranks,
            folders,
            configured(f"algorithm.preset={name}"),
            ParallelSizes(),
            scored_batch(),
            old_shift=-0.26,
        )
        norms[name] = step[0].results[0].grad_norm
    ordered = sorted(norms.values())
    assert all(b - a > 1e-4 * b for a, b in itertools.pairwise(ordered)), norms


# --- layout invariance, of the losses of presets

INVARIANT = {
    "dapo": ["algorithm.preset=dapo", "algorithm.clip_ratio_c=3.0"],
    "gspo": ["algorithm.preset=gspo", "algorithm.clip_ratio_low=0.3", "algorithm.clip_ratio_high=0.5"],
    "grpo with the full kl": ["algorithm.preset=grpo", "algorithm.kl_loss_type=full"],
    "icepop in the forward": ["mismatch.correction=icepop", "algorithm.entropy_coeff=0.01"],
    "sequence masks in the forward": [
        "mismatch.correction=mis",
        "mismatch.ratio_high=1e6",
        "algorithm.preset=cispo",
    ],
}


@pytest.fixture(scope="module")
def suite(ranks, folders):
    return Suite(ranks, folders[0], ref=RefConfig(path=folders[1]))


# The losses themselves are in test_invariance; CP divides the sequences that some are sums over.
@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("name", INVARIANT)
def test_the_layout_changes_nothing(suite, name, layout):
    config = configured(*INVARIANT[name])
    suite.check(
        ParallelSizes(**layout), PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=False)
    )


# --- dropped steps


@pytest.mark.slow_when(lambda sizes: sizes.world_size > 1)
@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(tp=2), ParallelSizes(tp=2, pp=2)], ids=str)
def test_extreme_ratios_drop_the_step(ranks, folders, sizes):
    """The old log-probs are 2 nats too low, which is a mean ratio of 7.4."""
    config = configured("algorithm.early_stop_imp_ratio=7")
    found, metrics = run(ranks, folders, config, sizes, scored_batch(), old_shift=-2.0)
    assert metrics["actor/ratio"] == pytest.approx(np.exp(2), rel=1e-3)
    for step in found:
        assert set(step.moved.values()) == {0.0}
        for result in filter(None, step.results):
            assert result.dropped
            assert result.beyond == ("actor/ratio=7.389 exceeds its limit 7.0",)
    config.algorithm.early_stop_imp_ratio = 8.0
    found, _ = run(ranks, folders, config, sizes, scored_batch(), old_shift=-2.0)
    assert all(max(step.moved.values()) > 0 for step in found)


@pytest.mark.slow
def test_what_is_known_before_training_is_masked_in_every_step(ranks, folders):
    config = configured("mismatch.correction=icepop", "mismatch.ratio_low=0.9", "mismatch.ratio_high=1.1")
    found, _ = run(
        ranks, folders, config, ParallelSizes(tp=2), scored_batch(mismatch=0.1), old_shift=0.0, count=2
    )
    batch = found[0].batch
    assert 0.2 < (batch.policy_factor[batch.loss_mask] == 0).mean() < 0.5
    assert (batch.weight[batch.loss_mask] > 0).all()
    assert 0.2 < found[0].mismatch["mismatch/max"].result() < 0.6
    assert all(max(step.moved.values()) > 0 for step in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"distributed_optimizer": True, "overlap": True}], ids=["", "overlap"]
)
def test_reference_reset(ranks, folders, options):
    batch = scored_batch()
    batch.weight = np.where(batch.loss_mask, 1 / 256, 0).astype(np.float32)
    batch.advantage = np.where(batch.loss_mask, 1, 0).astype(np.float32)
    config = actor_config(folders[0], ParallelSizes(tp=2), OPTIMIZER, with_reference=True, **options)
    logps = ranks.run(presets.reference_reset, sizes_of(config), config, batch)[0]
    mask = batch.loss_mask
    logps = {name: values[mask] for name, values in logps.items()}
    np.testing.assert_array_equal(logps["first: reference"], logps["first: policy"])
    np.testing.assert_array_equal(logps["stepped: reference"], logps["first: policy"])
    assert np.abs(logps["stepped: policy"] - logps["first: policy"]).max() > 1e-3
    np.testing.assert_array_equal(logps["reset: reference"], logps["stepped: policy"])
    np.testing.assert_array_equal(logps["reset: policy"], logps["stepped: policy"])
    np.testing.assert_array_equal(logps["stepped again: reference"], logps["stepped: policy"])
    assert np.abs(logps["stepped again: policy"] - logps["stepped: policy"]).max() > 1e-3

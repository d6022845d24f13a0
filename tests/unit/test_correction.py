"""Effect of the mismatch on the policy term: weights and masks, and when they are known."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.correction import (
    CORRECTION_BOUNDS,
    REJECTION_BOUNDS,
    Correction,
    Rejection,
    Weighting,
)
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.sequence_weights import LOSS_AGG_MODES
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import (
    AlgorithmConfig,
    MaskAppliesTo,
    MismatchAction,
    MismatchCorrection,
    MismatchRejection,
)
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Metrics, to_floats
from tests.coefficients import set_coefficients, token_weights
from tests.unit.ragged import ragged

WEIGHTINGS = [kind for kind in MismatchCorrection if kind != MismatchCorrection.none]
REJECTIONS = [kind for kind in MismatchRejection if kind != MismatchRejection.none]
ICEPOP = Correction(Weighting(MismatchCorrection.icepop, 0.7, 1.4))


def weighting(kind: str, low: float | None = None, high: float | None = None) -> Correction:
    published = CORRECTION_BOUNDS[MismatchCorrection(kind)]
    return Correction(
        Weighting(MismatchCorrection(kind), published[0] if low is None else low, high or published[1])
    )


def correct(correction: Correction, delta: list[list[float]]):
    """Return factors and masks for sequences with these log-ratios of trainer to engine."""
    flat = torch.tensor([value for row in delta for value in row], dtype=torch.float64)
    sequence = torch.tensor([i for i, row in enumerate(delta) for _ in row])

    def sequence_sum(values):
        return values.new_zeros(len(delta)).index_add(0, sequence, values)[sequence]

    zeros = torch.zeros_like(flat)
    factor, kept = correction(zeros, flat, torch.ones(len(flat), dtype=torch.bool), sequence_sum)
    return factor.tolist(), kept.tolist()


# --- by hand

LOG2 = math.log(2)
BY_HAND = {
    # ratios 4, 1/4, 1 and 2
    "tis": ([2, 0.25, 1, 2], [True, True, True, True]),
    "icepop": ([4, 0, 1, 2], [True, False, True, True]),
    # products of the sequences: 1 and 2
    "seq_tis": ([1, 1, 2, 2], [True, True, True, True]),
    "mis": ([1, 1, 2, 2], [True, True, True, True]),
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_weights_by_hand(kind):
    factor, kept = correct(weighting(kind), [[2 * LOG2, -2 * LOG2], [0, LOG2 * (1 - 1e-12)]])
    assert factor == pytest.approx(BY_HAND[kind][0])
    assert kept == BY_HAND[kind][1]


def test_sequences_beyond_the_bound():
    delta = [[LOG2, LOG2], [0.0]]  # a product of 4
    assert correct(weighting("seq_tis"), delta) == (pytest.approx([2, 2, 1]), [True] * 3)
    assert correct(weighting("mis"), delta) == (pytest.approx([0, 0, 1]), [False, False, True])


# Of the sequences (0.6, -0.2), (0.3) and (-0.8): which bounds mask which tokens.
REJECTED = [
    ("token_ratio", math.exp(-0.5), math.exp(0.5), [False, True, True, False]),
    ("token_k2", 0, 0.18 * 1.001, [True, True, True, False]),
    ("token_k3", 0, 0.2, [False, True, True, True]),  # e^0.6 - 1.6 = 0.222, e^-0.8 - 0.2 = 0.249
    ("seq_ratio", math.exp(-0.5), math.exp(0.35), [False, False, True, False]),
    ("seq_geometric_ratio", math.exp(-0.5), math.exp(0.35), [True, True, True, False]),
    ("seq_sum_k2", 0, 0.19, [False, False, True, False]),  # 0.18 + 0.02
    ("seq_mean_k2", 0, 0.11, [True, True, True, False]),
    ("seq_max_k2", 0, 0.1, [False, False, True, False]),
    ("seq_sum_k3", 0, 0.24, [False, False, True, False]),  # 0.2221 + 0.0187
    ("seq_mean_k3", 0, 0.13, [True, True, True, False]),
    ("seq_max_k3", 0, 0.223, [True, True, True, False]),
]


@pytest.mark.parametrize(("kind", "low", "high", "expected"), REJECTED)
def test_rejection_by_hand_only_masks(kind, low, high, expected):
    if kind == "token_k3":
        expected = [math.exp(d) - 1 - d <= high for d in (0.6, -0.2, 0.3, -0.8)]
    factor, kept = correct(
        Correction(None, Rejection(MismatchRejection(kind), low, high)), [[0.6, -0.2], [0.3], [-0.8]]
    )
    assert kept == expected
    assert factor == [float(k) for k in expected]


def test_every_rejection_is_tested_by_hand():
    assert {kind for kind, *_ in REJECTED} == {kind.value for kind in REJECTIONS}


def test_masking_single_tokens_comes_in_addition():
    correction = replace(weighting("tis"), max_difference=1.0)
    assert correct(correction, [[1.5, -1.5, 0.5]]) == (
        pytest.approx([0, 0, math.exp(0.5)]),
        [False, False, True],
    )
    assert not correct(correction, [[math.nan]])[1][0]


@pytest.mark.parametrize("kind", REJECTIONS)
def test_what_is_not_a_number_is_rejected(kind):
    assert correct(Correction(None, Rejection(kind, 0.0, 9.0)), [[math.nan], [0.0]]) == (
        [0, 1],
        [False, True],
    )


@pytest.mark.parametrize(("kind", "expected"), [("icepop", [True, True]), ("mis", [True, True])])
def test_the_bounds_themselves_are_inside(kind, expected):
    assert correct(weighting(kind, 1.0, 2.0), [[0.0]])[1] == [True]
    assert correct(weighting(kind, 0.5, 1.0), [[0.0]])[1] == [True]
    for rejection in ("token_ratio", "seq_ratio", "seq_geometric_ratio"):
        for low, high in ((1.0, 2.0), (0.5, 1.0)):
            assert (
                correct(Correction(None, Rejection(MismatchRejection(rejection), low, high)), [[0.0, 0.0]])[1]
                == expected
            )
    for rejection in ("token_k2", "seq_sum_k2", "seq_mean_k2", "seq_max_k2"):
        assert correct(Correction(None, Rejection(MismatchRejection(rejection), 0.0, 0.125)), [[0.5]])[1] == [
            True
        ]
    assert correct(Correction(max_difference=0.5), [[0.5, -0.5, 0.625]])[1] == [True, True, False]


@pytest.mark.parametrize("delta", [25.0, -25.0, 1000.0, -1000.0])
def test_differences_beyond_twenty_nats_count_as_twenty(delta):
    """exp(1000) is infinite, and infinity times a masked token's 0 is not a number."""
    d = math.copysign(20.0, delta)
    unbounded = Weighting(MismatchCorrection.tis, 0.0, math.inf)
    assert correct(Correction(unbounded), [[delta]])[0] == [pytest.approx(math.exp(d))]
    for kind, value in (("token_ratio", math.exp(d)), ("token_k2", 200.0), ("seq_sum_k3", math.expm1(d) - d)):
        kept = [
            correct(Correction(None, Rejection(MismatchRejection(kind), 0.0, value * by)), [[delta]])[1]
            for by in (1.01, 0.99)
        ]
        assert kept == [[True], [False]]


# --- against one sample at a time


def naive_weight(kind: str, low: float, high: float, delta: list[float]) -> list[float]:
    """Return the weights of one sequence's trained tokens, 0 where it masks."""
    product = math.exp(sum(delta))
    ratios = [product if kind in ("seq_tis", "mis") else math.exp(d) for d in delta]
    if kind in ("tis", "seq_tis"):
        return [min(max(ratio, low), high) for ratio in ratios]
    return [ratio if low <= ratio <= high else 0.0 for ratio in ratios]


def naive_rejection(kind: str, low: float, high: float, delta: list[float]) -> list[bool]:
    of_token = {"k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
    if kind == "token_ratio":
        return [low <= math.exp(d) <= high for d in delta]
    if kind == "seq_ratio":
        return [low <= math.exp(sum(delta)) <= high] * len(delta)
    if kind == "seq_geometric_ratio":
        return [low <= math.exp(sum(delta) / len(delta)) <= high] * len(delta)
    level, _, measure = kind.rpartition("_")
    values = [of_token[measure](d) for d in delta]
    if level == "token":
        return [value <= high for value in values]
    of_sequence = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[
        level
    ]
    return [of_sequence <= high] * len(values)


@pytest.mark.slow_but(6)
@pytest.mark.parametrize("rejection", [None, *REJECTIONS])
@pytest.mark.parametrize("kind", [None, *WEIGHTINGS])
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([None, 0.4]))
def test_every_weight_with_every_rejection_like_one_sample_at_a_time(kind, rejection, seed, limit):
    given = ragged(seed, spread=0.5)
    bounds, other = (0.8, 1.3), (0.9, 1.2) if rejection in REJECTION_BOUNDS else (0.0, 0.1)
    correction = Correction(
        kind and Weighting(kind, *bounds), rejection and Rejection(rejection, *other), limit
    )
    inputs = given.inputs
    factor, kept = correction(inputs.rollout_logp, inputs.old_logp, inputs.mask, inputs.sequence_sum)
    for row in given.rows:
        tokens = given.trained(row)
        delta = [float(inputs.old_logp[t] - inputs.rollout_logp[t]) for t in tokens]
        weights = naive_weight(kind.value, *bounds, delta) if kind else [1.0] * len(delta)
        accepted = (
            naive_rejection(rejection.value, *other, delta) if rejection and delta else [True] * len(delta)
        )
        keeps = [
            a and w > 0 and (limit is None or abs(d) <= limit)
            for a, w, d in zip(accepted, weights, delta, strict=True)
        ]
        assert [bool(kept[t]) for t in tokens] == keeps
        expected = [w if k else 0.0 for w, k in zip(weights, keeps, strict=True)]
        np.testing.assert_allclose([float(factor[t]) for t in tokens], expected, rtol=1e-6)
        assert all(factor[t] == 1 and kept[t] for t in range(row.start, row.stop) if t not in tokens)


# --- where it is known: before training, or in the training forward


def config_for(mode: str, applies_to: str, renormalize: bool) -> Config:
    config = Config()
    config.algorithm.loss_agg_mode = mode
    config.algorithm.mask_applies_to = MaskAppliesTo(applies_to)
    config.rollout.max_response_length = 8
    config.mismatch.renormalize = renormalize
    return config


def coefficients(batch: TrainBatch, config: Config, correction: Correction) -> tuple[TrainBatch, Metrics]:
    """Return a copy of the batch with its coefficients, and the metrics."""
    batch = replace(batch)
    return batch, set_coefficients([batch], config, correction, KLController(0.0))


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6))
def test_renormalized_the_means_are_over_what_is_kept(mode, seed):
    given = ragged(seed, spread=0.5)
    inputs = given.inputs
    factor, kept = (
        x.numpy() for x in ICEPOP(inputs.rollout_logp, inputs.old_logp, inputs.mask, inputs.sequence_sum)
    )
    trained = given.batch.loss_mask & kept
    kept_weights = token_weights(replace(given.batch, loss_mask=trained), mode, 8)

    keeps_kl, _ = coefficients(given.batch, config_for(mode, "policy", True), ICEPOP)
    np.testing.assert_array_equal(keeps_kl.weight, token_weights(given.batch, mode, 8))
    np.testing.assert_array_equal(keeps_kl.loss_mask, given.batch.loss_mask)
    np.testing.assert_allclose(keeps_kl.weight * keeps_kl.policy_factor, kept_weights * factor, rtol=1e-6)

    loses_all, _ = coefficients(given.batch, config_for(mode, "all", True), ICEPOP)
    np.testing.assert_array_equal(loses_all.weight, kept_weights)
    np.testing.assert_array_equal(loses_all.loss_mask, trained)
    np.testing.assert_allclose(loses_all.policy_factor[trained], factor[trained])


CORRECTIONS = {
    "icepop": ICEPOP,
    "tis, rejection of sequences": replace(
        weighting("tis"), rejection=Rejection(MismatchRejection.seq_geometric_ratio, 0.8, 1.2)
    ),
    "rejection of tokens": Correction(None, Rejection(MismatchRejection.token_k3, 0.0, 0.1)),
}
PARTS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coeff": 0.01}


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("applies_to", ["policy", "all"])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_known_before_training_or_in_the_forward_is_the_same_loss(name, mode, applies_to, seed):
    """Recomputed old log-probs are the current ones in the first optimizer step, so that nothing else
    differs.
    """
    data = ragged(seed, spread=0.5, current=True)
    data.batch.old_logp = np.where(data.batch.loss_mask, data.logp.detach().numpy(), 0)
    known, _ = coefficients(data.batch, config_for(mode, applies_to, False), CORRECTIONS[name])
    recomputed = replace(
        data.inputs,
        old_logp=torch.from_numpy(data.batch.old_logp),
        mask=torch.from_numpy(known.loss_mask),
        policy_factor=torch.from_numpy(known.policy_factor),
    )
    plain = PolicyLoss(AlgorithmConfig(**PARTS))
    before = torch.from_numpy(known.weight) * plain(data.logp, data.entropy, recomputed)[0]
    forward = PolicyLoss(replace(plain.algorithm, mask_applies_to=applies_to), correction=CORRECTIONS[name])
    weight = torch.from_numpy(token_weights(data.batch, mode, 8))
    current = weight * forward(data.logp, data.entropy, data.inputs)[0]
    torch.testing.assert_close(before, current)
    gradients = [
        torch.autograd.grad(total.sum(), data.logp, retain_graph=True)[0] for total in (before, current)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("applies_to", ["policy", "all"])
def test_known_in_the_forward_it_multiplies_the_policy_term(applies_to):
    given = ragged(3, spread=0.5, current=True)
    loss = PolicyLoss(AlgorithmConfig(**PARTS, mask_applies_to=applies_to), correction=ICEPOP)
    value, metrics = loss(given.logp, given.entropy, given.inputs)
    mask = given.inputs.mask
    factor, kept = ICEPOP(given.inputs.rollout_logp, given.logp, mask, given.inputs.sequence_sum)
    assert 0 < int((mask & ~kept).sum()) < int(mask.sum())
    others = 0.1 * (given.logp - given.inputs.ref_logp) ** 2 / 2 - 0.01 * given.entropy
    expected = factor * -given.inputs.advantage + others
    if applies_to == "all":
        expected = torch.where(kept, expected, 0)
    torch.testing.assert_close(value, torch.where(mask, expected, 0))
    assert to_floats(metrics)["mismatch/masked"] == pytest.approx(float((mask & ~kept).sum() / mask.sum()))
    gradient = torch.autograd.grad(value.sum(), given.logp)[0]
    slope = factor * -given.inputs.advantage + 0.1 * (given.logp - given.inputs.ref_logp)
    if applies_to == "all":
        slope = torch.where(kept, slope, 0)
    torch.testing.assert_close(gradient, torch.where(mask, slope, 0).detach())


@pytest.mark.parametrize("applies_to", ["policy", "all"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_metrics_say_how_much_is_masked_and_the_mean_factor_of_the_rest(applies_to, renormalize):
    given = ragged(3, spread=0.5)
    inputs, mask = given.inputs, given.batch.loss_mask
    correction = Correction(Weighting(MismatchCorrection.icepop, 0.7, 1.4))
    delta = (inputs.old_logp - inputs.rollout_logp).numpy()[mask]
    kept = (np.exp(delta) >= 0.7) & (np.exp(delta) <= 1.4)
    assert 0 < kept.sum() < len(kept)
    expected = {"mismatch/masked": (~kept).mean(), "mismatch/factor": np.exp(delta)[kept].mean()}
    _, before = coefficients(given.batch, config_for("token-mean", applies_to, renormalize), correction)
    assert to_floats(before) == pytest.approx(expected)
    forward = PolicyLoss(AlgorithmConfig(mask_applies_to=applies_to), correction=correction)
    _, known_late = forward(inputs.old_logp, given.entropy, inputs)
    assert {
        name: value for name, value in to_floats(known_late).items() if name in expected
    } == pytest.approx(expected)


def test_a_correction_is_only_made_where_it_is_asked_for():
    config = Config().mismatch
    assert Correction.from_config(config) is None
    config.action = MismatchAction.mask
    assert Correction.from_config(config) == Correction(None, None, 1.0)
    config.correction, config.ratio_high = MismatchCorrection.icepop, 3.0
    assert Correction.from_config(config) == Correction(
        Weighting(MismatchCorrection.icepop, 0.5, 3.0), None, 1.0
    )
    config.action, config.rejection = MismatchAction.warn, MismatchRejection.seq_geometric_ratio
    config.rejection_low = 0.9
    rejection = Rejection(MismatchRejection.seq_geometric_ratio, 0.9, 1.001)
    assert Correction.from_config(config) == Correction(
        Weighting(MismatchCorrection.icepop, 0.5, 3.0), rejection
    )
    config.rejection, config.rejection_low, config.rejection_high = MismatchRejection.seq_max_k2, None, 0.2
    assert Correction.from_config(config).rejection == Rejection(MismatchRejection.seq_max_k2, 0.0, 0.2)

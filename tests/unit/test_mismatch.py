import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithm.coefficients import measure_mismatch, mismatch_report, step_coefficients
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import RATIO_BOUNDS, Correction, describe_worst, mismatch_metrics
from grpo_megatron.batch.token_weights import LOSS_AGG_MODES
from grpo_megatron.config.algorithm import MaskAppliesTo
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import concrete, merge, to_floats
from tests.unit.ragged import ragged

KINDS = [kind for kind in RATIO_BOUNDS if kind != "none"]


def metrics_of(delta, mask=None):
    logp = torch.tensor(delta, dtype=torch.float64)
    mask = torch.ones(len(delta), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return mismatch_metrics(torch.zeros_like(logp), logp, mask, torch.arange(len(delta)) + 2**40)


# --- measuring


def test_by_hand_and_on_trained_tokens_only():
    metrics = metrics_of([0.5, -0.1, 9.0], [True, True, False])
    scalars = to_floats(metrics)
    assert scalars["mismatch/max"] == 0.5
    assert scalars["mismatch/mean"] == pytest.approx(0.3)
    assert scalars["mismatch/k3"] == pytest.approx((math.exp(0.5) - 1.5 + math.exp(-0.1) - 0.9) / 2)
    assert [row[:2] for row in metrics["mismatch/worst"].result()] == [(0.5, 2**40), (0.1, 2**40 + 1)]


def test_a_mismatch_that_is_nan_shows():
    assert math.isnan(to_floats(metrics_of([0.0, math.nan]))["mismatch/max"])
    assert math.isnan(metrics_of([0.0, math.nan, 3.0])["mismatch/worst"].result()[0][0])


def test_nothing_trained():
    scalars = to_floats(metrics_of([1.0], [False]))
    assert math.isnan(scalars["mismatch/ratio_p50"])
    assert scalars["mismatch/max"] == 0


@given(st.lists(st.floats(-15, 15), min_size=1, max_size=60), st.integers(1, 5))
def test_quantiles_and_worst_tokens_do_not_depend_on_how_tokens_are_divided(delta, parts):
    delta = np.round(delta, 4)
    pieces = [part for part in np.array_split(np.arange(len(delta)), parts) if len(part)]
    merged = merge(
        [
            concrete(
                mismatch_metrics(
                    torch.zeros(len(p), dtype=torch.float64),
                    torch.from_numpy(delta[p]),
                    torch.ones(len(p), dtype=torch.bool),
                    torch.from_numpy(p),
                )
            )
            for p in pieces
        ]
    )
    ordered = np.sort(delta)
    for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
        exact = ordered[max(1, math.ceil(share * len(delta))) - 1]
        assert math.log(to_floats(merged)[f"mismatch/ratio_{name}"]) == pytest.approx(exact, rel=0.08, abs=1e-6)
    worst = [row[0] for row in merged["mismatch/worst"].result()]
    assert worst == sorted(np.abs(delta).tolist(), reverse=True)[:5]


def test_the_worst_tokens_in_their_context():
    tokens, cu_seqlens = np.arange(10, 20), np.array([0, 4, 10])

    def decode(ids):
        return "".join(f"<{i}>" for i in ids)

    line = describe_worst([(2.0, 5, -1.0, -3.0)], tokens, cu_seqlens, decode, context=1)
    assert line == "|delta| 2 (engine -1.0000, trainer -3.0000), token 2 of 6 in sequence 1: '<15>>><16><<'"
    wide = describe_worst([(2.0, 5, -1.0, -3.0)], tokens, cu_seqlens, decode)
    assert wide.endswith("'<14><15>>><16><<<17><18><19>'")


@pytest.mark.parametrize(
    ("action", "says", "stops"), [("off", False, False), ("warn", True, False), ("mask", False, False), ("stop", True, True)]
)
def test_what_is_done_about_it(action, says, stops):
    given = ragged(4, spread=0.5)
    batch = given.batch
    batch.number, batch.tokens = np.arange(batch.num_tokens), np.arange(batch.num_tokens) + 100
    config = Config().mismatch
    metrics = measure_mismatch(batch)
    largest = metrics["mismatch/max"].result()
    config.action, config.threshold = type(config.action)(action), largest * 0.99
    report = mismatch_report(metrics, [batch], config, None)
    assert (bool(report.text), report.stop) == (says, stops)
    config.threshold = largest * 1.01
    report = mismatch_report(metrics, [batch], config, None)
    assert (report.text, report.stop) == ("", False)
    rows = metrics["mismatch/worst"].result()
    assert [f">>{int(row[1]) + 101}<<" in line for row, line in zip(rows, report.worst.splitlines(), strict=True)]


# --- correcting


def correct(correction: Correction, delta: list[list[float]]):
    """weights and what is kept of sequences with these log-ratios of trainer to engine."""
    flat = torch.tensor([value for row in delta for value in row], dtype=torch.float64)
    sequence = torch.tensor([i for i, row in enumerate(delta) for _ in row])

    def sequence_sum(values):
        return values.new_zeros(len(delta)).index_add(0, sequence, values)[sequence]

    zeros = torch.zeros_like(flat)
    weight, kept = correction(zeros, flat, torch.ones(len(flat), dtype=torch.bool), sequence_sum)
    return weight.tolist(), kept.tolist()


LOG2 = math.log(2)
BY_HAND = {
    # ratios 4, 1/4, 1 and 2
    "tis": ([2, 0.25, 1, 2], [True, True, True, True]),
    "icepop": ([4, 0, 1, 2], [True, False, True, True]),
    # products of the sequences: 1 and 2
    "seq_tis": ([1, 1, 2, 2], [True, True, True, True]),
    "mis": ([1, 1, 2, 2], [True, True, True, True]),
    # geometric means: 1 and sqrt(2)
    "rejection": ([1, 1, 1, 1], [True, True, False, False]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_corrections_by_hand(kind):
    weight, kept = correct(Correction(kind, *RATIO_BOUNDS[kind]), [[2 * LOG2, -2 * LOG2], [0, LOG2 * (1 - 1e-12)]])
    assert weight == pytest.approx(BY_HAND[kind][0])
    assert kept == BY_HAND[kind][1]


def test_sequences_beyond_the_bound():
    delta = [[LOG2, LOG2], [0.0]]  # a product of 4
    assert correct(Correction("seq_tis", 0, 2), delta) == (pytest.approx([2, 2, 1]), [True] * 3)
    assert correct(Correction("mis", 0, 2), delta) == (pytest.approx([0, 0, 1]), [False, False, True])


def test_masking_single_tokens_comes_in_addition():
    correction = Correction("tis", 0, 2, max_difference=1.0)
    assert correct(correction, [[1.5, -1.5, 0.5]])[1] == [False, False, True]
    assert not correct(correction, [[math.nan]])[1][0]


def naive(kind: str, low: float, high: float, limit: float | None, delta: list[float]) -> list[tuple[float, bool]]:
    """(weight, kept) of the trained tokens of one sequence."""
    product = math.exp(sum(delta))
    found = []
    for d in delta:
        ratio = math.exp(d)
        inside = {
            "icepop": low <= ratio <= high,
            "mis": low <= product <= high,
            "rejection": low <= math.exp(sum(delta) / len(delta)) <= high,
        }.get(kind, True)
        weight = {"tis": min(max(ratio, low), high), "seq_tis": min(max(product, low), high), "rejection": 1.0}.get(kind)
        if kind in ("icepop", "mis"):
            weight = (ratio if kind == "icepop" else product) if inside else 0.0
        found.append((weight, inside and (limit is None or abs(d) <= limit)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10**6), limit=st.sampled_from([None, 0.4]))
def test_like_one_sample_at_a_time(kind, seed, limit):
    given = ragged(seed, spread=0.5)
    bounds = (0.8, 1.3)
    weight, kept = Correction(kind, *bounds, limit)(
        given.inputs.rollout_logp, given.inputs.old_logp, given.inputs.mask, given.inputs.sequence_sum
    )
    for row in given.rows:
        tokens = given.trained(row)
        delta = [float(given.inputs.old_logp[t] - given.inputs.rollout_logp[t]) for t in tokens]
        expected = naive(kind, *bounds, limit, delta)
        np.testing.assert_allclose([float(weight[t]) for t in tokens], [w for w, _ in expected], rtol=1e-6)
        assert [bool(kept[t]) for t in tokens] == [k for _, k in expected]
        assert all(weight[t] == 1 and kept[t] for t in range(row.start, row.stop) if t not in tokens)


# --- where it is known: before training it changes the weights, in the training forward it does not


def config_for(kind: str, mode: str, applies_to: str) -> Config:
    config = Config()
    config.algorithm.loss_agg_mode = mode
    config.algorithm.mask_applies_to = MaskAppliesTo(applies_to)
    config.rollout.max_response_length = 8
    return config


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6))
def test_known_before_training_the_policy_term_is_averaged_over_what_is_kept(mode, seed):
    from grpo_megatron.batch.token_weights import token_weights

    given = ragged(seed, spread=0.5)
    correction = Correction("icepop", 0.7, 1.4)
    plain = token_weights(given.batch, mode, 8)
    inputs = given.inputs
    weight, kept = correction(inputs.rollout_logp, inputs.old_logp, inputs.mask, inputs.sequence_sum)
    kept_weights = token_weights(replace(given.batch, loss_mask=given.batch.loss_mask & kept.numpy()), mode, 8)

    keeps_kl, _ = step_coefficients(given.batch, config_for("icepop", mode, "policy"), correction)
    np.testing.assert_array_equal(keeps_kl.weight, plain)
    np.testing.assert_array_equal(keeps_kl.loss_mask, given.batch.loss_mask)
    np.testing.assert_allclose(keeps_kl.weight * keeps_kl.policy_factor, kept_weights * weight.numpy(), rtol=1e-6)

    loses_all, _ = step_coefficients(given.batch, config_for("icepop", mode, "all"), correction)
    np.testing.assert_array_equal(loses_all.weight, kept_weights)
    np.testing.assert_array_equal(loses_all.loss_mask, given.batch.loss_mask & kept.numpy())
    np.testing.assert_allclose(loses_all.policy_factor[loses_all.loss_mask], weight.numpy()[loses_all.loss_mask])


@pytest.mark.parametrize("applies_to", ["policy", "all"])
def test_known_in_the_forward_it_multiplies_the_policy_term(applies_to):
    given = ragged(3, spread=0.5, current=True)
    correction = Correction("icepop", 0.7, 1.4)
    parts = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2", "entropy_coeff": 0.01}
    loss = PolicyLoss(**parts, correction=correction, mask_applies_to=applies_to)
    value, metrics = loss(given.logp, given.entropy, given.inputs)
    mask = given.inputs.mask
    weight, kept = correction(given.inputs.rollout_logp, given.logp, mask, given.inputs.sequence_sum)
    assert 0 < int((mask & ~kept).sum()) < int(mask.sum())
    others = 0.1 * (given.logp - given.inputs.ref_logp) ** 2 / 2 - 0.01 * given.entropy
    expected = torch.where(kept, weight * -given.inputs.advantage, 0) + others
    if applies_to == "all":
        expected = torch.where(kept, expected, 0)
    torch.testing.assert_close(value, torch.where(mask, expected, 0))
    assert to_floats(metrics)["mismatch/masked"] == pytest.approx(float((mask & ~kept).sum() / mask.sum()))
    gradient = torch.autograd.grad(value.sum(), given.logp)[0]
    slope = torch.where(kept, weight * -given.inputs.advantage, 0) + 0.1 * (given.logp - given.inputs.ref_logp)
    if applies_to == "all":
        slope = torch.where(kept, slope, 0)
    torch.testing.assert_close(gradient, torch.where(mask, slope, 0).detach())


def test_a_correction_is_only_made_where_it_is_asked_for():
    config = Config().mismatch
    assert Correction.from_config(config) is None
    config.action = type(config.action).mask
    assert Correction.from_config(config) == Correction("none", 0.0, math.inf, 1.0)
    config.correction = type(config.correction).icepop
    config.ratio_high = 3.0
    assert Correction.from_config(config) == Correction("icepop", 0.5, 3.0, 1.0)

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.losses import CrossEntropyLoss, LossInputs, PolicyLoss
from grpo_megatron.batch.sequence_weights import LOSS_AGG_MODES
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import to_floats
from tests.coefficients import token_weights
from tests.unit.ragged import Ragged, ragged

LONGEST = 8


def inputs(mask, old=None, sequence_id=None, **arrays) -> LossInputs:
    """Return tokens that belong to one sequence, unless sequence_id says otherwise."""
    zeros = torch.zeros(len(mask))
    filled = {name: arrays.pop(name, zeros) for name in ("advantage", "rollout_logp", "ref_logp")}
    sequence = torch.zeros(len(mask), dtype=torch.long) if sequence_id is None else torch.tensor(sequence_id)

    def sequence_sum(values):
        return values.new_zeros(int(sequence.max()) + 1).index_add(0, sequence, values.detach())[sequence]

    return LossInputs(mask=torch.tensor(mask), old_logp=old, sequence_sum=sequence_sum, **filled, **arrays)


def loss_of(loss: PolicyLoss, ratio, advantage, logp=-1.0):
    """Return loss, gradient and metrics of single tokens with these ratios."""
    ratio, advantage = torch.tensor(ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    leaf = torch.full_like(ratio, logp, requires_grad=True)
    given = inputs([True] * len(ratio), leaf.detach() - ratio.log(), range(len(ratio)), advantage=advantage)
    value, metrics = loss(leaf, torch.zeros_like(ratio), given)
    gradient = torch.autograd.grad(value.sum(), leaf)[0]
    return value.tolist(), gradient.tolist(), to_floats(metrics)


# --- by hand


def test_clip_higher():
    loss = PolicyLoss(AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28))
    value, gradient, metrics = loss_of(loss, [1.5, 1.5, 0.5, 0.5, 1.1], [1.0, -1.0, 1.0, -1.0, 2.0])
    assert value == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2])
    assert gradient == pytest.approx([0, 1.5, -0.5, 0, -2.2])
    assert metrics["actor/clip_fraction"] == pytest.approx(0.4)
    assert metrics["actor/ratio"] == pytest.approx(1.02)


def test_metrics_of_the_ratio_by_hand():
    """clip_fraction counts tokens that lose their gradient, on either side. ppo_kl is the mean of -log
    ratio.
    """
    ratios, advantages = [1.5, 1.5, 0.5, 0.5, 1.1, 1.9, 1.0], [1.0, -1.0, 1.0, -1.0, 2.0, 1.0, 1.0]
    _, _, metrics = loss_of(
        PolicyLoss(AlgorithmConfig(clip_ratio_low=0.2, clip_ratio_high=0.28)), ratios, advantages
    )
    assert metrics["actor/clip_fraction_high"] == pytest.approx(2 / 7)
    assert metrics["actor/clip_fraction_low"] == pytest.approx(1 / 7)
    assert metrics["actor/ppo_kl"] == pytest.approx(-np.mean(np.log(ratios)))
    assert metrics["actor/pg_loss"] == pytest.approx((-1.28 + 1.5 - 0.5 + 0.8 - 2.2 - 1.28 - 1) / 7, rel=1e-6)


@pytest.mark.parametrize("difference", [21.0, 1000.0])
def test_ratios_beyond_twenty_nats_stay_finite(difference):
    logp = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    old = logp - torch.tensor([difference, -difference], dtype=torch.float64)
    _, metrics = PolicyLoss()(logp, torch.zeros(2), inputs([True, True], old, advantage=torch.ones(2)))
    assert to_floats(metrics)["actor/ratio"] == pytest.approx((math.exp(20) + math.exp(-20)) / 2)


def test_the_worst_tokens_keep_their_numbers():
    """The report of a mismatch finds a token's text by its number in the step."""
    logp = torch.tensor([-1.0, -2.0, -3.0])
    given = inputs(
        [True, True, False],
        rollout_logp=torch.tensor([-1.5, -2.0, -9.0]),
        token_index=torch.tensor([70, 71, 72]),
    )
    _, metrics = PolicyLoss()(logp, torch.zeros(3), given)
    assert [row[:2] for row in metrics["mismatch/worst"].result()] == [(0.5, 70), (0.0, 71)]


def test_dual_clip():
    loss = PolicyLoss(AlgorithmConfig(clip_ratio_c=3.0))
    value, gradient, metrics = loss_of(loss, [5.0, 2.5, 5.0, 0.5], [-1.0, -1.0, 1.0, -1.0])
    assert value == pytest.approx([3.0, 2.5, -1.2, 0.8])
    assert gradient == pytest.approx([0, 2.5, 0, 0])
    assert metrics["actor/clip_fraction"] == pytest.approx(0.75)


def test_cispo():
    loss = PolicyLoss(AlgorithmConfig(surrogate="cispo", clip_ratio_low=1.0, clip_ratio_high=1.0))
    value, gradient, metrics = loss_of(loss, [5.0, 0.1, 5.0], [1.0, 1.0, -0.5], logp=-3.0)
    assert gradient == pytest.approx([-2.0, -0.1, 1.0])  # clipped at 2, and still a gradient
    assert value == pytest.approx([6.0, 0.3, -3.0])
    assert metrics["actor/clip_fraction"] == pytest.approx(2 / 3)


def test_reinforce():
    value, gradient, _ = loss_of(
        PolicyLoss(AlgorithmConfig(surrogate="reinforce")), [5.0, 0.1], [1.0, -2.0], logp=-3.0
    )
    assert value == pytest.approx([3.0, -6.0])
    assert gradient == pytest.approx([-1.0, 2.0])


def test_sequence_levels_by_hand():
    """Two tokens with ratios 2 and 8 have the geometric mean 4 and the product 16."""
    log_ratio = torch.tensor([2.0, 8.0], dtype=torch.float64).log()
    for level, ratio, slope in (("sequence", 4.0, 4.0), ("sequence_sum", 16.0, 32.0)):
        logp = torch.full((2,), -1.0, dtype=torch.float64, requires_grad=True)
        given = inputs([True, True], logp.detach() - log_ratio, advantage=torch.ones(2, dtype=torch.float64))
        value, metrics = PolicyLoss(AlgorithmConfig(ratio_level=level, clip_ratio_high=99.0))(
            logp, torch.zeros(2), given
        )
        assert value.tolist() == pytest.approx([-ratio, -ratio])
        assert torch.autograd.grad(value.sum(), logp)[0].tolist() == pytest.approx([-slope, -slope])
        assert to_floats(metrics)["actor/ratio"] == pytest.approx(ratio)


def test_whole_loss_by_hand():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.7, 0.9], requires_grad=True)
    arrays = {"advantage": torch.tensor([1.0, 0.0]), "ref_logp": torch.tensor([-1.5, 0.0])}
    loss = PolicyLoss(
        AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coeff=0.01)
    )
    value, metrics = loss(logp, entropy, inputs([True, False], torch.tensor([-1.1, 0.0]), **arrays))
    expected = -math.exp(0.1) + 0.1 * 0.125 - 0.01 * 0.7
    assert value.tolist() == pytest.approx([expected, 0.0])
    assert to_floats(metrics)["actor/entropy"] == pytest.approx(0.7)
    value.sum().backward()
    assert entropy.grad.tolist() == pytest.approx([-0.01, 0.0])
    assert logp.grad[1] == 0


def test_masked_positions_cannot_poison_the_loss():
    """Unknown log-probs are stored as zero; exp(0 - (-200)) is infinite, and inf * weight 0 is NaN."""
    logp = torch.tensor([-200.0, -1.0], requires_grad=True)
    value, metrics = PolicyLoss(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=1.0))(
        logp, torch.zeros(2), inputs([False, True], torch.tensor([0.0, -1.0]))
    )
    (value * torch.tensor([0.0, 1.0])).sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert all(math.isfinite(value) for value in to_floats(metrics).values())


def test_full_kl_is_taken_as_it_is():
    kl = torch.tensor([0.3, 0.4], requires_grad=True)
    loss = PolicyLoss(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="full"))
    assert loss.needs_full_kl
    value, metrics = loss(torch.tensor([-1.0, -1.0]), torch.zeros(2), inputs([True, False]), kl)
    value.sum().backward()
    assert kl.grad.tolist() == pytest.approx([0.1, 0.0])
    assert to_floats(metrics)["actor/kl_to_reference"] == pytest.approx(0.3)


def test_cross_entropy():
    value, metrics = CrossEntropyLoss()(torch.tensor([-1.0, -2.0, -4.0]), None, inputs([True, False, True]))
    assert value.tolist() == [1.0, 0.0, 4.0]
    assert to_floats(metrics)["sft/loss_per_token"] == 2.5


# --- against one sample at a time


def naive_aggregate(mode: str, rows: list[list[torch.Tensor]], groups: list[int]) -> torch.Tensor:
    """Aggregate losses.

    rows: losses of the trained tokens of each sequence.
    """
    present = [(row, group) for row, group in zip(rows, groups, strict=True) if row]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    sums = [torch.stack(row).sum() for row, _ in present]
    means = [torch.stack(row).mean() for row, _ in present]
    if mode == "token-mean":
        return torch.stack([token for row, _ in present for token in row]).mean()
    if mode == "seq-mean-token-sum":
        return torch.stack(sums).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack(means).mean()
    if mode == "seq-mean-token-sum-norm":
        return torch.stack(sums).mean() / LONGEST
    if mode == "group-sum":
        in_group = {
            group: torch.stack([m for m, (_, g) in zip(means, present, strict=True) if g == group])
            for _, group in present
        }
        return torch.stack([values.sum() for values in in_group.values()]).mean()
    raise AssertionError(mode)


def naive_losses(loss: PolicyLoss, data: Ragged) -> list[list[torch.Tensor]]:
    """Return the losses of trained tokens, differentiable like in the papers: through the whole sequence's
    ratio.
    """
    rows = []
    for row in data.rows:
        tokens = data.trained(row)
        if not tokens:
            rows.append([])
            continue
        logp = data.logp[tokens]
        old = logp.detach() if data.inputs.old_logp is None else data.inputs.old_logp[tokens]
        log_ratio = logp - old
        level = {"token": log_ratio, "sequence": log_ratio.mean(), "sequence_sum": log_ratio.sum()}[
            loss.algorithm.ratio_level
        ]
        ratios = level.exp().expand(len(tokens))
        rows.append([naive_token(loss, data, t, ratios[i], log_ratio[i]) for i, t in enumerate(tokens)])
    return rows


def naive_token(
    loss: PolicyLoss, data: Ragged, t: int, ratio: torch.Tensor, log_ratio: torch.Tensor
) -> torch.Tensor:
    advantage, logp = data.inputs.advantage[t], data.logp[t]
    low, high = 1 - loss.algorithm.clip_ratio_low, 1 + loss.algorithm.clip_ratio_high
    if loss.algorithm.surrogate == "clip":
        gain = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        if loss.algorithm.clip_ratio_c is not None and advantage < 0:
            gain = torch.max(gain, loss.algorithm.clip_ratio_c * advantage)
    elif loss.algorithm.surrogate == "cispo":
        gain = ratio.clamp(low, high).detach() * advantage * logp
    elif loss.algorithm.surrogate == "importance_sampling":
        gain = ratio * advantage
    else:
        gain = advantage * logp
    value = -gain
    if loss.algorithm.use_kl_loss:
        x = logp - data.inputs.ref_logp[t]
        kl = {"k1": x, "abs": x.abs(), "k2": x**2 / 2, "k3": (-x).exp() - 1 + x}[loss.algorithm.kl_loss_type]
        value = value + loss.algorithm.kl_loss_coef * (
            log_ratio.exp() * kl if loss.algorithm.kl_loss_unbiased else kl
        )
    return value - loss.algorithm.entropy_coeff * data.entropy[t]


PARTS = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}
LOSSES = {
    "clip": PolicyLoss(),
    "clip higher": PolicyLoss(
        AlgorithmConfig(clip_ratio_low=0.1, clip_ratio_high=0.4, **PARTS, kl_loss_type="k3")
    ),
    "dual clip": PolicyLoss(AlgorithmConfig(clip_ratio_c=1.3, **PARTS, kl_loss_type="k1")),
    "unbiased kl": PolicyLoss(AlgorithmConfig(**PARTS, kl_loss_type="k3", kl_loss_unbiased=True)),
    "cispo": PolicyLoss(AlgorithmConfig(surrogate="cispo", **PARTS, kl_loss_type="abs")),
    "reinforce": PolicyLoss(AlgorithmConfig(surrogate="reinforce", **PARTS, kl_loss_type="k2")),
    "importance sampling": PolicyLoss(AlgorithmConfig(surrogate="importance_sampling")),
}
# The token form has the sequence's gradient with weights that are equal over each of its tokens, and 1/n_i.
SEQUENCE_LOSSES = {
    "gspo": PolicyLoss(AlgorithmConfig(ratio_level="sequence", **PARTS, kl_loss_type="k3")),
    "gspo dual clip": PolicyLoss(AlgorithmConfig(ratio_level="sequence", clip_ratio_c=1.1)),
    "sequence cispo": PolicyLoss(AlgorithmConfig(ratio_level="sequence", surrogate="cispo")),
    "sequence sum": PolicyLoss(AlgorithmConfig(ratio_level="sequence_sum", **PARTS, kl_loss_type="k3")),
    "sequence sum dual clip": PolicyLoss(AlgorithmConfig(ratio_level="sequence_sum", clip_ratio_c=1.5)),
}


def check_against_naive(loss: PolicyLoss, mode: str, data: Ragged) -> None:
    weight = torch.from_numpy(token_weights(data.batch, mode, LONGEST)).double()
    value, _ = loss(data.logp, data.entropy, data.inputs)
    ours = (weight * value).sum()
    expected = naive_aggregate(mode, naive_losses(loss, data), data.batch.group_id.tolist())
    np.testing.assert_allclose(ours.item(), expected.item(), rtol=1e-6, atol=1e-6)
    for leaf in (data.logp, data.entropy):
        pairs = [
            torch.autograd.grad(total, leaf, retain_graph=True, allow_unused=True)[0]
            if total.requires_grad
            else None
            for total in (ours, expected)
        ]
        ours_gradient, expected_gradient = (torch.zeros_like(leaf) if g is None else g for g in pairs)
        np.testing.assert_allclose(ours_gradient.numpy(), expected_gradient.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), current=st.booleans())
def test_token_level_losses_like_one_sample_at_a_time(name, mode, seed, current):
    check_against_naive(LOSSES[name], mode, ragged(seed, current=current))


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "group-sum"])
@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), current=st.booleans())
def test_sequence_level_losses_like_one_sample_at_a_time(name, mode, seed, current):
    check_against_naive(SEQUENCE_LOSSES[name], mode, ragged(seed, current=current))


@given(seed=st.integers(0, 10**6))
def test_policy_factor_multiplies_the_policy_term_only(seed):
    data = ragged(seed)
    factor = torch.from_numpy(np.random.default_rng(seed).uniform(0, 2, len(data.logp)))
    loss = PolicyLoss(AlgorithmConfig(**PARTS, kl_loss_type="k3"))
    policy = PolicyLoss()
    rest = loss(data.logp, data.entropy, data.inputs)[0] - policy(data.logp, data.entropy, data.inputs)[0]
    with_factor = replace(data.inputs, policy_factor=factor)
    expected = factor * policy(data.logp, data.entropy, data.inputs)[0] + rest
    torch.testing.assert_close(loss(data.logp, data.entropy, with_factor)[0], expected)


# --- properties

SURROGATES = [
    ("clip", "token"),
    ("cispo", "token"),
    ("reinforce", "token"),
    ("importance_sampling", "token"),
    ("clip", "sequence"),
    ("cispo", "sequence"),
]


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("surrogate", SURROGATES)
@given(seed=st.integers(0, 10**6))
def test_ratio_one_gives_the_plain_policy_gradient(surrogate, seed):
    data = ragged(seed, current=True)
    loss = PolicyLoss(AlgorithmConfig(surrogate=surrogate[0], ratio_level=surrogate[1]))
    value, _ = loss(data.logp, data.entropy, data.inputs)
    gradient = torch.autograd.grad(value.sum(), data.logp)[0]
    torch.testing.assert_close(gradient, torch.where(data.inputs.mask, -data.inputs.advantage, 0.0))


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    """The expected gradient is autograd's through s_i = exp(mean log-ratio), for two sequences of unequal
    length, no clipping.
    """
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5, -1.0])
    logp = torch.tensor([-1.1, -1.9, -0.4, -1.4, -1.2], requires_grad=True)
    advantage = torch.tensor([0.7, 0.7, 0.7, -1.3, -1.3])
    weight = torch.tensor([1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2])
    loss = PolicyLoss(AlgorithmConfig(clip_ratio_low=0.9, clip_ratio_high=0.9, ratio_level="sequence"))
    value, _ = loss(
        logp, torch.zeros(5), inputs([True] * 5, old, sequence_id=[0, 0, 0, 1, 1], advantage=advantage)
    )
    ours = torch.autograd.grad((weight * value).sum(), logp)[0]
    ratios = [(logp - old)[part].mean().exp() for part in (slice(0, 3), slice(3, 5))]
    whole = -(0.7 * ratios[0] - 1.3 * ratios[1])
    torch.testing.assert_close(ours, torch.autograd.grad(whole, logp)[0])
    torch.testing.assert_close((weight * value).sum(), whole)


# --- from the configuration


def test_the_loss_has_the_section_and_a_correction_that_is_not_known_before():
    config = Config()
    config.mismatch.correction = type(config.mismatch.correction).tis
    before = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=True)
    assert (before.algorithm, before.correction) == (config.algorithm, None)
    forward = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=False)
    assert forward.correction.weighting.kind == "tis"
    assert forward == replace(before, correction=forward.correction)


def test_limits():
    config = Config()
    assert PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=False).limits == {}
    config.algorithm.early_stop_imp_ratio = 5.0
    config.mismatch.action, config.mismatch.threshold = type(config.mismatch.action).stop, 0.3
    assert PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=True).limits == {
        "actor/ratio": 5.0
    }
    forward = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=False)
    assert forward.limits == {"actor/ratio": 5.0, "mismatch/max": 0.3}

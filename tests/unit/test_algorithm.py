import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithm.advantages import group_advantages
from grpo_megatron.algorithm.kl import kl_penalty
from grpo_megatron.algorithm.losses import CrossEntropyLoss, LossInputs, PolicyLoss, clipped_surrogate, mismatch_metrics
from grpo_megatron.metrics import Max, Mean, Sum, merge, to_floats


def advantages(rewards, groups, std=True):
    return group_advantages(torch.tensor(rewards), torch.tensor(groups), std).tolist()


def test_advantages_by_hand():
    # group 7: mean 0.25, deviations squared sum to 0.75, over n-1 = 0.25, std 0.5
    assert advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert advantages([1.0, 0.0, 0.0, 0.0], [7, 7, 7, 7], std=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_groups_of_unequal_size_in_any_order():
    mixed = advantages([1.0, 5.0, 0.0, 3.0, 1.0], [0, 9, 0, 9, 9], std=False)
    assert mixed == pytest.approx([0.5, 2.0, -0.5, 0.0, -2.0])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-8, 12345.678])
@pytest.mark.parametrize("std", [True, False])
def test_constant_rewards_give_exactly_zero(value, std):
    assert advantages([value] * 7, [0] * 7, std) == [0.0] * 7


def test_a_group_of_one_is_zero():
    assert advantages([3.0, 1.0, 0.0], [0, 1, 1])[0] == 0.0


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=20), st.floats(-5, 5), st.floats(0.5, 20))
def test_advantages_sum_to_zero_and_ignore_shift_and_scale(rewards, shift, scale):
    groups = [i % 2 for i in range(len(rewards))]
    plain = torch.tensor(advantages(rewards, groups, std=False))
    for group in (0, 1):
        assert abs(sum(a for a, g in zip(plain.tolist(), groups, strict=True) if g == group)) < 1e-4
    shifted = torch.tensor(advantages([r + shift for r in rewards], groups, std=False))
    torch.testing.assert_close(plain, shifted, atol=1e-4, rtol=0)
    scaled = torch.tensor(advantages([r * scale for r in rewards], groups, std=False))
    torch.testing.assert_close(plain * scale, scaled, atol=1e-3, rtol=1e-4)


def test_clipped_surrogate_by_hand():
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = clipped_surrogate(ratio.log(), advantage, 0.2, 0.28)
    torch.testing.assert_close(loss, torch.tensor([-1.28, 1.5, -0.5, 0.8, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_kl_estimators_by_hand():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.5])  # d = -0.5
    assert kl_penalty(logp, ref, "k1").item() == pytest.approx(0.5)
    assert kl_penalty(logp, ref, "k2").item() == pytest.approx(0.125)
    assert kl_penalty(logp, ref, "k3").item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    for ours, other in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")):
        assert kl_penalty(logp, ref, ours) == kl_penalty(logp, ref, other)
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(logp, ref, "k9")


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative(logp, ref):
    assert kl_penalty(torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), "k3") >= 0


def inputs(mask, old=None, **arrays):
    size = len(mask)
    zeros = torch.zeros(size)
    filled = {name: arrays.get(name, zeros) for name in ("advantage", "rollout_logp", "ref_logp")}
    return LossInputs(mask=torch.tensor(mask), old_logp=old, **filled)


def test_ratio_one_gives_the_policy_gradient():
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantage = torch.tensor([0.5, -1.5, 2.0])
    loss, _ = PolicyLoss()(logp, torch.zeros(3), inputs([True] * 3, advantage=advantage))
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, -advantage)


def test_whole_loss_by_hand():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    entropy = torch.tensor([0.7, 0.9], requires_grad=True)
    arrays = {"advantage": torch.tensor([1.0, 0.0]), "ref_logp": torch.tensor([-1.5, 0.0])}
    loss_function = PolicyLoss(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", entropy_coeff=0.01)
    loss, metrics = loss_function(logp, entropy, inputs([True, False], torch.tensor([-1.1, 0.0]), **arrays))
    expected = -math.exp(0.1) + 0.1 * 0.125 - 0.01 * 0.7
    assert loss.tolist() == pytest.approx([expected, 0.0])
    assert to_floats(metrics)["actor/entropy"] == pytest.approx(0.7)
    loss.sum().backward()
    assert entropy.grad.tolist() == pytest.approx([-0.01, 0.0])
    assert logp.grad[1] == 0


def test_masked_positions_cannot_poison_the_loss():
    """Zero is stored where a log-prob is unknown; exp(0 - (-200)) is infinite, and inf * 0 is NaN."""
    logp = torch.tensor([-200.0, -1.0], requires_grad=True)
    loss, metrics = PolicyLoss(use_kl_loss=True, kl_loss_coef=1.0)(
        logp, torch.zeros(2), inputs([False, True], torch.tensor([0.0, -1.0]))
    )
    (loss * torch.tensor([0.0, 1.0])).sum().backward()
    assert torch.isfinite(logp.grad).all()
    assert all(math.isfinite(value) for value in to_floats(metrics).values())


def test_cross_entropy():
    logp = torch.tensor([-1.0, -2.0, -4.0])
    loss, metrics = CrossEntropyLoss()(logp, None, inputs([True, False, True]))
    assert loss.tolist() == [1.0, 0.0, 4.0]
    assert to_floats(metrics)["sft/loss_per_token"] == 2.5


def test_mismatch_looks_at_trained_tokens_only():
    metrics = to_floats(mismatch_metrics(torch.tensor([-1.0, -9.0]), torch.tensor([-1.5, 0.0]), torch.tensor([True, False])))
    assert metrics == {"mismatch/max": 0.5, "mismatch/mean": 0.5}


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_a_maximum_never_hides_a_nan(values):
    merged = merge([{"a": Max(value)} for value in values])
    assert math.isnan(to_floats(merged)["a"])


def test_metrics_combine_by_their_own_rules():
    merged = merge([{"a": Mean(1.0, 1), "b": Max(3.0), "c": Sum(1.0)}, {"a": Mean(0.0, 3), "b": Max(2.0), "c": Sum(2.0)}])
    assert to_floats(merged) == {"a": 0.25, "b": 3.0, "c": 3.0}

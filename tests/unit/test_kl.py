import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.algorithm.coefficients import mean_kl
from grpo_megatron.algorithm.kl import KL_TYPES, KLController, kl_penalty, unbiased_kl
from grpo_megatron.config.schema import Config
from tests.unit.credits import Tokens


def double(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_by_hand():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.5])  # d = -0.5
    assert kl_penalty(logp, ref, "k1").item() == pytest.approx(0.5)
    assert kl_penalty(logp, ref, "abs").item() == pytest.approx(0.5)
    assert kl_penalty(ref, logp, "abs").item() == pytest.approx(0.5)
    assert kl_penalty(logp, ref, "k2").item() == pytest.approx(0.125)
    assert kl_penalty(logp, ref, "k3").item() == pytest.approx(math.exp(-0.5) + 0.5 - 1)
    for ours, other in (("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3+", "low_var_kl+")):
        assert kl_penalty(logp, ref, ours) == kl_penalty(logp, ref, other)


@pytest.mark.parametrize("name", ["k9", "full", "+", "", "k3++"])
def test_unknown(name):
    with pytest.raises(ValueError, match="low_var_kl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), name)


@given(st.floats(-30, 0), st.floats(-30, 0))
def test_k3_is_never_negative(logp, ref):
    assert kl_penalty(double(logp), double(ref), "k3") >= 0


# value and derivative with respect to the policy's log-prob, x = log policy - log ref
BY_CALCULUS = {
    "k1": (lambda x: x, lambda x: 1.0),
    "abs": (lambda x: abs(x), lambda x: math.copysign(1.0, x)),
    "k2": (lambda x: x * x / 2, lambda x: x),
    "k3": (lambda x: math.exp(-x) + x - 1, lambda x: 1 - math.exp(-x)),
}


@pytest.mark.parametrize("name", [name for name, ours in KL_TYPES.items() if name == ours])
@given(logp=st.floats(-15, 0), ref=st.floats(-15, 0))
def test_value_and_gradient(name, logp, ref):
    x = logp - ref
    if x == 0:
        return  # |x| has no derivative there
    value, derivative = BY_CALCULUS[name.rstrip("+")]
    if name.endswith("+"):
        derivative = BY_CALCULUS["k2"][1]
    leaf = double(logp)
    kl = kl_penalty(leaf, torch.tensor(ref, dtype=torch.float64), name)
    kl.backward()
    assert kl.item() == pytest.approx(value(x), rel=1e-6, abs=1e-6)
    assert leaf.grad.item() == pytest.approx(derivative(x), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("size", [1e-4, 3e-4, 1e-2, 1.0])
def test_k3_keeps_its_digits_in_float32(size):
    """exp(d) - 1 has lost the digits of d²/2 if policy and reference are close, but expm1(d) has them."""
    d = torch.cat([torch.linspace(size / 2, size, 50), -torch.linspace(size / 2, size, 50)])
    logp = torch.zeros_like(d, requires_grad=True)
    kl = kl_penalty(logp, d, "k3")
    kl.sum().backward()
    exact = np.expm1(d.double().numpy())
    np.testing.assert_allclose(kl.detach().numpy(), exact - d.double().numpy(), rtol=2e-3)
    np.testing.assert_allclose(logp.grad.numpy(), -exact, rtol=2e-3)


@pytest.mark.parametrize("difference", [20.0, 21.0, 1000.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_log_probs_that_are_far_apart_count_as_twenty_nats(difference, sign):
    """exp() of a larger difference overflows eventually, and one such token would make the whole step
    infinite.
    """
    d = 20.0 * sign
    expected = {"k1": -d, "abs": 20.0, "k2": 200.0, "k3": math.expm1(d) - d}
    for name, value in expected.items():
        kl = kl_penalty(
            torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.0 + sign * difference]).double(), name
        )
        assert kl.item() == pytest.approx(value)
    weighted = unbiased_kl(torch.tensor([3.0]).double(), torch.tensor([sign * difference]).double())
    assert weighted.item() == pytest.approx(3 * math.exp(d))


def distributions(seed: int):
    """Return logits of a policy, and log-probs of an old policy and of a reference, over 5 words."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, generator=rng, dtype=torch.float64, requires_grad=True)
    old, ref = (torch.randn(5, generator=rng, dtype=torch.float64).log_softmax(0) for _ in range(2))
    return logits, old, ref


@pytest.mark.parametrize("name", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(5))
def test_the_importance_weighted_form_is_unbiased(name, seed):
    """Its expectation over all words under the old policy is the KL, and that of its gradient is the KL's
    gradient.
    """
    logits, old, ref = distributions(seed)
    logp = logits.log_softmax(0)
    exact = (logp.exp() * (logp - ref)).sum()
    estimate = (old.exp() * unbiased_kl(kl_penalty(logp, ref, name), logp - old)).sum()
    ours, expected = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact))
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("seed", range(5))
def test_straight_through_has_the_gradient_of_the_kl(seed):
    """The samples are the policy's own. k3 without + does not have this gradient."""
    logits, _, ref = distributions(seed)
    logp = logits.log_softmax(0)
    expected = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]

    def sampled(name):
        # The gradient of an estimate passes through the sample's own log-prob only.
        return torch.autograd.grad(
            (logp.exp().detach() * kl_penalty(logp, ref, name)).sum(), logits, retain_graph=True
        )[0]

    torch.testing.assert_close(sampled("k3+"), expected)
    assert not torch.allclose(sampled("k3"), expected, rtol=1e-3)


# --- the coefficient in the reward


def controller(**values) -> KLController:
    config = Config().algorithm.kl_ctrl
    for name, value in values.items():
        setattr(config, name, value)
    return KLController.from_config(config)


def test_a_fixed_coefficient_stays():
    fixed = controller(kl_coef=0.2)
    fixed.update(kl=100.0, trajectories=1000)
    fixed.load_state_dict({"coef": 7.0})
    assert fixed.coef == 0.2


def test_an_adaptive_coefficient_by_hand():
    adaptive = controller(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=100)
    adaptive.update(kl=0.105, trajectories=10)  # error 0.05
    assert adaptive.coef == pytest.approx(0.2 * (1 + 0.05 * 0.1))
    adaptive.update(kl=5.0, trajectories=10)  # error clipped to 0.2
    assert adaptive.coef == pytest.approx(0.2 * 1.005 * 1.02)
    adaptive.update(kl=0.0, trajectories=10)  # and to -0.2
    assert adaptive.coef == pytest.approx(0.2 * 1.005 * 1.02 * 0.98)
    resumed = controller(type="adaptive", kl_coef=0.2, target_kl=0.1, horizon=100)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef


def test_the_kl_it_is_steered_by():
    """Trajectory 7 has two sequences, and the mean of 1, 2, 6 is 3; trajectory 8 has 5; trajectory 9 has
    no trained token.
    """
    mask = np.array([True, True, True, False, True, False])
    kl = [1.0, 2.0, 6.0, 99.0, 5.0, 99.0]
    assert mean_kl(Tokens(np.ones(4), np.zeros(4), [2, 2, 1, 1], [7, 7, 8, 9], mask, kl).inputs()) == (4.0, 2)
    assert mean_kl(Tokens(np.ones(2), np.zeros(2), [1, 5], [7, 8], np.zeros(6), kl).inputs()) == (0.0, 0)

"""The presets, from rewards to gradients, against the equations of their papers, one response at a time.

Our side is the whole composition: advantages, token weights, the mismatch's factors, and the loss. Papers
write a mean over prompts and then over a group's responses. Here it is the mean over all responses, which is
the same for groups of one size. A standard deviation is over n - 1, with 1e-6 added.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import Config
from tests.coefficients import set_coefficients
from tests.unit.broken_rules import algorithm_violations
from tests.unit.ragged import Ragged, ragged

LONGEST = 8


@dataclass(frozen=True)
class Response:
    """A sampled response."""

    logp: torch.Tensor
    """Log-probs of its trained tokens under the policy, [n]."""
    old: torch.Tensor
    """The same under the old policy."""
    ref: torch.Tensor
    """The same under the reference."""
    engine: torch.Tensor
    """The same as the engine reports them."""
    reward: float
    """Its reward."""

    @property
    def ratio(self) -> torch.Tensor:
        return (self.logp - self.old).exp()


Groups = list[list[Response]]


def groups_of(data: Ragged) -> Groups:
    """Return the groups, without responses that have no trained token."""
    inputs, found = data.inputs, {}
    for i, row in enumerate(data.rows):
        tokens = data.trained(row)
        if tokens:
            arrays = [
                values[tokens]
                for values in (data.logp, inputs.old_logp, inputs.ref_logp, inputs.rollout_logp)
            ]
            found.setdefault(int(data.batch.group_id[i]), []).append(
                Response(*arrays, float(data.batch.reward[i]))
            )
    return list(found.values())


def normalised(group: list[Response]) -> list[float]:
    """Return the advantages of arXiv:2402.03300 section 4.1.2. A group of one has no comparison."""
    rewards = np.array([response.reward for response in group])
    return list((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)) if len(group) > 1 else [0.0]


def centred(group: list[Response]) -> list[float]:
    """Return the advantages of Dr. GRPO, arXiv:2503.20783 section 3.2."""
    mean = np.mean([response.reward for response in group])
    return [response.reward - mean for response in group]


def with_advantages(groups: Groups, advantages: Callable = normalised) -> list[tuple[Response, float]]:
    return [pair for group in groups for pair in zip(group, advantages(group), strict=True)]


def clipped_gain(ratio: torch.Tensor, advantage: float, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(response: Response) -> torch.Tensor:
    """Equation 4 of arXiv:2402.03300."""
    return (response.ref - response.logp).exp() - (response.ref - response.logp) - 1


# --- one objective for each preset, to be maximised


def grpo(groups: Groups, factor: Callable = lambda response: 1.0) -> torch.Tensor:
    """Equation 3 of arXiv:2402.03300 with beta 0.04.

    factor: multiplies the policy term of each token.
    """
    terms = [
        (factor(o) * clipped_gain(o.ratio, advantage) - 0.04 * k3(o)).sum() / len(o.logp)
        for o, advantage in with_advantages(groups)
    ]
    return torch.stack(terms).mean()


def dr_grpo(groups: Groups) -> torch.Tensor:
    """arXiv:2503.20783 section 3.2: sums over tokens, divided by a constant, here the limit of a
    response's length.
    """
    terms = [
        clipped_gain(o.ratio, advantage).sum() / LONGEST for o, advantage in with_advantages(groups, centred)
    ]
    return torch.stack(terms).mean()


def dapo(groups: Groups, factor: Callable = lambda response: 1.0) -> torch.Tensor:
    """Equation 8 of arXiv:2503.14476: one mean over all tokens of the batch."""
    terms = [
        factor(o) * clipped_gain(o.ratio, advantage, 0.2, 0.28) for o, advantage in with_advantages(groups)
    ]
    return torch.cat(terms).mean()


def gspo(groups: Groups) -> torch.Tensor:
    """Equations 5 to 7 of arXiv:2507.18071, with the gradient through the ratio of the whole sequence."""
    terms = [
        clipped_gain((o.logp - o.old).mean().exp(), advantage, 3e-4, 4e-4)
        for o, advantage in with_advantages(groups)
    ]
    return torch.stack(terms).mean()


def cispo(groups: Groups) -> torch.Tensor:
    """Equations 4 and 5 of arXiv:2506.13585 without a lower limit, at most 5."""
    return torch.cat(
        [o.ratio.detach().clamp(max=5.0) * a * o.logp for o, a in with_advantages(groups)]
    ).mean()


def rloo(groups: Groups) -> torch.Tensor:
    """arXiv:2402.14740 section 2.2, with the KL in the reward as in its equation 2 and beta 0.03."""
    terms = []
    for group in groups:
        rewards = [o.reward - 0.03 * float((o.old - o.ref).sum()) for o in group]
        for i, response in enumerate(group):
            others = rewards[:i] + rewards[i + 1 :]
            advantage = rewards[i] - np.mean(others) if others else 0.0
            terms.append(advantage * response.logp.sum())
    return torch.stack(terms).mean()


def reinforce_pp(groups: Groups) -> torch.Tensor:
    """arXiv:2501.03262: reward minus the KL of the tokens still to come, normalised over the batch, with
    beta 0.01.
    """
    responses = [response for group in groups for response in group]
    returns = []
    for o in responses:
        kl = 0.01 * (o.old - o.ref).detach().numpy()
        returns.append([o.reward - kl[t:].sum() for t in range(len(kl))])
    everything = np.concatenate(returns)
    if len(everything) < 2:
        return sum(o.logp.sum() * 0 for o in responses)
    deviation = np.sqrt(everything.var(ddof=1) + 1e-8)
    terms = [
        clipped_gain(o.ratio, torch.tensor((np.array(own) - everything.mean()) / deviation))
        for o, own in zip(responses, returns, strict=True)
    ]
    return torch.cat(terms).mean()


def grpo_whole_response(groups: Groups) -> torch.Tensor:
    """Equations 1 to 3 of arXiv:2501.12948 with a sum over the group, and the KL as in arXiv:2402.03300."""
    of_groups = [
        sum(
            clipped_gain((o.logp - o.old).sum().exp(), a) - 0.04 * k3(o).mean()
            for o, a in with_advantages([group])
        )
        for group in groups
    ]
    return torch.stack(of_groups).mean()


OBJECTIVES = {
    function.__name__: function
    for function in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, grpo_whole_response)
}


# --- ours


@cache
def configured(*overrides: str) -> Config:
    """Return a configuration. It is cached, because making it is slow and none is changed."""
    return read_config(
        None, ["model.path=m", "data.train=d", f"rollout.max_response_length={LONGEST}", *overrides]
    )


def our_loss(config: Config, data: Ragged) -> torch.Tensor:
    """Return the sum over tokens that the trainer differentiates, for one optimizer step."""
    batch = data.batch
    controller = KLController.from_config(config.algorithm.kl_ctrl)
    set_coefficients([batch], config, Correction.from_config(config.mismatch), controller)
    factor = None if batch.policy_factor is None else torch.from_numpy(batch.policy_factor)
    inputs = replace(
        data.inputs,
        advantage=torch.from_numpy(batch.advantage).double(),
        mask=torch.from_numpy(batch.loss_mask),
        policy_factor=factor,
    )
    loss = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=True)
    value, _ = loss(data.logp, data.entropy, inputs)
    return (torch.from_numpy(batch.weight).double() * value).sum()


def assert_same(ours: torch.Tensor, objective: torch.Tensor, logp: torch.Tensor) -> None:
    np.testing.assert_allclose(ours.item(), -objective.item(), rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(total, logp, retain_graph=True)[0] for total in (ours, -objective)]
    np.testing.assert_allclose(*(gradient.numpy() for gradient in gradients), rtol=1e-6, atol=1e-6)


def batch_of(seed: int, spread: float) -> Ragged | None:
    """Return the batch, or None if no token of it is trained."""
    data = ragged(seed, spread, group_size=3)
    return data if data.batch.loss_mask.any() else None


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([3e-4, 0.3]))
def test_a_preset_is_its_papers_objective(name, seed, spread):
    data = batch_of(seed, spread)
    if data is not None:
        assert_same(
            our_loss(configured(f"algorithm.preset={name}"), data),
            OBJECTIVES[name](groups_of(data)),
            data.logp,
        )


# --- the mismatch between engine and trainer, on top of grpo and dapo


def outside(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (values < low) | (values > high)


def token_ratio(o: Response) -> torch.Tensor:
    return (o.old - o.engine).exp()


def product(o: Response) -> torch.Tensor:
    return (o.old - o.engine).sum().exp().expand(len(o.old))


def geometric(o: Response) -> torch.Tensor:
    return (o.old - o.engine).mean().exp().expand(len(o.old))


FACTORS = {
    # truncated importance sampling, of tokens and of sequences
    "mismatch.correction=tis mismatch.ratio_high=1.1": lambda o: token_ratio(o).clamp(max=1.1),
    "mismatch.correction=seq_tis mismatch.ratio_high=1.2": lambda o: product(o).clamp(max=1.2),
    # M(k) of arXiv:2510.18855: k inside of the bounds, else 0
    "mismatch.correction=icepop mismatch.ratio_low=0.8 mismatch.ratio_high=1.3": lambda o: torch.where(
        outside(token_ratio(o), 0.8, 1.3), 0, token_ratio(o)
    ),
    "mismatch.correction=mis mismatch.ratio_high=1.2": lambda o: torch.where(product(o) > 1.2, 0, product(o)),
    # masks alone
    "mismatch.rejection=token_ratio mismatch.rejection_low=0.8 mismatch.rejection_high=1.3": lambda o: (
        ~outside(token_ratio(o), 0.8, 1.3)
    ).double(),
    "mismatch.rejection=seq_geometric_ratio mismatch.rejection_low=0.9 "
    "mismatch.rejection_high=1.1": lambda o: (~outside(geometric(o), 0.9, 1.1)).double(),
    "mismatch.action=mask mismatch.threshold=0.2": lambda o: (token_ratio(o).log().abs() <= 0.2).double(),
    # both
    "mismatch.correction=tis mismatch.ratio_high=1.1 mismatch.rejection=seq_geometric_ratio "
    "mismatch.rejection_low=0.9 mismatch.rejection_high=1.1": lambda o: torch.where(
        outside(geometric(o), 0.9, 1.1), 0, token_ratio(o).clamp(max=1.1)
    ),
}


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("preset", ["grpo", "dapo"])
@pytest.mark.parametrize("keys", FACTORS)
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_a_correction_multiplies_the_policy_term_and_no_mean(keys, preset, seed):
    """The means remain those of all tokens of a response, as in IcePop's objective.

    The KL of grpo keeps all of them.
    """
    data = batch_of(seed, 0.3)
    if data is not None:
        config = configured(f"algorithm.preset={preset}", *keys.split())
        assert_same(our_loss(config, data), OBJECTIVES[preset](groups_of(data), FACTORS[keys]), data.logp)


def kept_only(data: Ragged, low: float, high: float) -> Groups:
    """Return the responses as if tokens outside the bounds had never been trained.

    None may be left of a response.
    """
    groups = []
    for group in groups_of(data):
        kept = [~outside(token_ratio(o), low, high) for o in group]
        parts = [
            replace(o, logp=o.logp[k], old=o.old[k], ref=o.ref[k], engine=o.engine[k])
            for o, k in zip(group, kept, strict=True)
        ]
        groups.append(parts)
    return groups


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6))
def test_renormalized_the_mean_is_over_the_tokens_that_are_kept(seed):
    data = batch_of(seed, 0.3)
    if data is None or not sum(len(o.logp) for group in kept_only(data, 0.8, 1.3) for o in group):
        return
    keys = (
        "mismatch.correction=icepop mismatch.ratio_low=0.8 mismatch.ratio_high=1.3 mismatch.renormalize=true"
    )
    config = configured("algorithm.preset=dapo", *keys.split())
    assert_same(our_loss(config, data), dapo(kept_only(data, 0.8, 1.3), token_ratio), data.logp)


# --- the ratio of the whole response: exact, or refused


def whole_response_with(factor: Callable, groups: Groups) -> torch.Tensor:
    """The definition: every token's loss has the response's ratio, whose gradient is that of all of its
    tokens.
    """
    of_groups = [
        sum(
            (factor(o) * clipped_gain((o.logp - o.old).sum().exp(), a)).mean()
            for o, a in with_advantages([group])
        )
        for group in groups
    ]
    return torch.stack(of_groups).mean()


@pytest.mark.parametrize("keys", FACTORS)
def test_the_ratio_of_the_whole_response_is_exact_or_refused(keys):
    config = configured("algorithm.preset=grpo_whole_response", "algorithm.use_kl_loss=false", *keys.split())
    refused = [rule for rule in algorithm_violations(config) if "sequence_sum" in rule]
    assert len(algorithm_violations(config)) == len(refused)
    wrong = 0
    for seed in range(30):
        data = batch_of(seed, 0.3)
        if data is None:
            continue
        try:
            assert_same(
                our_loss(config, data), whole_response_with(FACTORS[keys], groups_of(data)), data.logp
            )
        except AssertionError:
            wrong += 1
    assert (wrong > 0) == bool(refused), (wrong, refused)
    assert bool(refused) == (
        "token_ratio" in keys or "=tis" in keys or "icepop" in keys or "action=mask" in keys
    )


def test_advantages_that_differ_within_a_response_are_refused_with_its_ratio():
    keys = ["algorithm.preset=grpo_whole_response", "algorithm.adv_estimator=reinforce_plus_plus"]
    assert algorithm_violations(configured(*keys)) == []
    (rule,) = algorithm_violations(configured(*keys, "algorithm.use_kl_in_reward=true"))
    assert "use_kl_in_reward" in rule

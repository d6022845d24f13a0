"""Advantages: how much better a trajectory is than the policy's average.

An estimator is a function (AdvantageInputs, AlgorithmConfig) -> float64 [T], registered by
`@advantage_estimator("name")`. `advantages` calls the configured one and applies whitening and clipping.

All built-in estimators follow two conventions:

- A trajectory without a trained token is ignored. It is not part of its group's mean or of any other number.
- If all compared values are equal, the result is exactly zero. Otherwise the rounding error of a mean,
  divided by a small standard deviation, would look like a signal. A group of one is such a case.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.plugins import Call, Registry

advantage_estimator = Registry(
    "advantage estimator", "algorithm.adv_estimator", call=Call(("inputs", "options"))
)

# Estimators that cannot compare anything in a group of one sample.
GROUP_RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gpg")


def smallest_group(estimator: str) -> int:
    """Return how many trajectories a group must have, so that the estimator can compare them."""
    return 2 if estimator in GROUP_RELATIVE else 1


@dataclass(frozen=True)
class Trajectories:
    """The N trajectories that have a trained token, in the order of their ids."""

    reward: np.ndarray
    """float64 [N]. Reward of the outcome."""
    score: np.ndarray
    """float64 [N]. Reward of the outcome plus the rewards of the tokens."""
    group: np.ndarray
    """int64 [N]. Index of the group, 0 .. P-1."""
    of_token: np.ndarray
    """int64 [T]. Index of each token's trajectory, -1 outside the mask."""

    def to_tokens(self, values: np.ndarray) -> np.ndarray:
        """Return float64 [T]: each trained token gets its trajectory's value from `values` [N].

        Other tokens get 0.
        """
        spread = np.zeros(len(self.of_token))
        trained = self.of_token >= 0
        spread[trained] = values[self.of_token[trained]]
        return spread


@dataclass(frozen=True)
class AdvantageInputs:
    """The S sequences and T tokens of a whole batch."""

    reward: np.ndarray
    """[S]. Outcome of the sequence's trajectory, the same for all of its sequences."""
    group_id: np.ndarray
    """int64 [S]. Any numbers. Groups may have any size and order."""
    trajectory_id: np.ndarray
    """int64 [S]. Any numbers. The sequences of a trajectory are in the order of time."""
    sequence_id: np.ndarray
    """int64 [T], ascending. Index of each token's sequence."""
    mask: np.ndarray
    """bool [T]. True for trained tokens."""
    token_reward: np.ndarray | None = None
    """float64 [T] or None. What each token adds to the reward (the KL penalty)."""

    @cached_property
    def trajectories(self) -> Trajectories:
        """The trajectories that have a trained token.

        Raises ValueError for a reward that is not finite, or that differs within a trajectory.
        """
        sequences, sequence_of = np.unique(self.sequence_id[self.mask], return_inverse=True)
        _, first, trajectory = np.unique(
            self.trajectory_id[sequences], return_index=True, return_inverse=True
        )
        rewards = np.asarray(self.reward, dtype=np.float64)[sequences]
        if not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite numbers, got {rewards[~np.isfinite(rewards)][0]}")
        reward = rewards[first]
        if (rewards != reward[trajectory]).any():
            raise ValueError("the sequences of a trajectory must carry the same reward")
        of_token = np.full(len(self.mask), -1)
        of_token[self.mask] = trajectory[sequence_of]
        score = reward
        if self.token_reward is not None:
            score = reward + np.bincount(
                of_token[self.mask], self.token_reward[self.mask], minlength=len(reward)
            )
        group = np.unique(self.group_id[sequences][first], return_inverse=True)[1]
        return Trajectories(reward, score, group, of_token)


def centred_in_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return values minus the mean of their group, float64 [N]. Exactly zero in groups of equal values."""
    count = np.bincount(group)
    mean = np.bincount(group, values) / np.maximum(count, 1)
    return np.where(_constant_groups(values, group)[group], 0.0, values - mean[group])


def _constant_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    num_groups = group.max(initial=-1) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low == high


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return (v - mean) / sqrt(var + 1e-8) over the masked tokens, var over n-1; float64 [T], 0 elsewhere.

    If all masked values are equal, the result is exactly zero.
    """
    chosen = values[mask]
    out = np.zeros(len(values))
    if chosen.size and chosen.min() != chosen.max():
        out[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return out


def returns_to_go(inputs: AdvantageInputs) -> np.ndarray:
    """Return the undiscounted sum of a trajectory's rewards from each trained token on; float64 [T].

    The outcome is earned at the trajectory's last token.
    """
    found = inputs.trajectories
    returns = found.to_tokens(found.reward)
    if inputs.token_reward is None:
        return returns
    tokens = np.flatnonzero(inputs.mask)
    tokens = tokens[np.argsort(found.of_token[tokens], kind="stable")]
    earned = inputs.token_reward[tokens].astype(np.float64)
    ends = np.cumsum(np.bincount(found.of_token[tokens], minlength=len(found.reward)))
    before = np.cumsum(earned) - earned
    until_end = np.cumsum(earned)[ends - 1][found.of_token[tokens]]
    returns[tokens] += until_end - before
    return returns


@advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return (score - group mean) / (group std + 1e-6), std over n-1 (arXiv:2402.03300 section 4.1.2).

    Without algorithm.norm_adv_by_std_in_grpo, there is no division (Dr.GRPO, arXiv:2503.20783 section 3.2).
    """
    found = inputs.trajectories
    centred = centred_in_groups(found.score, found.group)
    if options.norm_adv_by_std_in_grpo:
        count = np.bincount(found.group)
        std = np.sqrt(np.bincount(found.group, centred**2) / np.maximum(count - 1, 1))
        centred = centred / (std + 1e-6)[found.group]
    return found.to_tokens(centred)


@advantage_estimator("rloo")
def rloo(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return score - mean score of the group's other trajectories.

    This is REINFORCE leave-one-out (arXiv:2402.14740 section 2.2).
    """
    found = inputs.trajectories
    count = np.bincount(found.group)
    factor = count / np.maximum(count - 1, 1)  # score - mean of others = n/(n-1) (score - mean)
    return found.to_tokens(centred_in_groups(found.score, found.group) * factor[found.group])


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return the undiscounted returns from each token on, whitened over trained tokens (arXiv:2501.03262)."""
    return whitened(returns_to_go(inputs), inputs.mask)


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return score - group mean, whitened over all trained tokens (arXiv:2501.03262, REINFORCE++-baseline).

    The whitening subtracts the mean over tokens. That mean is not zero if responses differ in length, so a
    group of equal rewards gets the same small shift as all others, unless no group has a signal.
    """
    found = inputs.trajectories
    return whitened(found.to_tokens(centred_in_groups(found.score, found.group)), inputs.mask)


@advantage_estimator("gpg")
def gpg(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return alpha (score - group mean) (GPG, arXiv:2504.02546).

    alpha = N / number of trajectories in groups with a signal. It compensates for groups of equal scores.
    Their gradient is zero, but they count in the mean of the loss.
    """
    found = inputs.trajectories
    with_signal = ~_constant_groups(found.score, found.group)[found.group]
    alpha = len(found.score) / max(with_signal.sum(), 1)
    return found.to_tokens(alpha * centred_in_groups(found.score, found.group))


def advantages(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return the configured estimator's advantages after adv_whiten and adv_clip.

    The result is float32 [T], 0 outside the mask. Raises ValueError if the estimator returns a wrong shape or
    a value that is not finite.
    """
    values = np.asarray(advantage_estimator.get(options.adv_estimator)(inputs, options), dtype=np.float64)
    if values.shape != inputs.mask.shape:
        raise ValueError(
            f"{options.adv_estimator} returned the shape {values.shape} for {len(inputs.mask)} tokens"
        )
    if not np.isfinite(values[inputs.mask]).all():
        raise ValueError(f"{options.adv_estimator} returned an advantage that is not finite")
    if options.adv_whiten:
        values = whitened(values, inputs.mask)
    if options.adv_clip is not None:
        values = np.clip(values, -options.adv_clip, options.adv_clip)
    return np.where(inputs.mask, values, 0).astype(np.float32)

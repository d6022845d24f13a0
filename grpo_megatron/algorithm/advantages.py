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
    """Return how many trajectories a group needs for this estimator: 2 if it compares them, else 1.

    The rollout drops a group if failed rewards leave fewer trajectories than this.
    """
    return 2 if estimator in GROUP_RELATIVE else 1


@dataclass(frozen=True)
class Trajectories:
    """The N trajectories of a batch of T tokens that have a trained token, in the order of their ids."""

    reward: np.ndarray
    """float64 [N]. Reward of the whole trajectory, without `token_reward`."""
    score: np.ndarray
    """float64 [N]. `reward` plus the sum of `token_reward` over the trajectory's trained tokens."""
    group: np.ndarray
    """int64 [N]. Index of the group (all trajectories of one prompt), 0 .. number of groups - 1."""
    of_token: np.ndarray
    """int64 [T]. Index of each token's trajectory, -1 for untrained tokens."""

    def to_tokens(self, values: np.ndarray) -> np.ndarray:
        """Give each trained token the value of its trajectory. Return float64 [T], 0 for other tokens.

        values: float [N], one per trajectory.
        """
        spread = np.zeros(len(self.of_token))
        trained = self.of_token >= 0
        spread[trained] = values[self.of_token[trained]]
        return spread


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an advantage estimator: the S sequences and T tokens of a whole batch."""

    reward: np.ndarray
    """float [S]. Reward of the sequence's trajectory, the same for all sequences of that trajectory."""
    group_id: np.ndarray
    """int64 [S]. Id of the sequence's prompt group. Ids need not be consecutive, nor groups equally large."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the sequence's trajectory. Sequences of one trajectory are in the order of time."""
    sequence_id: np.ndarray
    """int64 [T], ascending. Index of each token's sequence."""
    mask: np.ndarray
    """bool [T]. True for trained tokens."""
    token_reward: np.ndarray | None = None
    """float64 [T] or None. Reward of each single token, such as the negative KL penalty."""

    @cached_property
    def trajectories(self) -> Trajectories:
        """The trajectories of the batch that have a trained token.

        Raises ValueError if a reward is not finite. Raises ValueError also if the sequences of one trajectory
        have different rewards.
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
            raise ValueError("all sequences of a trajectory must have the same reward")
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
    """Return each value minus the mean of its group, float64 [N]. Exactly zero in groups of equal values.

    values: float [N], one value per trajectory.
    group: int [N], the index of each trajectory's group.
    """
    count = np.bincount(group)
    mean = np.bincount(group, values) / np.maximum(count, 1)
    return np.where(_constant_groups(values, group)[group], 0.0, values - mean[group])


def _constant_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return bool [number of groups]: True for groups in which all values are equal.

    values: float [N], one value per trajectory.
    group: int [N], the index of each trajectory's group.
    """
    num_groups = group.max(initial=-1) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low == high


def whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the values scaled to mean 0 and variance 1 over the trained tokens, float64 [T].

    A trained token gets (value - mean) / sqrt(variance + 1e-8), where the variance divides by n - 1. Other
    tokens get 0. If all trained tokens have the same value, the result is exactly zero.

    values: float [T], one per token.
    mask: bool [T], True for trained tokens.
    """
    chosen = values[mask]
    out = np.zeros(len(values))
    if chosen.size and chosen.min() != chosen.max():
        out[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return out


def returns_to_go(inputs: AdvantageInputs) -> np.ndarray:
    """Return each token's undiscounted sum of rewards up to the end of its trajectory, float64 [T].

    The sum consists of `token_reward` of the token and of later trained tokens, plus the reward of the whole
    trajectory, which counts as earned at its end. Untrained tokens get 0.
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
    """Return GRPO's advantages: (score - group mean) / (group std + 1e-6) (arXiv:2402.03300 section 4.1.2).

    The standard deviation divides by n - 1. With algorithm.norm_adv_by_std_in_grpo=false, the advantage is
    only score - group mean (Dr.GRPO, arXiv:2503.20783 section 3.2).
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
    """Return REINFORCE leave-one-out advantages: score - mean score of the group's other trajectories.

    See arXiv:2402.14740 section 2.2. The result is float64 [T].
    """
    found = inputs.trajectories
    count = np.bincount(found.group)
    factor = count / np.maximum(count - 1, 1)  # score - mean of others = n/(n-1) (score - mean)
    return found.to_tokens(centred_in_groups(found.score, found.group) * factor[found.group])


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return REINFORCE++ advantages: `returns_to_go`, whitened over all trained tokens (arXiv:2501.03262)."""
    return whitened(returns_to_go(inputs), inputs.mask)


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return REINFORCE++-baseline advantages: score - group mean, whitened over all trained tokens.

    See arXiv:2501.03262. The whitening subtracts the mean over tokens, which is not zero if responses differ
    in length. So a group whose rewards are all equal gets a small nonzero advantage, unless the rewards are
    equal in every group.
    """
    found = inputs.trajectories
    return whitened(found.to_tokens(centred_in_groups(found.score, found.group)), inputs.mask)


@advantage_estimator("gpg")
def gpg(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return GPG's advantages: alpha (score - group mean) (arXiv:2504.02546).

    alpha = number of trajectories / number of trajectories in groups whose scores differ. This factor
    compensates for groups of equal scores: their gradient is zero, but they count in the mean of the loss.
    """
    found = inputs.trajectories
    with_signal = ~_constant_groups(found.score, found.group)[found.group]
    alpha = len(found.score) / max(with_signal.sum(), 1)
    return found.to_tokens(alpha * centred_in_groups(found.score, found.group))


def advantages(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return the advantage of each token, float32 [T], 0 for untrained tokens.

    The estimator is algorithm.adv_estimator. Its result is whitened if algorithm.adv_whiten is set, and
    clipped to ±algorithm.adv_clip if that is set. Raises ValueError if the estimator returns a wrong shape,
    or a value that is not finite.
    """
    values = np.asarray(advantage_estimator.get(options.adv_estimator)(inputs, options), dtype=np.float64)
    if values.shape != inputs.mask.shape:
        raise ValueError(
            f"algorithm.adv_estimator={options.adv_estimator} returned an array of shape {values.shape}, "
            f"but must return one value for each of the {len(inputs.mask)} tokens"
        )
    if not np.isfinite(values[inputs.mask]).all():
        raise ValueError(
            f"algorithm.adv_estimator={options.adv_estimator} returned an advantage that is not finite"
        )
    if options.adv_whiten:
        values = whitened(values, inputs.mask)
    if options.adv_clip is not None:
        values = np.clip(values, -options.adv_clip, options.adv_clip)
    return np.where(inputs.mask, values, 0).astype(np.float32)

"""Advantages: how much better a trajectory is than what the policy does on average.

An estimator is a function (AdvantageInputs, AlgorithmConfig) -> float64 [T], registered by
`@advantage_estimator("name")`. `advantages` calls the one that is configured and applies what goes with any of them.

Two conventions hold for all built-in ones. A trajectory without a trained token takes no part: not
in its group's mean, not in any other number. Where everything that is compared is equal the result
is exactly zero, whatever the value: the rounding error of a mean, divided by a small standard
deviation, would look like a signal. A group of one is such a case.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.plugins import Call, Registry

advantage_estimator = Registry(
    "advantage estimator", "algorithm.adv_estimator", call=Call(("inputs", "options"))
)

# Estimators for which a group of one sample says nothing.
GROUP_RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gpg")


def smallest_group(estimator: str) -> int:
    """Return how many trajectories a group must have for the estimator to say something about them."""
    return 2 if estimator in GROUP_RELATIVE else 1


@dataclass(frozen=True)
class Trajectories:
    """The N trajectories that have a trained token, in the order of their ids.

    reward float64 [N]: of the outcome; score float64 [N]: with its tokens' rewards; group int64 [N]:
    0 .. P-1; of_token int64 [T]: the trajectory of each token, -1 outside the mask.
    """

    reward: np.ndarray
    score: np.ndarray
    group: np.ndarray
    of_token: np.ndarray

    def to_tokens(self, values: np.ndarray) -> np.ndarray:
        """[N] -> float64 [T]: each trained token gets its trajectory's value, others 0."""
        spread = np.zeros(len(self.of_token))
        trained = self.of_token >= 0
        spread[trained] = values[self.of_token[trained]]
        return spread


@dataclass(frozen=True)
class AdvantageInputs:
    """S sequences and T tokens of a whole batch.

    reward [S]: outcome of the sequence's trajectory, the same for all of its sequences. group_id,
    trajectory_id int64 [S], any numbers; groups may be of any size, in any order; sequences of one
    trajectory follow each other in time. sequence_id int64 [T], ascending; mask bool [T]: trained
    tokens. token_reward float64 [T] or None: what a token adds to the reward (the KL penalty).
    """

    reward: np.ndarray
    group_id: np.ndarray
    trajectory_id: np.ndarray
    sequence_id: np.ndarray
    mask: np.ndarray
    token_reward: np.ndarray | None = None

    @cached_property
    def trajectories(self) -> Trajectories:
        """Raises ValueError for a reward that is not finite, or differs within a trajectory."""
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
    """values - mean of their group; float64 [N]. Exactly zero in groups of equal values."""
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
    """(v - mean) / sqrt(var + 1e-8) over the masked tokens, var over n-1; float64 [T], 0 elsewhere.

    Exactly zero if all of them are equal.
    """
    chosen = values[mask]
    out = np.zeros(len(values))
    if chosen.size and chosen.min() != chosen.max():
        out[mask] = (chosen - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    return out


def returns_to_go(inputs: AdvantageInputs) -> np.ndarray:
    """Sum of a trajectory's rewards from each trained token on, undiscounted; float64 [T].

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
    """(score - group mean) / (group std + 1e-6), std over n-1 (arXiv:2402.03300 section 4.1.2).

    Without algorithm.norm_adv_by_std_in_grpo not divided (Dr.GRPO, arXiv:2503.20783 section 3.2).
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
    """score - mean score of the others in the group (REINFORCE leave-one-out, arXiv:2402.14740 section 2.2)."""
    found = inputs.trajectories
    count = np.bincount(found.group)
    factor = count / np.maximum(count - 1, 1)  # score - mean of others = n/(n-1) (score - mean)
    return found.to_tokens(centred_in_groups(found.score, found.group) * factor[found.group])


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Undiscounted return from each token on, whitened over all trained tokens (arXiv:2501.03262)."""
    return whitened(returns_to_go(inputs), inputs.mask)


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """score - group mean, then whitened over all trained tokens (arXiv:2501.03262, REINFORCE++-baseline).

    The whitening subtracts the mean over tokens, which is not zero where responses differ in length,
    so that a group of equal rewards gets that same small shift, unless no group has a signal.
    """
    found = inputs.trajectories
    return whitened(found.to_tokens(centred_in_groups(found.score, found.group)), inputs.mask)


@advantage_estimator("gpg")
def gpg(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """alpha (score - group mean), alpha = N / trajectories in groups with a signal (GPG, arXiv:2504.02546).

    alpha makes up for the groups of equal scores, whose gradient is zero but which count in the loss's mean.
    """
    found = inputs.trajectories
    with_signal = ~_constant_groups(found.score, found.group)[found.group]
    alpha = len(found.score) / max(with_signal.sum(), 1)
    return found.to_tokens(alpha * centred_in_groups(found.score, found.group))


def advantages(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """The configured estimator, then adv_whiten and adv_clip; float32 [T], 0 outside the mask.

    Raises ValueError if the estimator returns another shape or something not finite.
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

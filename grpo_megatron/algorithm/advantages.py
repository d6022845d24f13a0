"""Advantages: how much better a trajectory is than the policy's average.

An estimator is a function (AdvantageInputs, AlgorithmConfig) -> float64 [N], one advantage for each of N
trajectories, registered by `@advantage_estimator("name")`. An estimator whose advantages differ from token to
token returns an `Estimate`. `advantages` calls the configured one and applies whitening and clipping.

All built-in estimators follow two conventions:

- A trajectory without a trained token is ignored. It is not part of its group's mean or of any other number.
- If all compared values are equal, the result is exactly zero. Otherwise the rounding error of a mean,
  divided by a small standard deviation, would look like a signal. A group of one is such a case.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from grpo_megatron.batch.sums import SequenceSums
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.plugins import Call, Registry

advantage_estimator = Registry(
    "advantage estimator", "algorithm.adv_estimator", call=Call(("inputs", "options"))
)

# Estimators that cannot compare anything in a group of one sample.
GROUP_RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline", "gpg")
# Relative rounding error of a sequence's sums, with a margin.
_ROUNDING = 1e-12


def columns_of(options: AlgorithmConfig) -> tuple[str, ...]:
    """Return the names of the per-token arrays whose sums the configured advantage estimator needs.

    They are the names in the estimator's decorator `needs_columns`. Without this decorator, there are none.
    """
    return getattr(advantage_estimator.get(options.adv_estimator), "columns", ())


def smallest_group(estimator: str) -> int:
    """Return the smallest number of trajectories in a group that the advantage estimator can use.

    A group is all trajectories of one prompt. If rewards fail, so that fewer trajectories are left, the
    rollout drops the group. The number is 2 for a built-in estimator that compares the trajectories of a
    group with each other, else 1, also for estimators of plugins.
    """
    return 2 if estimator in GROUP_RELATIVE else 1


@dataclass(frozen=True)
class Trajectories:
    """Arrays with one entry for each of the N trajectories of a training step, in the order of their ids.

    Trajectories without a trained token are left out.
    """

    reward: np.ndarray
    """float64 [N]. Reward of the trajectory. The KL is not subtracted."""
    score: np.ndarray
    """float64 [N]. `reward` minus kl_coef times the KL, summed over the trajectory's trained tokens."""
    group: np.ndarray
    """int64 [N]. Index of the group (all trajectories of one prompt), 0 .. number of groups - 1."""
    tokens: np.ndarray
    """float64 [N]. Number of the trajectory's trained tokens."""
    of_sequence: np.ndarray
    """int64 [S]. Index of each sequence's trajectory, -1 for sequences without a trained token."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Input of an advantage estimator: the S sequences of a whole training step."""

    table: SampleTable
    """Group, trajectory and reward of each sequence. Groups need not be equally large."""
    sums: SequenceSums
    """Sums over the trained tokens of each sequence."""
    kl_coef: float = 0.0
    """Coefficient of the KL that is subtracted from the rewards. 0: the rewards contain no KL."""
    columns: tuple[str, ...] = ()
    """Names of the columns whose sums are in `sums.columns`, in order."""

    def column(self, name: str) -> np.ndarray:
        """Return the sum of a column (per-token array) over each trajectory's trained tokens, float64 [N].

        name: name of the column, such as "old_logp". Raises ValueError for a name that the estimator has not
            given to its decorator `needs_columns`.
        """
        if name not in self.columns:
            raise ValueError(
                f"the sums of {name} were not computed; decorate the advantage estimator with "
                f'@needs_columns("{name}")'
            )
        found, rows = self.trajectories, np.flatnonzero(self.sums.trained)
        values = self.sums.columns[rows, self.columns.index(name)]
        return np.bincount(found.of_sequence[rows], values, len(found.reward))

    @cached_property
    def trajectories(self) -> Trajectories:
        """Reward, score, group and length of every trajectory that has a trained token.

        Raises ValueError if a reward is not finite, or if the sequences of one trajectory have different
        rewards.
        """
        rows = np.flatnonzero(self.sums.trained)
        _, first, trajectory = np.unique(
            self.table.trajectory_id[rows], return_index=True, return_inverse=True
        )
        rewards = np.asarray(self.table.reward, dtype=np.float64)[rows]
        if not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite numbers, got {rewards[~np.isfinite(rewards)][0]}")
        reward = rewards[first]
        if (rewards != reward[trajectory]).any():
            row = np.flatnonzero(rewards != reward[trajectory])[0]
            raise ValueError(
                "all sequences of a trajectory must have the same reward, but trajectory "
                f"{self.table.trajectory_id[rows[row]]} has {reward[trajectory[row]]} and {rewards[row]}"
            )
        of_sequence = np.full(len(self.sums.trained), -1)
        of_sequence[rows] = trajectory
        count = len(reward)
        kl = np.bincount(trajectory, self.sums.kl[rows], count)
        return Trajectories(
            reward=reward,
            score=reward - self.kl_coef * kl if self.kl_coef else reward,
            group=np.unique(self.table.group_id[rows][first], return_inverse=True)[1],
            tokens=np.bincount(trajectory, self.sums.trained[rows], count),
            of_sequence=of_sequence,
        )

    def __getattr__(self, name: str):
        if name in ("reward", "group_id", "trajectory_id", "sequence_id", "mask", "token_reward"):
            raise AttributeError(
                f"AdvantageInputs has no {name}: an advantage estimator sees trajectories, not tokens, and "
                "returns one advantage for each of inputs.trajectories (docs/plugins.md)"
            )
        raise AttributeError(f"AdvantageInputs has no attribute {name!r}")


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator whose advantages differ between the tokens of a trajectory, or are whitened.

    Other estimators return only an array like `values`, with the advantage of each trajectory.
    """

    values: np.ndarray
    """float64 [N]. Advantage of each of N trajectories, before the changes that the other fields ask for."""
    minus_kl_to_go: bool = False
    """True: from the advantage of each token, subtract kl_coef times the KL summed over this token and all
    later trained tokens of its trajectory."""
    whitened: bool = False
    """True: shift and scale the advantages to mean 0 and variance 1 over all trained tokens of the step."""


@dataclass(frozen=True)
class Credit:
    """Advantages of all trained tokens of a step, in compact form: one number per sequence and four per step.

    The advantage of trained token t in sequence i is (base_i - kl_coef · s_t - mean) · scale, clipped to
    ±limit. s_t is the sum of the KL over the trained tokens u >= t of the sequence (batch/sums.py).
    `of_tokens` computes the advantages from this form.
    """

    base: np.ndarray
    """float64 [S]. Advantage of each sequence before the other fields apply. 0 without a trained token."""
    kl_coef: float = 0.0
    """Coefficient of s_t. 0: all trained tokens of a sequence have the same advantage."""
    mean: float = 0.0
    """Mean over all trained tokens of the step, if advantages are whitened."""
    scale: float = 1.0
    """Inverse standard deviation over all trained tokens of the step, if advantages are whitened."""
    limit: float | None = None
    """Largest absolute value of an advantage. None: advantages are not clipped."""

    def of_tokens(
        self, sequence: np.ndarray, mask: np.ndarray, suffix: np.ndarray | None, dtype=np.float32
    ) -> np.ndarray:
        """Return the advantage of each token, `dtype` [T], 0 for untrained tokens.

        sequence: int [T], index of each token's sequence.
        mask: bool [T], True for trained tokens.
        suffix: float64 [T], for each token the sum of the KL over this token and all later trained tokens of
            its sequence. None if the reward contains no KL.
        """
        values = self.base[sequence]
        if self.kl_coef:
            values = values - self.kl_coef * suffix
        return np.where(mask, self._scaled(values), 0.0).astype(dtype)

    def of_sequences(self, sums: SequenceSums) -> np.ndarray:
        """Return the mean advantage over the trained tokens of each sequence, float64 [n].

        The n sequences are those with a trained token. The mean is clipped, not the advantages of single
        tokens.

        sums: sums over the trained tokens of the same S sequences.
        """
        rows = np.flatnonzero(sums.trained)
        values = self.base[rows]
        if self.kl_coef:
            values = values - self.kl_coef * sums.suffix[rows] / sums.trained[rows]
        return self._scaled(values)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        values = (values - self.mean) * self.scale
        return values if self.limit is None else np.clip(values, -self.limit, self.limit)

    def part(self, rows: slice | np.ndarray, divisor: float = 1.0) -> "Credit":
        """Return the advantages of some of the sequences, divided by `divisor`.

        rows: the sequences to return, as a slice or as indices.
        divisor: positive number. The limit of clipping is divided by it too.
        """
        limit = None if self.limit is None else self.limit / divisor
        return replace(self, base=self.base[rows], scale=self.scale / divisor, limit=limit)


def centred_in_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return each value minus the mean of its group, float64 [N].

    If all values of a group are equal, its results are exactly zero, without a rounding error.

    values: float [N], one value per trajectory.
    group: int [N], index of each trajectory's group.
    """
    count = np.bincount(group)
    mean = np.bincount(group, values) / np.maximum(count, 1)
    return np.where(_constant_groups(values, group)[group], 0.0, values - mean[group])


def _constant_groups(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return bool [number of groups]: True for groups in which all values are equal.

    values, group: [N], one value and one group index per trajectory.
    """
    num_groups = group.max(initial=-1) + 1
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, group, values)
    np.maximum.at(high, group, values)
    return low == high


def whitened(credit: Credit, sums: SequenceSums) -> Credit:
    """Return the advantages shifted and scaled to mean 0 and variance 1 over the trained tokens of the step.

    The advantage a of a token becomes (a - mean) / sqrt(variance + 1e-8). The variance of n tokens divides by
    n - 1. If all trained tokens have the same advantage, the result is exactly zero.

    credit: the advantages, not yet whitened or clipped.
    sums: sums over the trained tokens of each sequence.
    """
    trained, coef = sums.trained, credit.kl_coef
    count = trained.sum()
    if _is_constant(credit, sums):
        return Credit(np.zeros_like(credit.base))
    mean = (trained * credit.base - coef * sums.suffix).sum() / count
    # Subtracting the mean first keeps the digits of large values that differ little.
    centred = credit.base - mean
    squares = trained * centred**2 - 2 * coef * centred * sums.suffix + coef**2 * sums.suffix_squared
    variance = max(squares.sum(), 0.0) / (count - 1)
    return replace(credit, mean=mean, scale=1 / np.sqrt(variance + 1e-8))


def _is_constant(credit: Credit, sums: SequenceSums) -> bool:
    """Return True if all trained tokens of the step have the same advantage, or if there are none.

    credit: advantages of the sequences, not yet whitened or clipped.
    sums: sums over the trained tokens of each sequence.
    """
    rows = np.flatnonzero(sums.trained)
    if not len(rows):
        return True
    values = credit.base[rows]
    if credit.kl_coef:
        trained, suffix = sums.trained[rows], sums.suffix[rows]
        # Cauchy-Schwarz: equal only if s_t is the same at all trained tokens of the sequence.
        squares = trained * sums.suffix_squared[rows]
        if (squares - suffix**2 > _ROUNDING * squares).any():
            return False
        values = values - credit.kl_coef * suffix / trained
    return values.min() == values.max()


@advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return GRPO's advantages: (score - group mean) / (group std + 1e-6) (arXiv:2402.03300 section 4.1.2).

    The variance of a group of n trajectories divides by n - 1. algorithm.norm_adv_by_std_in_grpo=false omits
    the division by the standard deviation (Dr.GRPO, arXiv:2503.20783 section 3.2).
    """
    found = inputs.trajectories
    centred = centred_in_groups(found.score, found.group)
    if not options.norm_adv_by_std_in_grpo:
        return centred
    count = np.bincount(found.group)
    std = np.sqrt(np.bincount(found.group, centred**2) / np.maximum(count - 1, 1))
    return centred / (std + 1e-6)[found.group]


@advantage_estimator("rloo")
def rloo(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return the advantages of REINFORCE leave-one-out: score - mean score of the group's other trajectories.

    See arXiv:2402.14740 section 2.2.
    """
    found = inputs.trajectories
    count = np.bincount(found.group)
    factor = count / np.maximum(count - 1, 1)  # score - mean of others = n/(n-1) (score - mean)
    return centred_in_groups(found.score, found.group) * factor[found.group]


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(inputs: AdvantageInputs, options: AlgorithmConfig) -> Estimate:
    """Return the advantages of REINFORCE++: the undiscounted return at each token, whitened over all tokens.

    The return of a token is the trajectory's reward minus kl_coef times the KL of this token and all later
    ones (arXiv:2501.03262).
    """
    return Estimate(inputs.trajectories.reward, minus_kl_to_go=True, whitened=True)


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AlgorithmConfig) -> Estimate:
    """Return the advantages of REINFORCE++-baseline: score - group mean, whitened over all trained tokens.

    See arXiv:2501.03262. The whitening subtracts the mean over tokens, which is not zero if responses differ
    in length. A group of equal scores therefore gets a small nonzero advantage, unless the scores are equal
    in every group.
    """
    found = inputs.trajectories
    return Estimate(centred_in_groups(found.score, found.group), whitened=True)


@advantage_estimator("gpg")
def gpg(inputs: AdvantageInputs, options: AlgorithmConfig) -> np.ndarray:
    """Return GPG's advantages: alpha · (score - group mean) (arXiv:2504.02546).

    alpha is the number of all trajectories divided by the number of trajectories in groups whose scores
    differ. The factor compensates for groups of equal scores, which have zero gradient but count in the mean
    of the loss.
    """
    found = inputs.trajectories
    with_signal = ~_constant_groups(found.score, found.group)[found.group]
    alpha = len(found.score) / max(with_signal.sum(), 1)
    return alpha * centred_in_groups(found.score, found.group)


def advantages(inputs: AdvantageInputs, options: AlgorithmConfig) -> Credit:
    """Compute the advantages of a step with the configured estimator, then whiten and clip them.

    The estimator is algorithm.adv_estimator. Advantages are whitened if algorithm.adv_whiten is set or if the
    estimator asks for it (Estimate.whitened). They are clipped if algorithm.adv_clip is set.

    Raises ValueError if a reward is not finite, or if the estimator returns a wrong shape, or a value that is
    not finite.
    """
    name = options.adv_estimator
    estimate = advantage_estimator.get(name)(inputs, options)
    if not isinstance(estimate, Estimate):
        estimate = Estimate(estimate)
    found = inputs.trajectories
    values = np.asarray(estimate.values, dtype=np.float64)
    if values.shape != found.reward.shape:
        raise ValueError(
            f"{name} returned the shape {values.shape}, but must return one advantage for each of the "
            f"{len(found.reward)} trajectories (docs/plugins.md)"
        )
    if not np.isfinite(values).all():
        first = np.flatnonzero(~np.isfinite(values))[0]
        raise ValueError(
            f"{name} returned an advantage that is not finite: {values[first]} for trajectory {first} of "
            f"{len(values)} (score {found.score[first]})"
        )
    credit = Credit(np.append(values, 0.0)[found.of_sequence])
    if estimate.minus_kl_to_go and inputs.kl_coef:
        later = _kl_of_later_sequences(inputs)
        credit = Credit(credit.base - inputs.kl_coef * later, inputs.kl_coef)
    if estimate.whitened or options.adv_whiten:
        credit = whitened(credit, inputs.sums)
    return replace(credit, limit=options.adv_clip)


def _kl_of_later_sequences(inputs: AdvantageInputs) -> np.ndarray:
    """Return, for each sequence, the summed KL of the later sequences of its trajectory, float64 [S].

    The value is 0 for sequences without a trained token.
    """
    of_sequence = inputs.trajectories.of_sequence
    rows = np.flatnonzero(of_sequence >= 0)
    rows = rows[np.argsort(of_sequence[rows], kind="stable")]
    kl = inputs.sums.kl[rows]
    until_here = np.cumsum(kl)
    ends = np.cumsum(np.bincount(of_sequence[rows]))
    later = np.zeros(len(of_sequence))
    later[rows] = until_here[ends - 1][of_sequence[rows]] - until_here
    return later

"""Statistics of a step's samples."""

from collections import Counter
from math import comb

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.rollout.source import Rollout


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return pass@k: the estimated probability that at least one of k samples is right.

    The estimate is 1 - C(n-c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374,
    eq. 1).

    samples: number n of samples that were drawn.
    correct: number c of these samples that are right.
    k: at most `samples`.
    """
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def pass_rates(groups: list[Group], pass_reward: float) -> dict[str, float]:
    """Return {"pass@k": mean over the groups} for k = 2, 4, 8, ... up to the size of the largest group.

    pass@k is the estimated probability that at least one of k trajectories is right. The mean is over the
    groups that have at least k trajectories.

    pass_reward: a trajectory is right if its reward is at least this value.
    """
    counts = [
        (len(group.rewards), sum(reward >= pass_reward for reward in group.rewards)) for group in groups
    ]
    rates, k = {}, 2
    while k <= max(n for n, _ in counts):
        rates[f"pass@{k}"] = float(np.mean([pass_at_k(n, c, k) for n, c in counts if n >= k]))
        k *= 2
    return rates


def majority_reward(answers: list[str | None], rewards: list[float]) -> float:
    """Return maj@n of a prompt: the reward of the most frequent answer among its n samples.

    If several samples have this answer, the first one's reward is returned. In a tie of answers, the answer
    that comes first wins. If no sample has an answer, the result is the first sample's reward.

    answers: answer of each sample, or None for a sample without an answer, which does not vote.
    rewards: reward of each sample.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    return rewards[answers.index(max(votes, key=votes.__getitem__))] if votes else rewards[0]


def group_statistics(groups: list[Group], pass_reward: float) -> dict[str, float]:
    """Compute statistics of groups for the logs: rewards, components, pass@k, lengths and finish reasons.

    Returns {name: value}, with names such as "reward/mean".

    pass_reward: a trajectory is right if its reward is at least this value.
    """
    trajectories = [sequences for group in groups for sequences in group.trajectories]
    samples = [
        sequences[0] for sequences in trajectories
    ]  # all sequences of a trajectory have the same reward, components and finish reason
    # Depending on rollout.history, observations are in the response of one sequence or in the prompt of the
    # next. So only tokens that the model wrote are counted.
    lengths = np.array([sum(sample.num_written for sample in sequences) for sequences in trajectories])
    rewards = np.array([sample.reward for sample in samples])
    scalars = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/failed": sum(sample.reward_failed for sample in samples)
        + sum(group.failed for group in groups),
        "reward/zero_variance_groups": np.mean([len(set(group.rewards)) == 1 for group in groups]),
        "response/length_mean": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/truncated": np.mean([sample.finish_reason == "length" for sample in samples]),
        "response/turns_mean": np.mean(
            [sum(sample.turns for sample in sequences) for sequences in trajectories]
        ),
        "response/sequences_mean": np.mean([len(sequences) for sequences in trajectories]),
        "response/out_of_turns": np.mean([sample.finish_reason == "max_turns" for sample in samples]),
    }
    scalars |= {f"reward/{name}": rate for name, rate in pass_rates(groups, pass_reward).items()}
    for name in sorted({name for sample in samples for name in sample.reward_components}):
        values = [sample.reward_components[name] for sample in samples if name in sample.reward_components]
        scalars[f"reward/component/{name}"] = np.mean(values)
    return {name: float(value) for name, value in scalars.items()}


def step_statistics(
    groups: list[Group], rollout: Rollout, pass_reward: float, version: int | None
) -> dict[str, float]:
    """Compute statistics for the logs about the groups that a step trains on or leaves out.

    Returns {name: value}: the statistics of `group_statistics` for the trained groups, the numbers of groups
    that are left out, and the staleness of the tokens.

    groups: the groups that the step trains on.
    rollout: the rollout that the groups come from, with the counts of groups that are not trained on.
    pass_reward: a trajectory is right if its reward is at least this value.
    version: version of the weights that are being trained. If None, no staleness is computed.
    """
    scored = len(rollout.groups) + rollout.dropped
    scalars = group_statistics(groups, pass_reward)
    scalars |= {"reward/filtered_groups": 1 - len(groups) / scored, "rollout/scored_groups": float(scored)}
    scalars["rollout/aborted_groups"] = float(rollout.aborted)
    scalars["rollout/failed_groups"] = float(len(rollout.failed))
    scalars["reward/failed"] += sum(group.failed for group in rollout.failed)
    return scalars | (staleness(groups, version) if version is not None else {})


def staleness(groups: list[Group], version: int) -> dict[str, float]:
    """Return metrics {name: value} of the staleness of the sampled tokens.

    A token's staleness is `version` minus the version of the weights that sampled the token.

    version: version of the weights that are being trained.

    Returns {} if there are no tokens, otherwise a dict with these keys:
    "staleness/mean", "staleness/max": mean and maximum over the tokens.
    "staleness/versions": number of different versions that sampled a sequence's tokens, as the mean over the
        sequences.
    """
    sequences = [sample.weight_spans for group in groups for sample in group.samples]
    spans = [span for of_sequence in sequences for span in of_sequence]
    tokens = np.array([span.end - span.start for span in spans])
    if not tokens.sum():
        return {}
    behind = np.array([version - span.version for span in spans])
    versions = [len({span.version for span in of_sequence}) for of_sequence in sequences if of_sequence]
    return {
        "staleness/mean": float(np.average(behind, weights=tokens)),
        "staleness/max": float(behind.max()),
        "staleness/versions": float(np.mean(versions)),
    }

"""Statistics of a step's samples by hand: every scalar of a small step, in which all groups and
trajectories differ.
"""

import itertools

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.rollout.statistics import group_statistics, pass_at_k, staleness, step_statistics


def sample(trajectory: int, reward: float, length: int, reason: str = "stop", **changes) -> Sample:
    mask, logps = np.ones(length, bool), np.zeros(length, np.float32)
    ids = np.zeros(length, np.int32)
    changes.setdefault("weight_spans", (WeightSpan(5, 0, length),))
    return Sample.of(0, trajectory, ids[:1], ids, mask, logps, reason, reward=reward, **changes)


def group(number: int, *samples: Sample, failed: int = 0) -> Group:
    return Group(number, Prompt(number, np.zeros(1, np.int32), "", ""), samples, failed)


FIRST = group(
    0,
    sample(0, 1.0, 2, turns=2, reward_components={"format": 1.0, "length": -1.0}),
    sample(
        0, 1.0, 3, turns=1, reward_components={"format": 1.0, "length": -1.0}
    ),  # the same trajectory goes on
    sample(1, 0.5, 4, "length", reward_components={"format": 0.0}),
    sample(2, 0.0, 1, "max_turns", turns=4, reward_failed=True),
    sample(3, 0.5, 8),
    failed=1,
)
SECOND = group(1, sample(4, 2.0, 6, "length"), sample(5, 2.0, 10))
REWARDS = [1.0, 0.5, 0.0, 0.5, 2.0, 2.0]


def test_every_scalar_of_two_groups():
    assert group_statistics([FIRST, SECOND], pass_reward=1.0) == pytest.approx(
        {
            "reward/mean": np.mean(REWARDS),
            "reward/std": np.std(REWARDS),
            "reward/failed": 2,  # one sample, and one trajectory that was left out
            "reward/zero_variance_groups": 0.5,
            "response/length_mean": (5 + 4 + 1 + 8 + 6 + 10) / 6,
            "response/length_max": 10,
            "response/truncated": 2 / 6,
            "response/turns_mean": (3 + 1 + 4 + 1 + 1 + 1) / 6,
            "response/sequences_mean": 7 / 6,
            "response/out_of_turns": 1 / 6,
            "reward/pass@2": (1 / 2 + 1) / 2,  # one of four is right: 1 - C(3, 2) / C(4, 2)
            "reward/pass@4": 1,  # of the first group alone
            "reward/component/format": 0.5,  # of the trajectories that have it
            "reward/component/length": -1,
        }
    )
    assert group_statistics([SECOND], pass_reward=1.0)["reward/zero_variance_groups"] == 1


def test_what_a_step_left_out():
    failed = [group(2, failed=4), group(3, sample(6, 1.0, 1), failed=3)]
    rollout = Rollout([FIRST, SECOND], dropped=3, aborted=7, failed=failed)
    scalars = step_statistics([SECOND], rollout, pass_reward=1.0, version=None)
    assert scalars["reward/filtered_groups"] == pytest.approx(1 - 1 / 5)
    assert scalars["rollout/scored_groups"] == 5
    assert (scalars["rollout/aborted_groups"], scalars["rollout/failed_groups"]) == (7, 2)
    assert scalars["reward/failed"] == 0 + 4 + 3
    assert scalars["reward/mean"] == 2
    assert (
        step_statistics([FIRST, SECOND], rollout, pass_reward=1.0, version=None)["reward/failed"] == 2 + 4 + 3
    )


def test_staleness_counts_tokens_and_not_spans():
    """A response that continues over a weight sync has several spans."""
    spans = (WeightSpan(4, 0, 6), WeightSpan(7, 6, 8))
    groups = [
        group(0, sample(0, 1.0, 8, weight_spans=spans)),
        group(1, sample(1, 0.0, 2, weight_spans=(WeightSpan(6, 0, 2),))),
    ]
    assert staleness(groups, version=7) == pytest.approx(
        {"staleness/mean": (6 * 3 + 2 * 0 + 2 * 1) / 10, "staleness/max": 3, "staleness/versions": 1.5}
    )
    assert staleness([group(0, sample(0, 1.0, 1, weight_spans=()))], version=7) == {}
    assert staleness([group(0, sample(0, 1.0, 1, weight_spans=(WeightSpan(4, 0, 0),)))], version=7) == {}


@pytest.mark.parametrize(
    ("samples", "correct", "k"), [(1, 1, 1), (4, 0, 2), (4, 1, 2), (4, 2, 4), (6, 2, 3), (8, 8, 1)]
)
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(samples, correct, k):
    choices = list(itertools.combinations([True] * correct + [False] * (samples - correct), k))
    assert pass_at_k(samples, correct, k) == pytest.approx(np.mean([any(choice) for choice in choices]))

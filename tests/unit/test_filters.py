"""Groups, and samples of them, that are trained on. tests/integration has the same filters in whole runs."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.filters import (
    apply_filters,
    filtered,
    group_filter,
    mask_truncated,
    nonzero_variance,
)
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import AlgorithmConfig
from grpo_megatron.errors import UserError


def group(number: int, *rewards: float, reasons: tuple[str, ...] = ()) -> Group:
    """Return samples of three response tokens, of which the first and the last are trained."""
    mask = np.array([True, False, True])
    samples = tuple(
        Sample.of(
            number,
            10 * number + i,
            np.array([1], np.int32),
            np.array([2, 3, 4], np.int32),
            mask,
            np.zeros(3, np.float32),
            reasons[i] if reasons else "stop",
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    )
    return Group(number, Prompt(number, np.array([1], np.int32), None, ""), samples)


def test_groups_of_equal_rewards_are_left_out_and_the_others_keep_their_order():
    groups = [group(4, 1, 0), group(1, 1, 1), group(3, -0.5, -0.5, -0.4), group(2, 0, 0), group(0, 0, 1)]
    assert [kept.group_id for kept in nonzero_variance(groups)] == [4, 3, 0]


def test_only_samples_that_were_cut_off_lose_their_trained_tokens():
    (masked,) = mask_truncated([group(0, 1, 0, 0.5, reasons=("stop", "length", "abort"))])
    trained = [sample.num_trained for sample in masked.samples]
    assert trained == [2, 0, 2]
    (_, left_out, _) = masked.samples
    assert not TrainBatch.from_samples([left_out]).loss_mask.any()
    assert masked.rewards == [1, 0, 0.5]  # The rewards still count in the group's mean.


@pytest.mark.parametrize("overlong", [False, True])
def test_filters_come_first_and_the_overlong_filter_last(overlong):
    groups = [group(0, 1, 1), group(1, 1, 0, reasons=("stop", "length"))]
    options = AlgorithmConfig(filters=["nonzero_variance"], overlong_filter=overlong)
    (kept,) = apply_filters(groups, options).groups
    assert kept.group_id == 1
    assert [bool(sample.num_trained) for sample in kept.samples] == [True, not overlong]
    assert len(apply_filters(groups, AlgorithmConfig(overlong_filter=overlong)).groups) == 2


def test_filters_that_leave_nothing_say_so():
    options = AlgorithmConfig(filters=["nonzero_variance"])
    with pytest.raises(
        UserError, match=r"\['nonzero_variance'\] removed all 2 groups of the step.*dynamic_sampling"
    ):
        apply_filters([group(0, 1, 1), group(1, 0, 0)], options)


def test_each_filter_gets_what_the_one_before_it_left_and_none_gets_an_empty_list(monkeypatch):
    """A user's filter may compute a mean over its groups, which fails on an empty list."""
    seen = []

    def first_two(groups):
        seen.append([one.group_id for one in groups])
        assert groups
        return groups[:2]

    monkeypatch.setitem(group_filter._known, "first_two", first_two)
    groups = [group(0, 1, 1), group(1, 1, 0), group(2, 0, 1), group(3, 0, 1)]
    assert [kept.group_id for kept in filtered(groups, ["nonzero_variance", "first_two"]).groups] == [1, 2]
    assert [kept.group_id for kept in filtered(groups, ["first_two", "nonzero_variance"]).groups] == [1]
    assert filtered(groups[:1], ["nonzero_variance", "first_two"]).groups == []
    assert seen == [[1, 2, 3], [0, 1, 2, 3]]


def test_each_filter_is_named_with_the_samples_that_it_removed(monkeypatch):
    def no_third_sample(groups):
        return [replace(one, samples=one.samples[:2]) for one in groups]

    monkeypatch.setitem(group_filter._known, "no_third_sample", no_third_sample)
    groups = [group(0, 1, 1), group(1, 1, 0, 0.5), group(2, 1, 1, 0)]
    found = filtered(groups, ["no_third_sample", "nonzero_variance", "no_third_sample"])
    assert [(name, ids.tolist()) for name, ids in found.removed] == [
        ("no_third_sample", [12, 22]),
        ("nonzero_variance", [0, 1, 20, 21]),
        ("no_third_sample", []),
    ]

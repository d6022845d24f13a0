"""Dynamic sampling: the batch is filled with groups that count, and the other groups and prompts are handled.

tests/integration has a real engine.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.filters import group_filter
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.load import read_config
from grpo_megatron.data.order import PromptSource
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.source import ABORTED, EngineRollouts
from grpo_megatron.samples.entries import SampleState
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of

SIZE = 40


class Engine(FakeEngines):
    """An engine that answers prompt u after its time with one token, the number of the sample in its
    group.
    """

    weight_version, size = 3, 2

    def __init__(self, seconds=lambda uid: 0.001, together=False):
        """Create the engine.

        together: True for all requests to end at once.
        """
        super().__init__()
        self.together, self.end_of_all = together, None
        self.seconds, self.running, self.most, self.asked = seconds, 0, 0, []

    async def _end_of_all(self):
        """Wait for a moment that is the same for all requests, so that they end in one round of the event
        loop.
        """
        if self.end_of_all is None:
            self.end_of_all = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.05, self.end_of_all.set_result, None)
        await self.end_of_all

    async def generate(self, request, listener=None):
        uid = request.prompt_ids[0]
        self.asked.append(uid)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await (self._end_of_all() if self.together else asyncio.sleep(self.seconds(uid)))
        finally:
            self.running -= 1
        spans = (WeightSpan(self.weight_version, 0, 1),)
        return Completion(
            request.key, np.array([request.key[1]], np.int32), np.zeros(1, np.float32), "stop", spans
        )


class Rewards:
    """Gives 1 for the first sample of a prompt whose number `differs` accepts, otherwise 0."""

    def __init__(self, differs):
        self.differs = differs

    async def score(self, prompt, sample):
        return sample.scored(
            float(self.differs(prompt.uid) and sample.arrays.response_ids.tolist() == [0]), {}
        )

    async def score_group(self, prompt, samples):
        return tuple(samples)


def source(shuffle=False) -> PromptSource:
    return PromptSource(
        [[Prompt(uid, np.array([uid], np.int32), "", "", {}) for uid in range(SIZE)]], seed=1, shuffle=shuffle
    )


def rollouts(engine, prompts, differs, *changes) -> EngineRollouts:
    given = [
        "model.path=m",
        "data.train=d",
        "data.train_batch_size=4",
        "rollout.n=2",
        "algorithm.preset=dapo",
        *changes,
    ]
    episodes = SingleTurn(Rewards(differs))
    found = EngineRollouts(manager_of(engine, episodes), read_config(None, given), prompts)
    _opened.append(found)
    return found


_opened: list[EngineRollouts] = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while _opened:
        _opened.pop().close()


def uids(rollout) -> list[int]:
    return [group.prompt.uid for group in rollout.groups]


def used(rollout) -> list[int]:
    """Return the uids of the prompts that the ledger will count as used up."""
    left_out = [left.rows for left in rollout.left_out if left.state != SampleState.lost]
    return uids(rollout) + [int(row["prompt"]) for rows in left_out for row in rows if row["member"] == 0]


def test_the_batch_is_full_of_groups_with_a_signal():
    engine, prompts = Engine(), source()
    sampled = rollouts(engine, prompts, lambda uid: uid % 3 == 0)
    first, second = (sampled.take(step) for step in (1, 2))
    assert uids(first) == [0, 3, 6, 9]
    assert (first.dropped, first.aborted) == (6, 0)
    assert sorted(used(first)) == list(range(10))
    assert uids(second) == [12, 15, 18, 21]
    assert engine.most <= 4 * 2  # never more groups than are missing
    ids = [group.group_id for group in (*first.groups, *second.groups)]
    assert len(set(ids)) == 8
    assert ids == sorted(ids)


@pytest.mark.parametrize(
    ("over_sampling", "seconds", "asked"),
    [
        # All count, and end one after the other: never a prompt more than the batch needs.
        (1.0, lambda uid: 0.02 * (uid + 1), 4),
        (1.0, lambda uid: 0.02 * (9 - uid), 4),
        # As long as four are missing, half as many more are in flight; after that too many already are.
        (1.5, lambda uid: 0.02 * (uid + 1), 6),
        (2.0, lambda uid: 0.02 * (uid + 1), 8),
        (1.26, lambda uid: 0.02 * (9 - uid), 6),  # five of them and a bit
    ],
)
def test_no_more_is_drawn_than_is_missing_minus_what_runs(over_sampling, seconds, asked):
    engine, prompts = Engine(seconds), source()
    change = f"rollout.dynamic_sampling.over_sampling={over_sampling}"
    rollouts(engine, prompts, lambda uid: True, change).take(1)
    assert sorted(set(engine.asked)) == list(range(asked))


def test_a_dropped_group_is_replaced_by_one_other():
    engine, prompts = Engine(lambda uid: 0.02 * (uid + 1)), source()
    found = rollouts(engine, prompts, lambda uid: uid not in (1, 2)).take(1)
    assert uids(found) == [0, 3, 4, 5]
    assert sorted(set(engine.asked)) == list(range(6))
    assert engine.most <= 4 * 2


@pytest.mark.parametrize("over_sampling", [1.25, 1.5, 2.0, 4.0])
def test_groups_that_end_together_with_the_last_of_the_batch_come_again(over_sampling):
    """They are neither lost nor used up, and the batch has the groups that were drawn first."""
    engine, prompts = Engine(together=True), source()
    change = f"rollout.dynamic_sampling.over_sampling={over_sampling}"
    sampled = rollouts(engine, prompts, lambda uid: True, change)
    surplus = int(4 * over_sampling) - 4
    first = sampled.take(1)
    assert uids(first) == used(first) == [0, 1, 2, 3]
    assert (first.dropped, first.aborted) == (0, surplus)
    again = [prompt.uid for prompt in prompts.next(surplus + 1)]
    assert sorted(again[:-1]) == list(range(4, 4 + surplus))
    assert again[-1] == 4 + surplus


@pytest.mark.parametrize(
    "seconds", [lambda uid: 0.02 * (9 - uid % 4), lambda uid: 0.01 * (uid * 7 % 5 + 1), lambda uid: 0.001]
)
def test_groups_come_in_the_order_in_which_their_prompts_were_drawn(seconds):
    """The order does not depend on which group ends first. Otherwise a run could not be repeated."""
    sampled = rollouts(Engine(seconds), source(), lambda uid: True)
    for step in (1, 2):
        found = sampled.take(step)
        assert uids(found) == [4 * step - 4, 4 * step - 3, 4 * step - 2, 4 * step - 1]
        assert [group.group_id for group in found.groups] == uids(found)


@pytest.mark.parametrize(
    ("takes", "unused", "then"),
    [
        ([6], [[1, 4]], [1, 4, 6, 7]),
        ([6, 1], [[1, 4], [1]], [1, 4, 6, 7]),  # 1 is returned twice, and still comes before 4
        ([6, 2], [[1, 4], [1, 4]], [1, 4, 6, 7]),
        ([6, 3], [[1, 4], [4, 6]], [4, 6, 7]),
        ([6, 1, 1], [[0, 2, 5], [0], [0]], [0, 2, 5, 6]),
        ([6, 2, 1], [[3, 4, 5], [3, 4], [3]], [3, 4, 5, 6]),
        ([6, 3], [[1, 4], []], [7, 8]),
    ],
)
def test_prompts_that_are_returned_keep_their_order(takes, unused, then):
    prompts = source()
    for count, back in zip(takes, unused, strict=True):
        taken = {prompt.uid: prompt for prompt in prompts.next(count)}
        prompts.take_back([taken.pop(uid) for uid in back])
        prompts.settle(list(taken.values()))
    state = prompts.state_dict()
    assert [prompt.uid for prompt in prompts.next(len(then))] == then
    again = source()
    again.load_state_dict(state)
    assert [prompt.uid for prompt in again.next(len(then))] == then


def test_dynamic_sampling_asks_with_the_reward_that_is_trained_on():
    """The overlong punishment makes a signal where all answers are right.

    The filter of the step sees the same.
    """

    class Lengths(Engine):
        async def generate(self, request, listener=None):
            found = await super().generate(request)
            length = 2 if request.prompt_ids[0] % 2 and request.key[1] else 1
            ids, logprobs = np.full(length, request.key[1], np.int32), np.zeros(length, np.float32)
            return Completion(found.key, ids, logprobs, "stop", (WeightSpan(self.weight_version, 0, length),))

    changes = ["reward.overlong_buffer.length=1", "rollout.max_response_length=2"]
    sampled = rollouts(Lengths(), source(), lambda uid: False, *changes)
    assert uids(sampled.take(1)) == [1, 3, 5, 7]


def test_what_is_in_flight_when_the_batch_is_full_is_aborted_and_comes_again():
    engine, prompts = Engine(lambda uid: 5.0 if uid in (1, 4) else 0.001), source()
    sampled = rollouts(engine, prompts, lambda uid: uid != 2, "rollout.dynamic_sampling.over_sampling=1.75")
    first = sampled.take(1)
    assert uids(first) == [0, 3, 5, 6]
    assert (first.dropped, first.aborted) == (1, 2)
    assert sorted(used(first)) == [0, 2, 3, 5, 6]
    assert engine.running == 0
    assert engine.ended == [("train", 1)] * 2  # each client
    state = prompts.state_dict()
    # The ledger gets every sample, those of the aborted groups without tokens.
    (lost,) = [left for left in first.left_out if left.state == SampleState.lost]
    assert lost.reason == ABORTED
    assert [(int(row["sample"]), int(row["prompt"]), int(row["tokens"])) for row in lost.rows] == [
        (2, 1, 0),
        (3, 1, 0),
        (8, 4, 0),
        (9, 4, 0),
    ]
    (dropped,) = [left for left in first.left_out if left.state == SampleState.filtered]
    assert (dropped.reason, dropped.rows["sample"].tolist()) == ("nonzero_variance", [4, 5])
    assert dropped.rows["tokens"].tolist() == [2, 2]
    engine.seconds = lambda uid: 0.001
    assert set(uids(sampled.take(2))) >= {1, 4}
    again = source()
    again.load_state_dict(state)
    assert [prompt.uid for prompt in again.next(4)] == [1, 4, 7, 8]


def test_over_many_steps_every_prompt_is_used_once_an_epoch():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0, 0.01, SIZE)
    engine, prompts = Engine(lambda uid: seconds[uid]), source(shuffle=True)
    sampled = rollouts(engine, prompts, lambda uid: uid % 4 != 0, "rollout.dynamic_sampling.over_sampling=2")
    uids_used, step = [], 0
    while prompts.epoch == 0:
        step += 1
        uids_used += used(sampled.take(step))
    # The last step may have begun the next epoch, and has given back what it did not use.
    first_epoch = source(shuffle=True).next(SIZE)
    counts = {prompt.uid: uids_used.count(prompt.uid) for prompt in first_epoch}
    returned = {index for _, index in prompts.state_dict()["returned"]}
    assert all(count >= 1 or uid in returned for uid, count in counts.items())
    assert sum(count > 1 for count in counts.values()) <= 8


def test_it_is_bounded():
    engine, prompts = Engine(), source()
    sampled = rollouts(engine, prompts, lambda uid: uid in (0, 1), "rollout.dynamic_sampling.max_batches=2.5")
    with pytest.raises(UserError, match=r"step 1: .* left only 2 of the 4 groups .* the 10 prompts"):
        sampled.take(1)
    assert len(engine.asked) == 10 * 2
    smaller = rollouts(
        Engine(),
        source(),
        lambda uid: uid in (0, 1),
        "rollout.dynamic_sampling.max_batches=2.5",
        "rollout.dynamic_sampling.shortage=smaller",
    )
    found = smaller.take(1)
    assert (uids(found), found.dropped, found.aborted) == ([0, 1], 8, 0)
    with pytest.raises(UserError, match="left only 0 of the 4 groups"):  # nothing can be trained on
        smaller.take(2)


def test_a_reward_that_fails_ends_it():
    engine = Engine()
    sampled = rollouts(engine, source(), lambda uid: {}[uid])
    with pytest.raises(KeyError):
        sampled.take(1)
    assert engine.running == 0
    assert engine.ended == [("train", 1)] * 2


def test_a_dropped_group_is_of_the_filter_that_left_nothing_of_it(monkeypatch):
    def without_the_first(groups):
        return [replace(group, samples=group.samples[1:]) for group in groups]

    monkeypatch.setitem(group_filter._known, "without_the_first", without_the_first)
    sampled = rollouts(
        Engine(),
        source(),
        lambda uid: True,
        "algorithm.filters=[without_the_first,nonzero_variance]",
        "rollout.dynamic_sampling.max_batches=1",
    )
    with pytest.raises(UserError, match="left only 0 of the 4 groups"):
        sampled.take(1)
    (group,) = sampled._manager.generate(source().next(1), sampled._config.rollout)
    assert sampled._refused_by(group) == "nonzero_variance"

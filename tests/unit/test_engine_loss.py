"""Groups whose engine dies while it samples them. tests/integration has real engines."""

import asyncio
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout import group_round
from grpo_megatron.rollout.episodes import MultiTurn, SingleTurn
from grpo_megatron.rollout.groups import Caller, EngineLost
from grpo_megatron.rollout.played_group import PlayedGroup
from grpo_megatron.sglang.kv_pressure import RequestLimit
from grpo_megatron.sglang.request import Completion, NewTokens
from tests.rollouts import manager_of
from tests.unit.test_rounds import ROLLOUT, Engines, Rewards, prompts
from tests.unit.toy_environments import encode


class Dying(Engines):
    """Two engines. One of them dies when it is asked for a prompt in `deadly`, and answers nothing then."""

    def __init__(self, deadly, dies=(1,)):
        super().__init__()
        self.deadly, self.dies, self.dead, self.asked = deadly, dies, set(), []

    def connections(self):
        return [One(self, index) for index in range(self.size)]


class One:
    """The connection and the client of one of the engines."""

    def __init__(self, engines, index):
        self._engines, self._index, self.limit = engines, index, RequestLimit(256)

    def client(self, round, limit=None):
        return self

    async def generate(self, request, listener=None):
        engines = self._engines
        engines.asked.append((self._index, request.prompt_ids[0]))
        await asyncio.sleep(0.01)
        if request.prompt_ids[0] in engines.deadly and self._index in engines.dies:
            engines.dead.add(self._index)
        if self._index in engines.dead:
            raise ProcessDied(f"engine {self._index} died in `generate`")
        return await engines.generate(request)

    async def end(self):
        if self._index in self._engines.dead:
            raise ProcessDied(f"engine {self._index} died in `end`")


def test_groups_of_an_engine_that_dies_go_on_with_another():
    engines = Dying(deadly={3})
    sampling = manager_of(engines, SingleTurn(Rewards()))
    groups = sampling.generate(prompts(*range(8)), ROLLOUT)
    assert [group.prompt.uid for group in groups] == list(range(8))
    assert [group.group_id for group in groups] == list(range(8))
    assert all(len(group.samples) == 2 for group in groups)
    # Their arrays are on the node of the engine that began them.
    assert [group.engine for group in groups] == [0, 1] * 4
    assert {uid for engine, uid in engines.asked if engine == 1} == {1, 3, 5, 7}
    assert {uid for engine, uid in engines.asked if engine == 0} == set(range(8)) - {1}
    assert engines.serving == {0: 0}
    again = sampling.generate(prompts(*range(4)), ROLLOUT)
    assert {group.engine for group in again} == {0}


def test_the_loss_of_all_engines_is_an_error():
    engines = Dying(deadly={3}, dies=(0, 1))
    with pytest.raises(EngineLost, match=r"engine \d died in `generate`"):
        manager_of(engines, SingleTurn(Rewards())).generate(prompts(*range(8)), ROLLOUT)
    assert not engines.admission._rounds


def test_a_round_that_cannot_wait_names_the_engine_that_died():
    engines = Dying(deadly={3}, dies=(0, 1))
    engines.lost = lambda index, *_: engines.serving.pop(index, None)  # they come back later
    with pytest.raises(EngineLost, match=r"engine \d died in `generate`"):
        manager_of(engines, SingleTurn(Rewards())).generate(prompts(*range(8)), ROLLOUT)


def test_groups_that_wait_for_room_name_the_engine_that_died():
    """Only the groups in the engine knew which one it was, and groups that waited failed before them."""
    engines = Dying(deadly={0}, dies=(0,))
    engines.size, engines.serving = 1, {0: 0}
    engines.lost = lambda index, *_: engines.serving.pop(index, None)

    async def errors():
        sampling = manager_of(engines, SingleTurn(Rewards()))
        async with sampling.round(Caller.train, RolloutConfig(n=2, max_concurrency=2)) as round:
            tasks = [round.start(prompt, prompt.uid) for prompt in prompts(*range(8))]
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert {str(error) for error in asyncio.run(errors())} == {"engine 0 died in `generate`"}


def test_a_group_that_kills_engines_is_not_sampled_for_ever():
    engines = Dying(deadly={3}, dies=(0, 1))
    engines.lost = lambda *_: engines.dead.clear()  # they come back at once
    with pytest.raises(EngineLost, match="died in `generate`"):
        manager_of(engines, SingleTurn(Rewards())).generate(prompts(3), ROLLOUT)
    assert len(engines.asked) == 3 * 2


class Counting(Dying):
    """Three engines. A response goes on with the numbers after its last token, up to 20.

    Each engine reports two tokens at a time. Those in `lengths` die when a response has that many new tokens.
    """

    size = 3

    def __init__(self, lengths):
        super().__init__(deadly=())
        self.lengths, self.sampled, self.parameters, self.version = lengths, [], [], 0

    def connections(self):
        return [CountingOne(self, index) for index in range(self.size)]


class CountingOne(One):
    async def generate(self, request, listener=None):
        engines, ids, dies = self._engines, [], self._engines.lengths.get(self._index)
        engines.parameters.append((self._index, list(request.prompt_ids), request.sampling["max_new_tokens"]))
        while len(ids) < request.sampling["max_new_tokens"] and request.prompt_ids[-1] + len(ids) < 20:
            if self._index in engines.dead or len(ids) == dies:
                engines.dead.add(self._index)
                raise ProcessDied(f"engine {self._index} died in `generate`")
            ids.append(request.prompt_ids[-1] + len(ids) + 1)
            engines.sampled.append(ids[-1])
            if len(ids) % 2 == 0:
                listener(NewTokens(ids[-2:], [-float(token) for token in ids[-2:]], 0))
            await asyncio.sleep(0)
        return Completion(
            request.key,
            np.array(ids, np.int32),
            -np.array(ids, np.float32),
            "stop",
            (WeightSpan(engines.version, 0, len(ids)),),
        )


@pytest.mark.parametrize("lengths", [{}, {0: 7}, {0: 1}, {0: 6, 1: 5}], ids=str)
def test_a_response_goes_on_after_the_tokens_that_were_reported(lengths):
    """Rule R10: a continuation depends on the tokens so far and on the limit that is left.

    Another stack gave the continuation the whole limit again.
    """
    engines = Counting(lengths)
    rollout = RolloutConfig(n=1, max_response_length=30)
    (group,) = manager_of(engines, SingleTurn(Rewards())).generate(prompts(1), rollout)
    (sample,) = group.samples
    expected = list(range(2, 21))
    assert sample.arrays.response_ids.tolist() == expected
    assert sample.arrays.rollout_logprobs.tolist() == [-float(token) for token in expected]
    assert sample.weight_spans == (WeightSpan(0, 0, len(expected)),)
    # Only tokens after the last report are sampled twice.
    assert len(engines.sampled) - len(expected) == sum(length % 2 for length in lengths.values())
    assert [len(ids) - 1 + limit for _, ids, limit in engines.parameters] == [30] * (len(lengths) + 1)
    assert [engine for engine, *_ in engines.parameters] == list(range(len(lengths) + 1))


def test_all_members_of_a_group_go_on():
    """The members of a group notice the loss at different times. None goes on with a lost engine."""
    engines = Counting({0: 3})
    rollout = RolloutConfig(n=4, max_response_length=30)
    groups = manager_of(engines, SingleTurn(Rewards())).generate(prompts(1, 5, 9), rollout)
    for group, start in zip(groups, (2, 6, 10), strict=True):
        assert [sample.arrays.response_ids.tolist() for sample in group.samples] == [
            list(range(start, 21))
        ] * 4
    assert engines.dead == {0}
    assert sum(engine == 0 for engine, *_ in engines.parameters) == 4


class World:
    """An environment of three turns. After the first turn of any episode, engine 0 is about to die."""

    def __init__(self, engines):
        self.engines, self.resets, self.steps = engines, 0, 0

    def episode(self, prompt):
        return Played(self)


class Played:
    def __init__(self, world):
        self._world, self._turns = world, 0

    async def reset(self, seed):
        self._world.resets += 1
        return ""

    async def step(self, ids):
        self._turns += 1
        self._world.steps += 1
        self._world.engines.lengths[0] = 7
        done = self._turns == 3
        return await self.text(ids), SimpleNamespace(observation="\x01", reward=1.0, done=done, components={})

    async def text(self, ids):
        return Letters.decode(ids)

    async def close(self):
        pass


class Letters:
    encode = staticmethod(encode)
    decode = staticmethod(lambda ids: "".join(map(chr, ids)))


def test_an_episode_goes_on_in_the_turn_in_which_its_engine_is_lost():
    """Its environment is neither reset nor asked twice."""
    engines = Counting({})
    world = World(engines)
    rollout = RolloutConfig(n=2, max_response_length=100)
    episodes = MultiTurn(world, Letters, rollout, RewardConfig(), 0)
    (group,) = manager_of(engines, episodes).generate(prompts(1), rollout)
    turn = list(range(2, 21))
    for sample in group.samples:
        assert sample.arrays.response_ids.tolist() == [*turn, 1, *turn, 1, *turn]
        assert sample.arrays.loss_mask.tolist() == ([True] * 19 + [False]) * 2 + [True] * 19
        assert sample.reward == 3.0
    assert (world.resets, world.steps) == (2, 6)
    assert engines.dead == {0}
    assert len(engines.sampled) > 2 * 3 * len(turn)


def test_an_episode_outlives_an_engine_that_is_lost_and_back_within_an_environments_step():
    """None of its requests failed, so that it has not moved. Its next turn is of newer weights."""
    engines, stepping, may_go_on = Counting({}), asyncio.Event(), asyncio.Event()
    world = World(engines)

    class Slow(Played):
        async def step(self, ids):
            stepping.set()
            await may_go_on.wait()
            answer = await super().step(ids)
            engines.lengths.clear()  # it has died already
            return answer

    world.episode = lambda prompt: Slow(world)

    async def main():
        rollout = RolloutConfig(n=1, max_response_length=100)
        sampling = manager_of(engines, MultiTurn(world, Letters, rollout, RewardConfig(), 0))
        async with sampling.round(Caller.train, rollout, outlives_engines=True) as round:
            task = round.start(*prompts(1), 0)
            await stepping.wait()
            engines.version = 1
            sampling._samplers[0].connect(0, engines.connections()[0])
            may_go_on.set()
            return await task

    (sample,) = asyncio.run(main()).samples
    assert [span.version for span in sample.weight_spans] == [0, 1, 1]


class Random(Dying):
    """Two engines that come back at once. Each token is the last one with probability 1/20.

    The engine dies with probability 1/60 at each token. Every `report_every` tokens are reported.
    """

    def __init__(self, report_every):
        super().__init__(deadly=())
        self.report_every, self.random = report_every, random.Random(5)
        self.lost = lambda *_: None

    def connections(self):
        return [RandomOne(self, index) for index in range(self.size)]


class RandomOne(One):
    async def generate(self, request, listener=None):
        engines, draw, ids = self._engines, self._engines.random.random, []
        while True:
            await asyncio.sleep(0)
            if draw() < 1 / 60:
                raise ProcessDied(f"engine {self._index} died in `generate`")
            ids.append(1)
            if draw() < 1 / 20:
                break
            if len(ids) % engines.report_every == 0:
                listener(NewTokens([1] * engines.report_every, [0.0] * engines.report_every, 0))
        spans = (WeightSpan(0, 0, len(ids)),)
        return Completion(request.key, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop", spans)


@pytest.mark.parametrize("report_every", [4, 1000])
def test_lengths_are_those_of_an_undisturbed_run(report_every, monkeypatch):
    """A third of the responses are interrupted. Those begun anew would be the longer ones.

    Lengths are geometric, with mean 20. The mean of 4,000 has a standard error of 0.31. It is smaller by the
    0.5 tokens that are sampled again, each of which could have been the last one before. A bias of 3 tokens
    is noticed with probability 0.99. In the second case, nothing is reported, and the bias is 5 tokens.
    """
    monkeypatch.setattr(group_round, "_MOST_LOSSES", 1000)
    rollout = RolloutConfig(n=1, max_response_length=10_000)
    groups = manager_of(Random(report_every), SingleTurn(Rewards())).generate(prompts(*range(4000)), rollout)
    mean = np.mean([sample.num_response for group in groups for sample in group.samples])
    assert (abs(mean - 20) < 0.5 + 4 * 0.31) == (report_every == 4), mean


async def played(condition):
    """Wait until a condition holds for the number of tasks that play a group."""
    deadline = time.monotonic() + 10
    while not condition(sum(task.get_coro().__name__ == "_play" for task in asyncio.all_tasks())):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("while_it_waits", [False, True])
def test_the_end_of_a_round_ends_groups_whose_engine_is_lost(while_it_waits):
    engines = Counting({0: 3, 1: 3, 2: 3})
    if while_it_waits:
        engines.lost = lambda index, *_: engines.serving.clear()
        engines.next_serving = asyncio.Event().wait
    rollout = RolloutConfig(n=2, max_response_length=30)

    async def main():
        opening = manager_of(engines, SingleTurn(Rewards())).round(
            Caller.train, rollout, outlives_engines=True
        )
        async with opening as round:
            task = round.start(*prompts(1), 0)
            await played(lambda number: number == 1)
            if while_it_waits:
                await asyncio.sleep(0.05)
                assert not task.done()
            else:
                with pytest.raises(EngineLost):
                    await task
        await played(lambda number: number == 0)

    asyncio.run(main())


@pytest.mark.parametrize("error", [None, ValueError("planted")])
def test_episodes_that_end_without_an_engine_are_noticed(error):
    """One member of a group waits for an engine, and its environment fails meanwhile, for example."""
    fails = asyncio.Event()

    async def play(group):
        waiting = asyncio.create_task(group.moved(group.moves, EngineLost("lost")))
        await fails.wait()
        waiting.cancel()
        if error:
            raise error
        return ("samples",)

    async def main():
        group = PlayedGroup(play)
        with pytest.raises(EngineLost):
            await group.run_on(0, print)
        fails.set()
        await asyncio.sleep(0.01)
        if error:
            with pytest.raises(ValueError, match="planted"):
                await group.run_on(1, print)
        else:
            assert await group.run_on(1, print) == ("samples",)
        await group.end()

    asyncio.run(main())

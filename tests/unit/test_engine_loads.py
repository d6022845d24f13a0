"""The choice of the engine for a group."""

import asyncio
import random
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.rollout import OnUpdate, RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.engine_loads import EngineLoads, GroupWork, WorkReport
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.sglang.admission import Closed
from grpo_megatron.sglang.kv_pressure import RequestLimit
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of
from tests.unit.test_rounds import Rewards, prompts

WORK = GroupWork(samples=4, tokens=400)


def test_it_is_the_one_with_the_fewest_tokens_among_those_with_room():
    """Groups begin, report and end, and engines go and come.

    Each choice is compared with a look at all groups of all engines.
    """
    rng, loads, groups, limits = random.Random(3), EngineLoads(16), {}, {}
    engines = dict.fromkeys(range(12), 0)
    choices = set()

    def expected():
        work = dict.fromkeys(engines, (0, 0))
        for engine, left in groups.values():
            if engine in work:
                samples, tokens = work[engine]
                work[engine] = samples + left.samples, tokens + left.tokens
        limit = {index: limits.get(index, 16) for index in engines}
        with_room = [index for index in engines if work[index][0] < limit[index] + max(1, limit[index] // 8)]
        return min(with_room, key=lambda index: (work[index][1], index), default=None)

    for key in range(8000):
        what = rng.random()
        if what < 0.45 or not groups:
            chosen = loads.best(engines)
            assert chosen == expected()
            choices.add(chosen)
            if chosen is not None:
                groups[key] = chosen, WORK
                loads.start(chosen, key, WORK)
        elif what < 0.75:
            reported = rng.choice(list(groups))
            engine, left = groups[reported]
            if left.samples > 1:
                work = GroupWork(left.samples - 1, left.tokens - 100)
                groups[reported], limits[engine] = (engine, work), rng.randint(8, 16)
                loads.report(reported, WorkReport(work, limits[engine]))
        elif what < 0.98:
            ended = rng.choice(list(groups))
            del groups[ended]
            loads.end(ended)
        elif what < 0.99 and len(engines) > 1:
            gone = rng.choice(list(engines))
            engines = {index: 0 for index in engines if index != gone}
        else:
            engines = dict(sorted((engines | {rng.randrange(12): 0}).items()))
    assert {None, *range(12)} == choices
    assert len(loads._heap) < 200


def test_an_engine_that_leaves_the_same_mapping_is_not_chosen():
    loads, engines = EngineLoads(4), {0: 0, 1: 0}
    assert loads.best(engines) == 0
    del engines[0]
    assert loads.best(engines) == 1


def test_a_group_that_has_begun_gets_an_engine_without_room():
    loads, engines = EngineLoads(4), {0: 0, 1: 0}
    for key, engine in enumerate((0, 0, 0, 1, 1)):
        loads.start(engine, key, WORK)
    assert loads.best(engines) is None
    assert loads.least(engines) == 1


def test_a_report_that_comes_too_late_changes_nothing():
    loads = EngineLoads(4)
    loads.start(0, 0, WORK)
    loads.end(0)
    loads.report(0, WorkReport(GroupWork(3, 300), 1))
    assert loads.best({0: 0}) == 0


def test_a_report_without_a_limit_leaves_the_limit():
    loads = EngineLoads(4, limits={})
    for key in range(2):
        loads.start(0, key, WORK)
    loads.report(0, WorkReport(WORK, 16))
    loads.report(1, WorkReport(WORK, 0))
    assert loads.best({0: 0}) == 0
    loads.report(1, WorkReport(WORK, 4))
    assert loads.best({0: 0}) is None


class Paced(FakeEngines):
    """Two engines, of which the second takes ten times as long as the first for each response.

    served: [(engine, number of the prompt)] of all requests, in the order in which they were sent
    most: largest number of requests that each engine had at a time
    """

    size = 2

    def __init__(self, limit):
        super().__init__()
        self.served, self._running, self.most, self._limit = [], [0, 0], [0, 0], limit

    def connections(self):
        return [SimpleNamespace(client=partial(self._client, index)) for index in range(self.size)]

    def _client(self, index, round, limit):
        async def generate(request, listener=None):
            self.served.append((index, request.prompt_ids[0]))
            self._running[index] += 1
            self.most[index] = max(self.most[index], self._running[index])
            await asyncio.sleep((0.005, 0.05)[index])
            self._running[index] -= 1
            ids = np.array(request.prompt_ids, np.int32)
            return Completion(request.key, ids, np.zeros(1, np.float32), "stop", (WeightSpan(0, 0, 1),))

        async def end():
            self.ended.append(round)

        return SimpleNamespace(generate=generate, end=end, limit=RequestLimit(self._limit))


def test_groups_wait_in_their_order_and_a_slow_engine_gets_fewer():
    """All groups used to be handed out at the beginning of a round, half of them to the slow engine."""
    engines = Paced(4)
    manager = manager_of(engines, SingleTurn(Rewards()))
    rollout = RolloutConfig(n=2, max_response_length=1, max_concurrency=4)
    groups = manager.generate(prompts(*range(1, 61)), rollout)
    assert [group.prompt.uid for group in groups] == list(range(1, 61))
    # One sample more than the limit is assigned, and a group of two may begin with the last one.
    assert max(engines.most) <= 6
    numbers = [number for _, number in engines.served]
    assert numbers == sorted(numbers)
    of_slow = sum(engine for engine, _ in engines.served) / len(engines.served)
    assert 0.02 < of_slow < 0.3


def test_a_group_larger_than_the_limit_is_sampled():
    engines = Paced(1)
    manager = manager_of(engines, SingleTurn(Rewards()))
    (group,) = manager.generate(prompts(1), RolloutConfig(n=8, max_response_length=1, max_concurrency=1))
    assert len(group.samples) == 8


def test_a_round_ends_while_groups_wait_for_room():
    engines = Paced(2)
    manager = manager_of(engines, SingleTurn(Rewards()))
    rollout = RolloutConfig(n=2, max_response_length=1, max_concurrency=2)

    async def main():
        async with manager.round(Caller.train, rollout) as round:
            tasks = list(map(round.start, prompts(*range(20)), manager.take_ids(20)))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks

    tasks = asyncio.run(main())
    assert sum(task.cancelled() for task in tasks) > 10
    assert len(manager.generate(prompts(1, 2), rollout)) == 2


def test_a_group_that_waits_ends_with_the_round():
    """Its cancellation comes together with the room of the failed group.

    asyncio.wait_for swallowed it, so that the error was raised only when this group was finished.
    """

    class Failing(Paced):
        size = 1

        def _client(self, index, round, limit):
            client = super()._client(index, round, limit)

            async def generate(request, listener=None):
                self.served.append(request.prompt_ids[0])
                await asyncio.sleep(0.01)
                if request.prompt_ids[0] == 0:
                    raise UserError("planted")
                await asyncio.sleep(20.0)

            client.generate = generate
            return client

    engines = Failing(1)
    manager = manager_of(engines, SingleTurn(Rewards()))
    begun = time.monotonic()
    with pytest.raises(UserError, match="planted"):
        manager.generate(prompts(*range(6)), RolloutConfig(n=1, max_response_length=1, max_concurrency=1))
    assert time.monotonic() - begun < 10.0


def test_no_group_is_assigned_during_a_weight_update():
    """Its version would be the old one, and its engine may have the new weights already."""
    engines = Paced(4)
    manager = manager_of(engines, SingleTurn(Rewards()))
    rollout = RolloutConfig(n=2, max_response_length=1, on_update=OnUpdate.keep)

    async def main():
        async with manager.round(Caller.train, rollout, over_updates=True) as round:
            engines.admission.close(Closed.updating, "begin an update")
            tasks = list(map(round.start, prompts(1, 2), manager.take_ids(2)))
            await asyncio.sleep(0.1)
            assert not engines.served
            engines.admission.open(Closed.updating, Closed.unsynced)
            return await asyncio.gather(*tasks)

    assert len(asyncio.run(main())) == 2

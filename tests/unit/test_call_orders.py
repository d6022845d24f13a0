"""All orders of public calls, in pairs and triples, against engines that answer at once.

tests/integration/test_call_orders.py has a real engine.
"""

import asyncio
import itertools
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.rounds import RoundTasks
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.sglang.admission import Admission, Closed
from grpo_megatron.sglang.pool import EnginePool
from grpo_megatron.sglang.request import Completion, Request
from tests.call_orders import CONCURRENCY, FAILS, Operations, all_orders
from tests.rollouts import manager_of


class Remote:
    """An actor in this process, whose calls may run in another order than they were made."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        async def late(*arguments):
            await asyncio.sleep(random.random() / 1000)
            return await getattr(self._actor, name)(*arguments)

        return SimpleNamespace(remote=lambda *arguments: asyncio.ensure_future(late(*arguments)))


class Engine:
    """The rounds of a real engine. A response depends on its prompt only, and has a token in 1 ms."""

    def __init__(self):
        self.rounds, self.version, self.requests = RoundTasks(), 0, 0
        self.is_paused, self.is_updating = False, False

    async def submit(self, round, requests):
        self.rounds.start(round, self._generate, requests)

    async def poll(self, round, seconds):
        return await self.rounds.poll(round, seconds)

    async def end(self, round):
        await self.rounds.end(round)

    async def _generate(self, request):
        while self.is_updating:
            await asyncio.sleep(0.001)
        assert not self.is_paused
        self.requests += 1
        length = request.sampling["max_new_tokens"]
        try:
            for _ in range(length):
                await asyncio.sleep(1e-3)
                while self.is_updating:
                    await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            await asyncio.sleep(0.001)  # SGLang ends a request in its next step
            raise
        finally:
            self.requests -= 1
        ids = np.arange(length, dtype=np.int32) + request.prompt_ids[0]
        spans = (WeightSpan(self.version, 0, length),)
        return Completion(request.key, ids, np.zeros(length, np.float32), "length", spans)

    def begin_update(self, keep_cache):
        self.is_updating = True

    def end_update(self, version, keep_cache):
        self.is_updating, self.version = False, version

    def release_memory(self):
        assert not self.requests
        self.is_paused = True

    def resume_memory(self, part):
        self.is_paused = False


class Pool(EnginePool):
    """A pool of engines in this process."""

    def __init__(self, size):
        self.engines = [Engine() for _ in range(size)]
        self._engines = [Remote(engine) for engine in self.engines]
        self._processes = [Process(f"engine {index}", "") for index in range(size)]
        self._config, self._starting = RolloutConfig(max_concurrency=CONCURRENCY), threading.Lock()
        self.membership, self._updating, self._updated_actors, self._announced = self._all_serve(), {}, {}, {}
        self.admission, self._released, self.weight_version, self.end_ids = Admission(), set(), 0, frozenset()
        self.admission.open(Closed.unsynced)

    def _call(self, engines, method, *arguments):
        self._on_all(method, *arguments)
        return engines

    def _on_all(self, method, *arguments):
        return {i: getattr(engine, method)(*arguments) for i, engine in enumerate(self.engines)}


class Rewards:
    async def score(self, prompt, sample):
        await asyncio.sleep(0)
        if prompt.answer == FAILS:
            raise UserError("planted")
        return sample.scored(0.0, {})

    async def score_group(self, prompt, samples):
        return tuple(samples)


@pytest.fixture
def operations():
    pool = Pool(1)

    def sync():
        pool.begin_update()
        pool.end_update(pool.weight_version + 1)

    async def late(round):
        (engine,) = pool.engines
        await engine.end(round)
        await engine.end(round)
        await engine.submit(round, [Request((0, 0), [0], {"max_new_tokens": 1})])
        return [await engine.poll(round, 0.01)]

    prompts = [Prompt(uid, np.array([100 * uid], np.int32), "", "") for uid in range(4)]
    prompts.append(Prompt(4, np.array([400], np.int32), "", FAILS))
    manager = manager_of(pool, SingleTurn(Rewards()))
    return Operations(
        manager,
        pool,
        prompts,
        sync,
        lambda round: asyncio.run(late(round)),
        lambda: sum(engine.requests for engine in pool.engines),
    )


def test_every_order_occurs_once():
    for length in (1, 2, 3):
        sequence = all_orders("abcd", length)
        orders = [tuple(sequence[i : i + length]) for i in range(len(sequence) - length + 1)]
        assert sorted(orders) == sorted(itertools.product("abcd", repeat=length))


def test_no_order_of_two_calls_does_harm(operations):
    operations.run_all_orders(2)


@pytest.mark.slow
def test_no_order_of_three_calls_does_harm(operations):
    operations.run_all_orders(3)

"""Rounds: what a caller's round may see of other rounds, and what is left of it when it has ended."""

import asyncio
import logging
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.concurrency import all_ended, together
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.rounds import RoundId, RoundTasks
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout import group_round
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import Caller
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.sglang.client import EngineConnection
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of

ONE, TWO = RoundId("train", 1), RoundId("train", 2)
OTHER = RoundId("evaluate", 1)


# -- in an actor


class Work:
    """Tasks for RoundTasks. Each returns its item after some time, or raises it if it is an error."""

    def __init__(self, seconds=0.005):
        self.seconds, self.begun, self.cancelled = seconds, [], []

    async def __call__(self, item):
        self.begun.append(item)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            self.cancelled.append(item)
            raise
        if isinstance(item, Exception):
            raise item
        return item


def test_rounds_at_the_same_time_get_their_own_answers():
    async def main():
        tasks, work = RoundTasks(), Work()
        tasks.start(ONE, work, [1, 2])
        tasks.start(OTHER, work, [3])
        assert tasks.running
        assert await tasks.poll(OTHER, 1.0, linger=0.02) == [3]
        assert await tasks.poll(ONE, 1.0) == [1, 2]
        assert await tasks.poll(ONE, 0.01) == []
        assert not tasks.running

    asyncio.run(main())


def test_the_end_of_a_round_waits_for_its_tasks_and_leaves_others_alone():
    async def main():
        tasks, slow = RoundTasks(), Work(60)
        tasks.start(ONE, slow, [1, 2])
        tasks.start(OTHER, Work(), [3])
        await asyncio.sleep(0.001)
        first = asyncio.create_task(tasks.end(ONE))
        await asyncio.sleep(0)
        await tasks.end(ONE)
        assert sorted(slow.cancelled) == [1, 2]
        await first
        assert await tasks.poll(OTHER, 1.0) == [3]
        await tasks.end(ONE)

    asyncio.run(main())


def test_calls_that_come_after_the_end_of_their_round_are_ignored():
    async def main():
        tasks, work = RoundTasks(), Work()
        await tasks.end(ONE)  # before any other call of the round
        assert not tasks.is_open(ONE)
        tasks.start(ONE, work, [1])
        assert await tasks.poll(ONE, 60.0) is None
        tasks.start(TWO, work, [2])
        tasks.start(ONE, work, [1])
        await tasks.end(ONE)
        assert await tasks.poll(TWO, 1.0) == [2]
        assert work.begun == [2]

    asyncio.run(main())


def test_answers_that_nobody_has_polled_are_dropped():
    async def main():
        tasks, work = RoundTasks(), Work()
        tasks.start(ONE, work, [1])
        await asyncio.sleep(0.02)
        await tasks.end(ONE)
        assert await tasks.poll(ONE, 60.0) is None
        tasks.start(TWO, work, [2])
        assert await tasks.poll(TWO, 1.0) == [2]

    asyncio.run(main())


def test_a_newer_round_ends_one_that_its_caller_did_not_end():
    async def main():
        tasks, slow = RoundTasks(), Work(60)
        tasks.start(ONE, slow, [1])
        await asyncio.sleep(0.001)
        tasks.start(TWO, Work(), [2])
        assert tasks.running  # as long as the cancelled task needs
        assert await tasks.poll(TWO, 1.0) == [2]
        await tasks.end(TWO)
        assert (slow.cancelled, tasks.running) == ([1], False)

    asyncio.run(main())


def test_an_error_is_raised_in_its_round():
    async def main():
        tasks, slow = RoundTasks(), Work(60)
        tasks.start(ONE, Work(), [ValueError("planted")])
        tasks.start(OTHER, Work(), [3])
        with pytest.raises(ValueError, match="planted"):
            await tasks.poll(ONE, 1.0)
        assert await tasks.poll(OTHER, 1.0) == [3]
        tasks.start(ONE, slow, [4])
        tasks.start(OTHER, slow, [5])
        await asyncio.sleep(0.001)
        await tasks.end_all()
        assert sorted(slow.cancelled) == [4, 5]
        assert [tasks.is_open(round) for round in (ONE, OTHER)] == [False, False]

    asyncio.run(main())


# -- in the driver


def test_what_runs_together_has_ended_together():
    ended = []

    async def run(name, seconds):
        try:
            await asyncio.sleep(seconds)
            if name == "failing":
                raise ValueError("planted")
            return name
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def failing():
        await together(run(name, seconds) for name, seconds in (("slow", 60), ("failing", 0.001)))

    assert asyncio.run(together([run("b", 0.002), run("a", 0.001)])) == ["b", "a"]
    ended.clear()
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(failing())
    assert sorted(ended) == ["failing", "slow"]
    ended.clear()
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(all_ended([run("failing", 0), run("slow", 0.01)]))
    assert ended == ["failing", "slow"]


def test_two_workers_with_requests_of_one_round_at_one_engine_get_their_own_answers(monkeypatch):
    """A group whose engine is lost stays with its worker, and goes on with an engine of another worker.

    Both workers used to poll for the same answers, so that each answer reached one of them, often the wrong
    one, and the other one waited for ever.
    """

    async def answer(request):
        await asyncio.sleep(0.01)
        return SimpleNamespace(key=request.key, load=None)

    tasks = RoundTasks()
    engine = SimpleNamespace(
        submit=SimpleNamespace(remote=lambda round, requests: tasks.start(round, answer, requests)),
        poll=SimpleNamespace(remote=tasks.poll),
    )
    connection = EngineConnection(engine, Process("engine 0", ""), ROLLOUT)

    async def main():
        clients = []
        for worker in (1, 2):
            monkeypatch.setattr(os, "getpid", lambda worker=worker: worker)
            clients.append(connection.client(ONE))
        asked = [clients[number % 2].generate(SimpleNamespace(key=(number, 0))) for number in range(40)]
        answers = await asyncio.wait_for(asyncio.gather(*asked), 20)
        assert [answer.key[0] for answer in answers] == list(range(40))

    asyncio.run(main())


class Engines(FakeEngines):
    """Answer a request with the token of its prompt, after a time that the prompt's number decides.

    seconds: {number of a prompt: seconds}. An exception in place of the seconds is raised.
    """

    size = 2

    def __init__(self, seconds=()):
        super().__init__()
        self.seconds, self.running = dict(seconds), 0

    async def generate(self, request, listener=None):
        seconds = self.seconds.get(request.prompt_ids[0], 0.0)
        self.running += 1
        try:
            await asyncio.sleep(0.001)
            if isinstance(seconds, BaseException):
                raise seconds
            await asyncio.sleep(seconds)
        finally:
            self.running -= 1
        spans = (WeightSpan(0, 0, 1),)
        ids = np.array(request.prompt_ids, np.int32)
        return Completion(request.key, ids, np.zeros(1, np.float32), "stop", spans)


class Rewards:
    async def score(self, prompt, sample):
        return sample.scored(0.0, {})

    async def score_group(self, prompt, samples):
        return tuple(samples)


def prompts(*numbers):
    return [Prompt(number, np.array([number], np.int32), "", "") for number in numbers]


ROLLOUT = RolloutConfig(n=2, max_response_length=1)


def check_usable(manager, engines):
    """Check that nothing runs, that every round ended on each engine, and that the next one works."""
    assert engines.running == 0
    engines.seconds, engines.ended = {}, []
    groups = manager.generate(prompts(1, 2, 3), ROLLOUT)
    assert [sample.arrays.response_ids.tolist() for group in groups for sample in group.samples] == [
        [number] for number in (1, 1, 2, 2, 3, 3)
    ]
    assert len(engines.ended) == len(set(engines.ended)) * engines.size == engines.size


@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt(), UserError("planted")])
def test_a_round_that_fails_leaves_nothing_running(error):
    """The first error is raised. The requests of other groups, and of the same group, end with it."""
    engines = Engines({0: 60.0, 1: 60.0, 2: error})
    manager = manager_of(engines, SingleTurn(Rewards()))
    with pytest.raises(type(error)):
        manager.generate(prompts(0, 1, 2), ROLLOUT)
    assert engines.ended == [(Caller.train, 1)] * 2
    check_usable(manager, engines)


def test_ctrl_c_ends_a_round():
    engines = Engines({0: 60.0, 1: 60.0})
    manager = manager_of(engines, SingleTurn(Rewards()))
    timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        manager.generate(prompts(0, 1), ROLLOUT)
    assert engines.ended == [(Caller.train, 1)] * 2
    check_usable(manager, engines)


def test_ctrl_c_at_the_end_of_a_round_does_not_skip_the_end():
    class Interrupted(Engines):
        size = 1

        def client(self, round, limit=None):
            client = super().client(round)
            end = client.end

            async def interrupted():
                await end()
                if self.ended == [(Caller.train, 1)]:
                    signal.raise_signal(signal.SIGINT)
                    await asyncio.sleep(60)

            client.end = interrupted
            return client

    engines = Interrupted()
    manager = manager_of(engines, SingleTurn(Rewards()))
    ends = []
    (sampler,) = manager._samplers
    original = sampler.end
    sampler.end = lambda round: ends.append(round) or original(round)
    with pytest.raises(KeyboardInterrupt):
        manager.generate(prompts(0), ROLLOUT)
    assert ends == [(Caller.train, 1)] * 2
    check_usable(manager, engines)


def test_a_round_that_fails_ends_soon_and_with_its_own_error(monkeypatch, caplog):
    """An engine that does not answer, or answers with an error, may be why the round failed."""

    class Stubborn(Engines):
        def client(self, round, limit=None):
            client = super().client(round)
            client.end = self.end
            return client

        async def end(self):
            if self.is_silent:
                await asyncio.sleep(60)
            raise RuntimeError("cannot end")

    monkeypatch.setattr(group_round, "_END_SECONDS", 0.05)
    engines = Stubborn({1: UserError("planted")})
    engines.is_silent = True
    manager = manager_of(engines, SingleTurn(Rewards()))
    with pytest.raises(UserError, match="planted"):
        manager.generate(prompts(0, 1), ROLLOUT)
    engines.is_silent = False
    caplog.set_level(logging.DEBUG, "grpo_megatron")
    with pytest.raises(UserError, match="planted"):
        manager.generate(prompts(0, 1), ROLLOUT)
    assert "cannot end" in caplog.text
    with pytest.raises(RuntimeError, match="cannot end"):
        manager.generate(prompts(0), ROLLOUT)


def test_a_round_that_cannot_begin_everywhere_ends_everywhere():
    class Unable:
        ended = 0

        async def begin(self, round):
            raise UserError("planted")

        async def end(self, round):
            self.ended += 1

    engines, unable = Engines(), Unable()
    able = manager_of(engines, SingleTurn(Rewards()))
    manager = RolloutManager(engines, [*able._samplers, unable])
    with pytest.raises(UserError, match="planted"):
        manager.generate(prompts(0), ROLLOUT)
    assert (able._samplers[0]._rounds, unable.ended) == ({}, 1)
    check_usable(able, engines)


def test_training_and_evaluation_number_their_groups_apart():
    engines = Engines(dict.fromkeys(range(10), 0.02))
    manager = manager_of(engines, SingleTurn(Rewards()))
    evaluated = []
    evaluation = threading.Thread(
        target=lambda: evaluated.extend(manager.generate(prompts(5, 6, 7), ROLLOUT, Caller.evaluate))
    )
    evaluation.start()
    trained = manager.generate(prompts(1, 2, 3), ROLLOUT)
    evaluation.join()
    assert sorted(group.group_id for group in (*trained, *evaluated)) == list(range(6))
    assert manager.state_dict() == {"next_group": 6}
    assert [group.prompt.uid for group in evaluated] == [5, 6, 7]

"""Rounds of a rollout worker's real process, whose groups are made without engines."""

import asyncio
import logging
import threading
import time

import numpy as np
import pytest
import ray

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.processes import Process
from grpo_megatron.cluster.rounds import RoundId
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.groups import Caller, Round
from grpo_megatron.rollout.manager import RolloutManager
from grpo_megatron.rollout.worker import RolloutWorker
from tests.rollouts import FakeEngines


class Sampler:
    """Makes groups of one sample, whose response is the prompt and the number of rounds in progress.

    The text of a prompt says what becomes of it: `slow` takes a minute, and `bad` gives a warning and fails.
    """

    def __init__(self):
        self._rounds, self._running = set(), 0

    async def begin(self, round):
        self._rounds.add(round.id)

    async def end(self, round):
        assert self._running == 0 or len(self._rounds) > 1
        self._rounds.discard(round)

    async def sample(self, round, request, listener):
        prompt = request.prompt
        self._running += 1
        try:
            await asyncio.sleep(60 if prompt.text == "slow" else 0.2)
        finally:
            self._running -= 1
        if prompt.text == "bad":
            logging.getLogger("grpo_megatron.test").warning("something is odd")
            raise UserError("planted")
        ids = np.array([prompt.uid, len(self._rounds)], np.int32)
        ones = np.ones(2, bool), np.zeros(2, np.float32)
        return (Sample.of(request.group_id, request.group_id, prompt.ids, ids, *ones, "stop", reward=0.0),)

    def close(self):
        pass


def build():
    return Sampler()


@pytest.fixture(scope="module")
def worker(ray_here, tmp_path_factory):
    logs = str(tmp_path_factory.mktemp("logs"))
    place = Place(Process("worker", f"{logs}/worker.log"), ray.get_runtime_context().get_node_id())
    worker = RolloutWorker(place, build, HangDetector(logs, 600))
    ray.get(worker.started)
    yield worker
    worker.close()
    worker.close()


@pytest.fixture(scope="module")  # as in a run, whose rounds have numbers of their own
def manager(worker):
    return RolloutManager(FakeEngines(), [worker])


def prompts(*texts, first=0):
    return [Prompt(uid, np.array([1], np.int32), text, "") for uid, text in enumerate(texts, first)]


def generated(manager, asked, caller=Caller.train):
    groups = manager.generate(asked, RolloutConfig(n=1), caller)
    return [group.samples[0].arrays.response_ids.tolist() for group in groups]


def test_warnings_of_a_group_that_fails_are_shown(manager, caplog):
    started = time.monotonic()
    with pytest.raises(UserError, match="planted"):
        generated(manager, prompts("slow", "bad", "slow"))
    assert [record.getMessage() for record in caplog.records].count("something is odd") == 1
    assert generated(manager, prompts("", "")) == [[0, 1], [1, 1]]
    assert time.monotonic() - started < 30


def test_two_callers_get_their_own_groups(manager):
    found = []
    evaluation = threading.Thread(
        target=lambda: found.extend(generated(manager, prompts("", "", first=7), Caller.evaluate))
    )
    evaluation.start()
    assert [uid for uid, _ in generated(manager, prompts("", "", ""))] == [0, 1, 2]
    evaluation.join()
    assert [uid for uid, _ in found] == [7, 8]
    assert generated(manager, prompts("")) == [[0, 1]]  # no other round is in progress any more


def test_a_round_that_begins_after_its_end_does_not_begin(worker, manager):
    """Ray may run the calls in this order after Ctrl-C."""
    round = RoundId("interrupted", 1)
    ray.get(worker._actor.end.remote(round))
    ray.get(worker._actor.begin.remote(Round(round, RolloutConfig(), frozenset())))
    assert ray.get(worker._actor.poll.remote(round, 60.0), timeout=30) is None
    assert generated(manager, prompts("")) == [[0, 1]]

"""The object that runs environments in a worker process: the order of its calls, and their time limits."""

import asyncio

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout.environment_host import EnvironmentHost
from grpo_megatron.rollout.environments import EnvironmentFailed, StepResult
from tests.unit.toy_environments import decode, encode

DONE = []  # what the episodes have done, in order


class Steps:
    """Records what its episodes do, and when."""

    def __init__(self, prompt):
        self.uid = prompt.uid

    def reset(self, seed):
        return None

    async def step(self, response):
        DONE.append(f"{self.uid} begins")
        if response == "spin":
            await asyncio.sleep(0)
            while True:
                pass
        await asyncio.sleep(0.3 if response == "slow" else 60 if response == "stuck" else 0)
        DONE.append(f"{self.uid} ends")
        return StepResult("fine")

    async def close(self):
        DONE.append(f"{self.uid} closes")


@pytest.fixture
def steps():
    DONE.clear()
    rollout = RolloutConfig(environment="tests.unit.test_environment_host:Steps")
    playing = EnvironmentHost(rollout, RewardConfig(timeout=1.0), decode)
    for uid in (0, 1, 2):
        playing.work([("reset", uid, (Prompt(uid, np.array([1]), "", ""), 0))], 1.0)
    return playing


def ask(uid, text):
    return "step", uid, (encode(text),)


def test_calls_of_an_episode_keep_their_order(steps):
    steps.work([ask(0, "slow"), ("close", 0, ()), ask(1, "fast")], 1.0)
    assert DONE == ["0 begins", "1 begins", "1 ends", "0 ends", "0 closes"]


@pytest.mark.parametrize("how", ["stuck", "spin"])
def test_a_step_that_takes_too_long_is_interrupted_whether_it_awaits_or_not(steps, how):
    quick, late, other = steps.work([ask(0, "fast"), ask(1, how), ask(2, "fast")], 1.0)
    assert isinstance(late, EnvironmentFailed)
    assert "step('" + how + "') on record 1 took longer than reward.timeout=1.0 s" in str(late)
    assert quick[1].observation == other[1].observation == "fine"
    assert steps.work([ask(1, "fast")], 1.0)[0][1].observation == "fine"


def test_a_step_of_an_episode_goes_on_while_another_is_stuck(steps):
    found = steps.work([ask(1, "stuck"), ask(0, "slow")], 1.0)
    assert isinstance(found[0], EnvironmentFailed)
    assert found[1][1].observation == "fine"


def test_no_call_begins_late(steps):
    started = [ask(0, "fast"), ask(1, "fast")]
    assert len(steps.work(started, -1.0)) == 1
    assert len(steps.work(started, 10.0)) == 2

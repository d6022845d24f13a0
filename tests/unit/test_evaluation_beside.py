"""Evaluations beside training: their weights, their engines, and how they end."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.config.load import read_config
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.evaluation_beside import EvaluationBeside
from grpo_megatron.rollout.groups import GroupSampler, StaleWeights
from grpo_megatron.sglang.held import HeldEngines
from grpo_megatron.sglang.members import Membership
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines
from tests.tools import wait_until


class Pool(FakeEngines):
    """Engines, each with weights of its own version. The responses wait until `may_answer` is set."""

    def __init__(self, size=2):
        self.size = size
        super().__init__()
        names = [f"engine {index}" for index in range(size)]
        self.membership = Membership(names, lambda index: None, patience=10)
        self.may_answer, self.asked, self.dies = threading.Event(), [], False
        self.versions = dict.fromkeys(range(size), 0)
        self.lost = self.membership.lose

    serving = property(lambda self: self.membership.serving, lambda self, _: None)

    def connections(self):
        return {index: _Connection(self, index) for index in range(self.size)}

    def publish(self):
        self.weight_version += 1
        engines = self.membership.in_updates
        self.versions |= dict.fromkeys(engines, self.weight_version)
        self.membership.updated(engines)


class _Connection:
    def __init__(self, pool, index):
        self._pool, self._index = pool, index

    def client(self, round):
        return self

    async def generate(self, request, listener=None):
        self._pool.asked.append(self._index)
        while not self._pool.may_answer.is_set():
            await asyncio.sleep(0.01)
        if self._pool.dies:
            raise ProcessDied("planted")
        spans = (WeightSpan(self._pool.versions[self._index], 0, 1),)
        return Completion(request.key, np.array([7], np.int32), np.zeros(1, np.float32), "stop", spans)

    async def end(self):
        pass


class Rewards:
    async def score(self, prompt, sample):
        return sample.scored(0.5, {})

    async def score_group(self, prompt, samples):
        return tuple(samples)


@pytest.fixture
def beside(tmp_path):
    made = []

    def make(pool):
        changes = ["eval.n=2", "eval.save_samples=false", "eval.beside=true", "monitor.samples_every=0"]
        config = read_config(None, ["model.path=m", "data.train=d", *changes])
        prompts = [Prompt(uid, np.array([uid], np.int32), "", "", {}) for uid in range(3)]
        evaluation = Evaluation(None, {"easy": prompts}, config, str(tmp_path), None)
        samplers = [GroupSampler(pool.connections(), SingleTurn(Rewards()), frozenset())] * pool.size
        scores = []
        monitor = SimpleNamespace(evaluated=lambda *given: scores.append(given))
        held = HeldEngines(pool, most=1)
        made.append(EvaluationBeside(evaluation, held, samplers, monitor, last_step=10))
        return made[-1], scores

    yield make
    for one in made:
        one.close()


def asked(pool):
    wait_until(lambda: len(pool.asked) == 6, "the evaluation has not begun")


def test_an_evaluation_is_of_one_version_while_the_others_get_new_weights(beside):
    """Rule R1: the scores are of the version under which they are shown. Another stack labelled them with
    the version at their end.
    """
    pool = Pool()
    pool.publish()
    evaluation, scores = beside(pool)
    assert evaluation.begin(1)
    asked(pool)
    assert pool.serving == {0: 0}
    evaluation.report(now=1)
    for _ in range(2):
        pool.publish()
    assert pool.versions == {0: 3, 1: 1}
    assert evaluation.state_dict() == {"step": 1}
    pool.may_answer.set()
    evaluation.report(now=3, wait=True)
    ((step, found),) = scores
    assert step == 1
    assert found["eval/mean@2"] == found["eval/greedy"] == 0.5
    assert (found["eval/weight_version"], found["eval/steps_late"]) == (1, 2)
    assert set(pool.asked) == {1}
    assert evaluation.state_dict() == {"step": None}
    assert pool.serving == {0: 0}  # not before it has the newest weights
    pool.publish()
    assert pool.serving == {0: 0, 1: 0}
    assert pool.versions == {0: 4, 1: 4}


def test_an_engine_that_does_not_keep_its_weights_is_noticed(beside):
    pool = Pool()
    evaluation, scores = beside(pool)
    assert evaluation.begin(1)
    asked(pool)
    pool.versions[1] = 1
    pool.may_answer.set()
    with pytest.raises(StaleWeights):
        evaluation.report(now=2, wait=True)
    assert scores == []


def test_without_its_engine_an_evaluation_has_no_scores(beside, caplog):
    pool = Pool()
    evaluation, scores = beside(pool)
    assert evaluation.begin(1)
    asked(pool)
    pool.dies = True
    pool.may_answer.set()
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        evaluation.report(now=2, wait=True)
    assert scores == []
    assert "the evaluation after 1 steps has no scores" in caplog.text
    wait_until(lambda: 1 in pool.membership.in_updates, "the engine is not started again")


def test_an_evaluation_goes_on_with_another_engine_that_is_held(beside):
    pool = Pool(size=3)
    evaluation, scores = beside(pool)
    evaluation._engines._most = 2
    assert evaluation.begin(1)
    asked(pool)
    pool.lost(2, 0, ProcessDied("planted"))
    pool.may_answer.set()
    evaluation.report(now=2, wait=True)
    assert len(scores) == 1


@pytest.mark.parametrize("step", [0, 10])
def test_the_first_and_the_last_evaluation_interrupt_training(beside, step):
    evaluation, _ = beside(Pool())
    assert not evaluation.begin(step)


def test_the_only_engine_is_not_held(beside, caplog):
    pool = Pool()
    pool.lost(0, 0, ProcessDied("planted"))
    evaluation, _ = beside(pool)
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        assert not evaluation.begin(1)
    assert "not beside training, because only one engine serves" in caplog.text


def test_the_end_of_the_run_aborts_an_evaluation(beside, caplog):
    pool = Pool()
    evaluation, scores = beside(pool)
    assert evaluation.begin(1)
    asked(pool)
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        evaluation.close()
    assert scores == []
    assert "the evaluation after 1 steps had not ended" in caplog.text


def test_a_resumed_run_evaluates_again_what_its_checkpoint_has(beside, caplog):
    pool = Pool()
    evaluation, _ = beside(pool)
    evaluation.resume(4, {})
    evaluation.resume(4, {"step": None})
    assert evaluation.state_dict() == {"step": None}
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        evaluation.resume(4, {"step": 3})
    assert "the evaluation after 3 steps" in caplog.text
    evaluation.resume(4, {"step": 4})
    assert evaluation.state_dict() == {"step": 4}

"""Evaluations beside training: their weights, their engines, and how they end."""

import asyncio
import logging
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.config.load import read_config
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.evaluation_beside import EvaluationBeside
from grpo_megatron.rollout.groups import GroupSampler, StaleWeights
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.sglang.held import HeldEngines
from grpo_megatron.sglang.kv_pressure import RequestLimit
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
        self._pool, self._index, self.limit = pool, index, RequestLimit(256)

    def client(self, round, limit=None):
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
    assert evaluation.step == 1
    pool.may_answer.set()
    evaluation.report(now=3, wait=True)
    ((step, found),) = scores
    assert step == 1
    assert found["eval/mean@2"] == found["eval/greedy"] == 0.5
    assert (found["eval/weight_version"], found["eval/steps_late"]) == (1, 2)
    assert set(pool.asked) == {1}
    assert evaluation.step is None
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
    assert "interrupts training, because only one engine serves" in caplog.text


def test_the_end_of_the_run_aborts_an_evaluation(beside, caplog):
    pool = Pool()
    evaluation, scores = beside(pool)
    assert evaluation.begin(1)
    asked(pool)
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        evaluation.close()
    assert scores == []
    assert "the evaluation after 1 steps was aborted" in caplog.text


def pipeline_of(pool, evaluation):
    """Return a RolloutPipeline, and the steps in which an evaluation interrupted training."""
    now = []
    between = SimpleNamespace(run=lambda step: now.append(step) or {"eval/mean@2": 0.25})
    source = SimpleNamespace(
        updating=lambda changed: nullcontext(),
        take=lambda *_: Rollout([]),
        state_dict=dict,
        load_state_dict=lambda state: None,
        close=lambda: None,
    )
    sync = SimpleNamespace(state_dict=dict, is_waited_for=False, close=lambda: None)
    handover = SimpleNamespace(
        publish=lambda changed=True: pool.publish(),
        to_engines=lambda: None,
        to_ranks=lambda: None,
        weight_sync=sync,
    )
    monitor = evaluation._monitor
    monitor.phases = Phases()
    return RolloutPipeline(source, handover, monitor, between, evaluation), now


def test_engines_get_the_weights_of_the_step_in_which_their_evaluation_ended(beside):
    pool = Pool()
    evaluation, scores = beside(pool)
    pipeline, now = pipeline_of(pool, evaluation)
    pipeline.start()
    pipeline.take(1)
    pipeline.weights_changed()
    assert pipeline.evaluate(1) == {}
    pipeline.take(2)
    asked(pool)
    pool.may_answer.set()
    evaluation._thread.join(10)
    pipeline.weights_changed()
    assert [step for step, _ in scores] == [1]
    assert pool.serving == {0: 0, 1: 0}
    assert set(pool.versions.values()) == {3}
    assert now == []


def test_an_evaluation_that_is_waited_for_makes_room_for_the_next_one(beside):
    """Its engine gets the weights at once. Otherwise, one engine would serve, and could not be held."""
    pool = Pool()
    evaluation, scores = beside(pool)
    pipeline, now = pipeline_of(pool, evaluation)
    pipeline.start()
    pipeline.take(1)
    assert pipeline.evaluate(1) == {}
    pipeline.take(2)
    pipeline.weights_changed()
    pool.may_answer.set()
    assert pipeline.evaluate(2) == {}
    evaluation._thread.join(10)
    pipeline.take(10)
    pipeline.weights_changed()
    assert pipeline.evaluate(10) == {"eval/mean@2": 0.25}
    assert [step for step, _ in scores] == [1, 2]
    assert now == [10]
    assert pool.serving == {0: 0, 1: 0}  # the last one used all engines


@pytest.mark.parametrize(
    ("unfinished", "engines", "made_now"), [(4, 2, []), (4, 1, [4]), (3, 2, []), (None, 2, [])]
)
def test_a_resumed_run_evaluates_again_what_its_checkpoint_has(beside, caplog, unfinished, engines, made_now):
    pool = Pool()
    if engines == 1:
        pool.lost(0, 0, ProcessDied("planted"))
    evaluation, scores = beside(pool)
    pipeline, now = pipeline_of(pool, evaluation)
    pipeline.load_state_dict({"step": 4, "weight_sync": None, "evaluation_beside": {"step": unfinished}})
    pool.publish = lambda: None
    with caplog.at_level(logging.WARNING, "grpo_megatron"):
        pipeline.start()
    assert now == made_now
    assert len(scores) == len(made_now)
    assert evaluation.step == (4 if unfinished == 4 and not made_now else None)
    assert pipeline.state_dict()["evaluation_beside"] == {"step": evaluation.step}
    assert ("its weights are gone" in caplog.text) == (unfinished == 3)


def test_rounds_of_engines_that_outlive_a_restart_have_new_numbers():
    """Engines remember the numbers of rounds, and ignored the first evaluation after ranks had restarted."""
    pool, numbers = Pool(), []
    for _ in range(2):  # an attempt of the run
        held = HeldEngines(pool, most=1)
        with held.admission.round("evaluate"), pool.admission.round("train") as trained:
            pass
        with held.admission.round("evaluate") as evaluated:
            numbers += [trained.number, evaluated.number]
    assert numbers == sorted(set(numbers))


def test_engines_that_are_held_do_not_keep_a_run_waiting_for_ever():
    membership = Membership(["engine 0", "engine 1"], lambda index: time.sleep(60), patience=100)
    assert membership.hold(1) == {1: 0}
    membership.lose(0, 0, ProcessDied("planted"))
    membership.must_come_back()
    membership._patience = 0.0
    with pytest.raises(ProcessDied):
        membership.must_come_back()

"""Groups that are sampled ahead of training: age, updates, errors, checkpoints and the end.

test_slots.py has simulated runs of many steps, and tests/integration real engines.
"""

import asyncio
import gc
import random
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.config.load import read_config
from grpo_megatron.data.order import PromptSource
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rollout import stream
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import StaleWeights
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.source import EngineRollouts
from grpo_megatron.rollout.statistics import staleness
from grpo_megatron.sglang.admission import Closed
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of
from tests.tools import wait_until

SIZE, BATCH, N = 200, 4, 2
SECONDS = 10


class Engine(FakeEngines):
    """An engine that samples two tokens for prompt u. Each takes `seconds(u)`.

    running: prompts that are being sampled, with each sample of their groups
    started: (prompt, version) of each sample, in the order of their start
    """

    def __init__(self, seconds=lambda uid: 0.001):
        super().__init__()
        self.seconds, self.weight_version, self.running, self.started = seconds, 0, [], []
        self.skips = 0  # versions that the engine lags behind

    async def generate(self, request, listener=None):
        uid = request.prompt_ids[0]
        self.started.append((uid, self.weight_version))
        self.running.append(uid)
        versions = []
        try:
            for _ in range(2):
                versions.append(self.weight_version - self.skips)
                await asyncio.sleep(self.seconds(uid))
        finally:
            self.running.remove(uid)
        spans = tuple(WeightSpan(version, place, place + 1) for place, version in enumerate(versions))
        ids = np.array([request.key[1], uid], np.int32)
        return Completion(request.key, ids, np.zeros(2, np.float32), "stop", spans)

    def publish(self):
        """Update the weights, as EnginePool does."""
        self.admission.close(Closed.updating, "begin a weight update", within_rounds=not self.serving)
        running = list(self.running)
        time.sleep(0.01)
        self.weight_version += 1
        self.admission.open(Closed.updating, Closed.unsynced)
        return running


class Rewards:
    """Gives different rewards to the samples of a group, except for groups of prompts in `equal`."""

    equal = frozenset()

    async def score(self, prompt, sample):
        await asyncio.sleep(0)
        if prompt.uid == 113:
            raise UserError("planted")
        return sample.scored(float(prompt.uid not in self.equal and sample.arrays.response_ids[0]), {})

    async def score_group(self, prompt, samples):
        return tuple(samples)


def source():
    prompts = [Prompt(uid, np.array([uid], np.int32), "", "", {}) for uid in range(SIZE)]
    return PromptSource([prompts], seed=1, shuffle=False)


@pytest.fixture
def rollouts(request):
    def make(engine, *changes, prompts=None, rewards=None, resumed=0):
        given = ["model.path=m", "data.train=d", f"data.train_batch_size={BATCH}", f"rollout.n={N}"]
        config = read_config(None, [*given, "run.total_steps=30", *changes])
        manager = manager_of(engine, SingleTurn(rewards or Rewards()))
        found = EngineRollouts(manager, config, prompts or source(), resumed)
        request.addfinalizer(found.close)
        return found

    return make


def uids(rollout):
    return [group.prompt.uid for group in rollout.groups]


def step(sampled, engine, number, seconds=0.0):
    """Take the batch of a step, train on it for some time, and update the weights.

    Returns the rollout, its largest age, and the prompts that ran during the update.
    """
    rollout = sampled.take(number)
    ages = staleness(rollout.groups, engine.weight_version)
    time.sleep(seconds)
    with sampled.updating():
        running = engine.publish()
    return rollout, ages["staleness/max"], running


@pytest.mark.parametrize("on_update", ["wait", "continue"])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_every_prompt_is_trained_once_and_no_sample_is_too_old(rollouts, ahead, on_update):
    """Rules R0 and R2: the age is bounded by counting, and computed when a group is trained."""
    rng = random.Random(ahead)
    times = [rng.choice([0.001, 0.001, 0.004, 0.02]) for _ in range(SIZE)]
    engine = Engine(times.__getitem__)
    sampled = rollouts(engine, f"rollout.staleness={ahead}", f"rollout.on_update={on_update}")
    trained, oldest, interrupted = [], [], 0
    for number in range(1, 9):
        rollout, age, running = step(sampled, engine, number, seconds=rng.choice([0.0, 0.02]))
        trained += uids(rollout)
        oldest.append(age)
        interrupted += len(running)
        assert not running or (ahead and on_update != "wait")
    assert trained == list(range(8 * BATCH))
    assert min(ahead, 1) <= max(oldest) <= ahead
    assert interrupted or not ahead or on_update == "wait"
    assert len(engine.started) == len(set(engine.started)) * N, "a group was sampled twice"


def test_with_wait_all_tokens_of_a_group_are_of_one_version(rollouts):
    engine = Engine(lambda uid: 0.003 * (uid % 5))
    sampled = rollouts(engine, "rollout.staleness=2")
    for number in range(1, 9):
        rollout, *_ = step(sampled, engine, number)
        for group in rollout.groups:
            assert len({span.version for one in group.samples for span in one.weight_spans}) == 1


def test_with_continue_a_response_may_be_of_two_versions(rollouts):
    engine = Engine(lambda uid: 0.03)
    sampled = rollouts(engine, "rollout.staleness=2", "rollout.on_update=continue")
    spans = []
    for number in range(1, 9):
        rollout, *_ = step(sampled, engine, number, seconds=0.005)
        spans += [one.weight_spans for group in rollout.groups for one in group.samples]
    # On a busy machine there may be two updates within a response, but never more than the staleness.
    assert {0, 1} <= {last.version - first.version for first, last in spans} <= {0, 1, 2}


def test_an_engine_that_lags_behind_is_noticed(rollouts):
    """Rule R1: the version of a token is what the engine says, not what was published last."""
    engine = Engine()
    sampled = rollouts(engine, "rollout.staleness=1", "rollout.on_update=continue")
    step(sampled, engine, 1)
    engine.skips = 2
    with pytest.raises(StaleWeights, match="a weight update did not reach the engine"):
        _ = [step(sampled, engine, number) for number in range(2, 6)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_error_reaches_the_step_that_needs_the_batch(rollouts, ahead):
    """Rule R6: whoever waits has a failure channel. Another trainer polled an empty buffer for hours."""
    sampled = rollouts(Engine(), f"rollout.staleness={ahead}")
    taken = []
    with pytest.raises(UserError, match="planted"):
        taken.extend(uid for number in range(1, SIZE) for uid in uids(sampled.take(number)))
    assert taken == list(range(len(taken)))
    assert 113 - (ahead + 2) * BATCH < len(taken) <= 113
    with pytest.raises(UserError, match="planted"):
        sampled.take(99)
    with sampled.updating():  # waits for nothing
        pass


class Mortal(Engine):
    """An engine that dies at the requests with these numbers. It serves again after `publish` or `revive`."""

    def __init__(self, deaths):
        super().__init__(lambda uid: 0.01)
        self.deaths, self.revived = deaths, 0

    async def generate(self, request, listener=None):
        number = len(self.started) + 1
        completion = await super().generate(request, listener)
        if number in self.deaths or not self.serving:
            raise ProcessDied("engine 0 died in `generate`")
        return completion

    def lost(self, index, starts, error):
        self.serving = {}

    async def next_serving(self):
        while not self.serving:
            await asyncio.sleep(0.001)
        return self.serving

    def publish(self):
        running = super().publish()
        self.serving = {0: 1}
        return running

    def revive(self):
        self.revived += 1
        self.serving = {0: 1}


@pytest.mark.parametrize("on_update", ["wait", "continue"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_groups_outlive_the_only_engine(rollouts, ahead, on_update, monkeypatch):
    """The engine serves again when a step waits for its batch, or after the next update."""
    monkeypatch.setattr(stream, "_REVIVE_SECONDS", 0.02)
    engine = Mortal(deaths={3, 30, 60})
    sampled = rollouts(engine, f"rollout.staleness={ahead}", f"rollout.on_update={on_update}")
    seen = []
    for number in range(1, 11):
        rollout = sampled.take(number, engine.revive)
        assert all(len(group.samples) == N for group in rollout.groups)
        seen += uids(rollout)
        with sampled.updating():
            engine.publish()
    assert sorted(seen) == list(range(10 * BATCH))
    assert engine.revived >= 1
    assert not engine.deaths - set(range(len(engine.started) + 1))


@pytest.mark.parametrize("taken", [0, 1])
def test_the_end_aborts_what_is_sampled(rollouts, taken):
    engine = Engine(lambda uid: 60.0 if uid >= BATCH * taken else 0.001)
    sampled = rollouts(engine, "rollout.staleness=1")

    def take():
        with pytest.raises(asyncio.CancelledError):
            sampled.take(1)

    waiting = threading.Thread(target=take)
    if taken:
        sampled.take(1)
    else:
        waiting.start()
    wait_until(lambda: engine.running, "nothing is sampled")
    start = time.monotonic()
    sampled.close()
    sampled.close()
    assert time.monotonic() - start < SECONDS / 2
    assert not engine.running
    assert not engine.admission._rounds
    assert "sampling" not in [thread.name for thread in threading.enumerate()]
    if not taken:
        waiting.join(SECONDS)
        assert not waiting.is_alive()


def test_groups_that_steps_have_taken_are_not_kept(rollouts):
    """A round may last for the whole run. Their references would keep all arrays in the object store."""
    engine = Engine(lambda uid: 0.002 * (uid % 5))
    sampled = rollouts(engine, "rollout.staleness=3", "rollout.on_update=continue")
    first = [weakref.ref(group) for group in sampled.take(1).groups]
    for number in range(2, 12):
        step(sampled, engine, number)
    gc.collect()
    assert len(engine.ended) < 11, "there was a round for each step"
    assert not [group for group in first if group()]


def test_busy_time_is_that_of_sampling_alone(rollouts):
    engine = Engine(lambda uid: 0.1)
    sampled = rollouts(engine, "rollout.staleness=1")
    sampled.take(1)
    assert sampled.metrics["rollout/sampling_seconds"] >= 0.2
    sampled.take(2)
    time.sleep(1.0)
    measured = sampled.metrics
    assert 0.2 <= measured["rollout/sampling_seconds"] < 0.6, "nothing more may be sampled"
    assert (measured["rollout/groups_waiting"], measured["rollout/groups_in_progress"]) == (BATCH, 0)
    time.sleep(0.3)
    assert sampled.metrics["rollout/sampling_seconds"] == 0


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_checkpoint_has_what_is_not_trained_on(rollouts, ahead):
    """Rule R4: the cursor is that of settled prompts, and unsettled ones come first, with their ids. Another
    stack saved the cursor of its sampler, and skipped 675 of 736 prompts after a restart.
    """
    engine, prompts = Engine(lambda uid: 0.05 if uid % 7 == 0 else 0.001), source()
    first = rollouts(engine, f"rollout.staleness={ahead}", "rollout.order=window", prompts=prompts)
    trained = {}
    for number in (1, 2, 3):
        rollout, *_ = step(first, engine, number)
        trained |= {group.group_id: group.prompt.uid for group in rollout.groups}
    time.sleep(0.01)
    state = first.state_dict()
    first.close()
    unsettled = state["rollouts"]["unsettled"]
    assert len(unsettled) == len(state["prompts"]["returned"]) <= ahead * BATCH
    again = rollouts(Engine(), f"rollout.staleness={ahead}", resumed=3)
    again.load_state_dict(state)
    for number in range(4, 10):
        rollout = again.take(number)
        for group in rollout.groups:
            assert group.group_id not in trained, "a group is trained twice"
            trained[group.group_id] = group.prompt.uid
        if number == 4:
            assert [group.group_id for group in rollout.groups][: len(unsettled)] == unsettled[:BATCH]
    assert trained == {number: number for number in range(9 * BATCH)}


def test_a_prompt_whose_group_was_refused_is_not_settled_before_the_next_batch(rollouts):
    """The ledger gets the group with the next batch. A kill before that must not skip the prompt."""

    class Some(Rewards):
        equal = frozenset({5, 6})

    engine = Engine(lambda uid: 0.001 if uid < BATCH else 0.05)
    changes = ["algorithm.preset=dapo", "rollout.dynamic_sampling.over_sampling=1", "rollout.staleness=1"]
    sampled = rollouts(engine, *changes, rewards=Some())
    assert uids(sampled.take(1)) == [0, 1, 2, 3]
    wait_until(lambda: not engine.running and len(engine.started) == N * (6 + BATCH), "5 and 6 are replaced")
    time.sleep(0.02)
    state = sampled.state_dict()
    assert [index for _, index in state["prompts"]["returned"]] == [4, 5, 6, 7, 8, 9]
    second = sampled.take(2)
    assert (uids(second), second.dropped) == ([4, 7, 8, 9], 2)
    refused = [left.rows["prompt"].tolist() for left in second.left_out if len(left.rows)]
    assert refused == [[5, 5], [6, 6]]


def test_the_pipeline_updates_the_engines_while_nothing_is_started(rollouts):
    engine = Engine(lambda uid: 0.005)
    sampled = rollouts(engine, "rollout.staleness=2", "rollout.on_update=continue")
    started = []

    def publish(changed):
        before = sampled._slots.items
        time.sleep(0.05)
        started.append(len(sampled._slots.items) - len(before))

    weight_sync = SimpleNamespace(state_dict=lambda: {"version": 1}, close=lambda: None)
    handover = SimpleNamespace(
        weight_sync=weight_sync,
        metrics={},
        to_engines=lambda: None,
        to_ranks=lambda: None,
        publish=publish,
    )
    pipeline = RolloutPipeline(sampled, handover, SimpleNamespace(phases=Phases()))
    for number in (1, 2, 3):
        assert uids(pipeline.take(number)) == list(range(BATCH * (number - 1), BATCH * number))
        pipeline.weights_changed()
    assert started == [0, 0, 0]
    assert pipeline.metrics["rollout/sampling_seconds"] > 0
    assert pipeline.state_dict().keys() == {"rollouts", "prompts", "weight_sync"}

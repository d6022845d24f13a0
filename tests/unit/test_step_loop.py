"""The loop of steps: when it evaluates, saves and stops. Steps are tested with real ranks elsewhere."""

import json
import math
import signal
from types import SimpleNamespace

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.controller import Controller
from grpo_megatron.errors import Stopped
from grpo_megatron.files import json_text
from grpo_megatron.metrics import nan_max
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.run.stop import StopRequest


class Checkpoints:
    """Records the steps of its checkpoints. Every second step and the last one are due."""

    def __init__(self, folder):
        self.folder, self.saved, self.states = folder, [], {}

    def is_due(self, step, last):
        return last or step % 2 == 0

    def complete_written(self):
        pass

    def save(self, step, state):
        if step not in self.states:
            self.saved.append(step)
            self.states[step] = state()

    def finish(self):
        pass


class Training:
    """Records its steps and evaluations in `done`. A request to stop comes in the middle of one of them."""

    def __init__(self, checkpoints, asked_in=None, state=None):
        config = read_config(None, ["model.path=m", "data.train=d", "run.total_steps=4", "eval.every=2"])
        monitor = SimpleNamespace(phases=Phases(), start_step=lambda step: None, evaluated=lambda *_: None)
        self.stop, self.done, self.asked_in = StopRequest(), [], asked_in
        self.loop = StepLoop(config, checkpoints, monitor, self.stop)
        if state:
            self.loop.load_state_dict(state)

    def _do(self, what):
        self.done.append(what)
        if what == self.asked_in:
            self.stop.signal = signal.SIGTERM

    def train_step(self, step):
        self._do(f"step {step}")

    def evaluate(self, step):
        self._do(f"evaluation {step}")
        return {"eval/mean@4": step / 10}

    def state_dict(self):
        return {}

    def run(self):
        self.loop.run(self)
        return self.loop.evaluations


WHOLE = ["evaluation 0", "step 1", "step 2", "evaluation 2", "step 3", "step 4", "evaluation 4"]
EVALUATIONS = {"before": {"eval/mean@4": 0.0}, "after": {"eval/mean@4": 0.4}}


def test_a_run_evaluates_and_saves_when_it_is_due(tmp_path):
    training = Training(Checkpoints(tmp_path))
    assert training.run() == EVALUATIONS
    assert training.done == WHOLE
    assert training.loop.checkpoints.saved == [2, 4]


@pytest.mark.parametrize(
    ("asked_in", "done", "saved"),
    [
        ("step 1", WHOLE[:2], [1]),
        ("evaluation 2", WHOLE[:4], [2]),  # not a step later, for which there may be no time
        ("step 3", WHOLE[:5], [2, 3]),
        ("step 4", WHOLE[:6], [2, 4]),
    ],
)
def test_a_stopped_run_leaves_after_what_it_does_and_continues_to_the_same_end(
    tmp_path, asked_in, done, saved
):
    checkpoints = Checkpoints(tmp_path)
    training = Training(checkpoints, asked_in)
    with pytest.raises(Stopped):
        training.run()
    assert (training.done, checkpoints.saved) == (done, saved)
    again = Training(checkpoints, state=checkpoints.states[saved[-1]])
    assert again.run() == EVALUATIONS
    steps = [one for one in (*training.done, *again.done) if one.startswith("step")]
    assert steps == ["step 1", "step 2", "step 3", "step 4"]


def test_a_stop_in_the_evaluation_after_the_last_step_comes_too_late(tmp_path):
    training = Training(Checkpoints(tmp_path), asked_in="evaluation 4")
    training.run()
    assert training.loop.step == 4


def test_a_checkpoint_is_completed_after_generation_not_after_the_step_alone():
    """A step may take longer than a request to stop allows."""
    done = []
    source = SimpleNamespace(take=lambda *_: done.append("sampled") or Rollout([]))
    handover = SimpleNamespace(
        to_engines=lambda: done.append("engines"), to_ranks=lambda: done.append("ranks")
    )
    monitor = SimpleNamespace(phases=Phases())
    rollouts = RolloutPipeline(
        source,
        handover,
        monitor,
        score=lambda groups: done.append("scored"),
        sampled=lambda: done.append("completed"),
    )
    rollouts.take(1)
    assert done == ["engines", "sampled", "ranks", "completed", "scored"]


def test_a_mismatch_that_was_no_number_stays_none_over_a_restart():
    """The checkpoint's JSON has null for it. max() of None and a number used to end the run."""
    nothing = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    first, again = (Controller(None, *[nothing] * 6) for _ in range(2))
    first.totals["mismatch_max"] = math.nan
    again.load_state_dict(json.loads(json_text(first.state_dict())))
    assert math.isnan(nan_max(again.totals["mismatch_max"], 0.5))

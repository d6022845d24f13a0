"""The loop: when it evaluates, saves and stops. Steps are tested with real ranks elsewhere."""

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
from grpo_megatron.run.stop import StopRequest


class Phases:
    def __call__(self, name):
        return self

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


class Monitor:
    phases = Phases()

    def evaluated(self, step, scalars):
        pass


class Saver:
    """Records the steps of its checkpoints. Every second step and the last one are due."""

    def __init__(self, folder):
        self.folder, self.saved, self.states = folder, [], {}

    def is_due(self, step, last):
        return last or step % 2 == 0

    def after_step(self, state):
        if state:
            self.save(state)

    def save(self, state):
        if state["step"] not in self.states:
            self.saved.append(state["step"])
            self.states[state["step"]] = state

    def finish(self):
        pass


class Loop(Controller):
    """The loop without ranks and engines.

    It records steps and evaluations, and a request comes in the middle of one.
    """

    def __init__(self, saver, *changes, asked_in=None):
        config = read_config(
            None, ["model.path=m", "data.train=d", "run.total_steps=4", "eval.every=2", *changes]
        )
        nobody = type(
            "Nobody", (), {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
        )()
        super().__init__(config, nobody, nobody, None, None, None, saver, Monitor(), stop=StopRequest())
        self.done, self.asked_in = [], asked_in

    def _do(self, what):
        self.done.append(what)
        if what == self.asked_in:
            self.stop.signal = signal.SIGTERM

    def train_step(self):
        self._do(f"step {self.step}")

    def evaluate(self):
        self._do(f"evaluation {self.step}")
        return {"eval/mean@4": self.step / 10}


WHOLE = ["evaluation 0", "step 1", "step 2", "evaluation 2", "step 3", "step 4", "evaluation 4"]


def test_a_run_evaluates_and_saves_when_it_is_due(tmp_path):
    loop = Loop(Saver(tmp_path))
    result = loop.run()
    assert loop.done == WHOLE
    assert loop.saver.saved == [2, 4]
    assert (result["before"], result["after"]) == ({"eval/mean@4": 0.0}, {"eval/mean@4": 0.4})


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
    loop = Loop(Saver(tmp_path), asked_in=asked_in)
    with pytest.raises(Stopped):
        loop.run()
    assert (loop.done, loop.saver.saved) == (done, saved)
    again = Loop(loop.saver)
    again.load_state_dict(loop.saver.states[saved[-1]])
    result = again.run()
    steps = [one for one in (*loop.done, *again.done) if one.startswith("step")]
    assert steps == ["step 1", "step 2", "step 3", "step 4"]
    assert result["before"] == {"eval/mean@4": 0.0}
    assert result["after"] == {"eval/mean@4": 0.4}


def test_a_checkpoint_is_completed_after_generation_not_after_the_step_alone(tmp_path):
    """A step may take longer than a request to stop allows."""
    loop, done = Loop(Saver(tmp_path)), []
    loop.monitor = SimpleNamespace(phases=Phases(), start_step=lambda step: None)
    loop.rollouts = SimpleNamespace(sample=lambda *_: done.append("sampled") or SimpleNamespace(groups=[]))
    loop.saver.complete_written = lambda: done.append("completed")

    def train_on(groups):
        raise InterruptedError

    loop.shape_and_filter = train_on
    with pytest.raises(InterruptedError):
        Controller.train_step(loop)
    assert done == ["sampled", "completed"]


def test_a_stop_in_the_evaluation_after_the_last_step_comes_too_late(tmp_path):
    assert Loop(Saver(tmp_path), asked_in="evaluation 4").run()["step"] == 4


def test_a_mismatch_that_was_no_number_stays_none_over_a_restart(tmp_path):
    """The checkpoint's JSON has null for it. max() of None and a number used to end the run."""
    loop = Loop(Saver(tmp_path))
    loop.totals["mismatch_max"] = math.nan
    again = Loop(Saver(tmp_path))
    again.load_state_dict(json.loads(json_text(loop.state_dict())))
    assert math.isnan(nan_max(again.totals["mismatch_max"], 0.5))

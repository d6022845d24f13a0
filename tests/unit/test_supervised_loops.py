"""The trainings of `sft` and `reward-model` without ranks: a request to stop, and the result of a resumed
run.
"""

import signal
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.examples import Example, ExampleBatch
from grpo_megatron.commands import reward_model, sft
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import Stopped
from grpo_megatron.metrics import Mean
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.run.loop import StepLoop
from grpo_megatron.run.stop import StopRequest


class Checkpoints:
    """Records the last state."""

    def __init__(self, folder):
        self.folder, self.state = folder / "checkpoints", None

    def is_due(self, step, last):
        return False

    def complete_written(self):
        pass

    def save(self, step, state):
        self.state = state()

    def finish(self):
        pass


def run_of(tmp_path, steps: int, state: dict | None = None) -> SimpleNamespace:
    config = Config()
    config.run.total_steps, config.eval.every = steps, 1
    monitor = SimpleNamespace(
        phases=Phases(),
        start_step=lambda step: None,
        finish_step=lambda *_: {},
        line=lambda *_: None,
        evaluated=lambda *_: None,
    )
    trainer = SimpleNamespace(cost_model=None, train_step=lambda *_, **__: {})
    saver = Checkpoints(tmp_path)

    def loop(stop):
        loop = StepLoop(config, saver, monitor, stop)
        if state:
            loop.load_state_dict(state)
        return loop

    return SimpleNamespace(
        config=config, state=state, saver=saver, monitor=monitor, trainer=trainer, loop=loop
    )


class RewardModelTraining(reward_model._Training):
    """A training in which a request to stop comes in step `asked_in`."""

    asked_in, stop = 0, None

    def train_step(self, step):
        self._last_loss = step / 10
        if step == self.asked_in:
            self.stop.signal = signal.SIGTERM

    def evaluate(self, step):
        return {"after": step}


@pytest.mark.parametrize("asked_in", [2, 3])
def test_an_evaluation_after_a_request_to_stop_is_made_when_the_run_continues(asked_in, tmp_path):
    run, stop = run_of(tmp_path, 3), StopRequest()
    training = RewardModelTraining(run, [0] * 4, [0])
    training.asked_in, training.stop = asked_in, stop
    with pytest.raises(Stopped):
        training.train(stop)
    state = run.saver.state
    assert state["evaluations"]["after"] == {"after": asked_in - 1}
    again = RewardModelTraining(run_of(tmp_path, 3, state), [0] * 4, [0]).train(StopRequest())
    assert (again["step"], again["loss"], again["after"]) == (3, 0.3, {"after": 3})


def test_an_sft_that_was_stopped_in_its_last_step_has_its_loss(tmp_path, monkeypatch):
    stop, example = StopRequest(), Example(np.arange(2), np.arange(3))
    monkeypatch.setattr(sft._Training, "streams", lambda *_: [[ExampleBatch.of_examples([example], 1.0)]])
    run, stop.signal = run_of(tmp_path, 1), signal.SIGTERM
    run.trainer.train_step = lambda *_, **__: {"sft/loss_per_token": Mean(0.5, 1)}
    with pytest.raises(Stopped):
        sft._Training(run, [None] * 4).train(stop)
    again = run_of(tmp_path, 1, run.saver.state)
    result = sft._Training(again, [None] * 4).train(StopRequest())
    assert result == {"step": 1, "loss": 0.5, "tokens": 5}

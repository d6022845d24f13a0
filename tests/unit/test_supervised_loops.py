"""The loops of `sft` and `reward-model` without ranks: what a request to stop leaves out, and the result
of a resumed run.
"""

import signal
from types import SimpleNamespace

import pytest

from grpo_megatron.commands import reward_model, sft
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import Stopped
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.run.stop import StopRequest


class Saver:
    """Records the last state."""

    def __init__(self, folder):
        self.folder, self.state = folder / "checkpoints", None

    def is_due(self, step, last):
        return False

    def after_step(self, state):
        pass

    def save(self, state):
        self.state = state

    def finish(self):
        pass


def run_of(tmp_path, steps: int, state: dict | None = None) -> SimpleNamespace:
    config = Config()
    config.run.total_steps, config.eval.every = steps, 1
    monitor = SimpleNamespace(
        phases=Phases(), start_step=lambda step: None, finish_step=lambda *_: {}, line=lambda *_: None
    )
    trainer = SimpleNamespace(cost_model=None, train_step=lambda *_, **__: {})
    resumed = state["step"] if state else 0
    return SimpleNamespace(
        config=config, state=state, resumed=resumed, saver=Saver(tmp_path), monitor=monitor, trainer=trainer
    )


class Training(reward_model._Training):
    """A training in which a request to stop comes in step `asked_in`."""

    asked_in, stop = 0, None

    def _step(self, step, shown):
        self._loss = step / 10
        if step == self.asked_in:
            self.stop.signal = signal.SIGTERM

    def _evaluate(self, step):
        return {"after": step}


@pytest.mark.parametrize(("asked_in", "evaluated"), [(2, 1), (3, 3)])
def test_an_evaluation_after_a_request_to_stop_is_left_out_but_for_the_last(asked_in, evaluated, tmp_path):
    run, stop = run_of(tmp_path, 3), StopRequest()
    training = Training(run, [0] * 4, [0])
    training.asked_in, training.stop = asked_in, stop
    with pytest.raises(Stopped):
        training.run(stop)
    state = run.saver.state
    assert state["evaluations"]["after"] == {"after": evaluated}
    again = Training(run_of(tmp_path, 3, state), [0] * 4, [0]).run(StopRequest())
    assert (again["step"], again["loss"], again["after"]) == (3, 0.3, {"after": 3})


def test_an_sft_that_was_stopped_in_its_last_step_has_its_loss(tmp_path, monkeypatch):
    batch, stop = SimpleNamespace(num_tokens=5), StopRequest()
    monkeypatch.setattr(sft, "next_batch", lambda *_: (batch, None))
    monkeypatch.setattr(sft, "to_floats", lambda metrics: {"sft/loss_per_token": 0.5})
    run, stop.signal = run_of(tmp_path, 1), signal.SIGTERM
    with pytest.raises(Stopped):
        sft._run(run, [None] * 4, stop)
    result = sft._run(run_of(tmp_path, 1, run.saver.state), [None] * 4, StopRequest())
    assert result == {"step": 1, "loss": 0.5, "tokens": 5}

"""The loop of steps that `train`, `sft` and `reward-model` share: step, evaluation, checkpoint, stop."""

from collections.abc import Callable
from typing import Any, Protocol

from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.run.checkpoints import Checkpoints
from grpo_megatron.run.stop import StopRequest


class Training(Protocol):
    """The training that a loop of steps makes: controller.Controller, or commands.supervised."""

    def train_step(self, step: int) -> Any:
        """Make one step, and report it to the monitor. step: index of the step, from 1."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Return scores of the weights after `step` steps; empty if there is nothing to evaluate on."""

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's state for a checkpoint, as values that JSON has."""


class StepLoop:
    """Makes the steps of a run, with evaluations and checkpoints when they are due.

    step: the last step that was begun
    evaluations: the scores "before" and "after" training; empty until they have been measured
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        monitor: Monitor,
        stop: StopRequest | None = None,
        to_ranks: Callable[[], None] = lambda: None,
    ):
        """Create a loop that starts at step 0. `load_state_dict` continues from a checkpoint.

        stop: request to stop the run; None: there is never one
        to_ranks: called before a checkpoint. Engines on the ranks' devices then release their memory.
        """
        self.checkpoints, self.step = checkpoints, 0
        self.evaluations: dict[str, dict[str, float]] = {"before": {}, "after": {}}
        self._total_steps, self._evaluate_every = config.run.total_steps, config.eval.every
        self._monitor, self._stop, self._to_ranks = monitor, stop or StopRequest(), to_ranks
        self._evaluated: int | None = None  # the step after which the "after" evaluation was made

    def run(self, training: Training) -> None:
        """Train until step run.total_steps. Raises Stopped after a step if the run was asked to stop."""
        if not self.evaluations["before"]:
            self._evaluate(training)
            self.evaluations["before"] = self.evaluations["after"]
        while self.step < self._total_steps:
            training.train_step(self.begin_step())
            self._leave_if_asked(training)
            last = self.step == self._total_steps
            if last or (self._evaluate_every and self.step % self._evaluate_every == 0):
                self._evaluate(training)
            self._save_if_due(training, last)
            if not last:
                self._leave_if_asked(training)
        if self._evaluated != self.step:  # the run was stopped in its last step
            self._evaluate(training)

    def begin_step(self) -> int:
        """Begin the next step, and return its index. For a caller that makes single steps without `run`."""
        self.step += 1
        self._stop.step = self.step
        self._monitor.start_step(self.step)
        return self.step

    def _evaluate(self, training: Training) -> None:
        scores = training.evaluate(self.step)
        if scores:
            self._monitor.evaluated(self.step, scores)
        self.evaluations["after"], self._evaluated = scores, self.step

    def _save_if_due(self, training: Training, last: bool) -> None:
        due = self.checkpoints.is_due(self.step, last)
        if due:
            self._to_ranks()
        with self._monitor.phases("checkpoint"):
            self.checkpoints.after_step(self._state(training) if due else None)

    def _leave_if_asked(self, training: Training) -> None:
        """Save a checkpoint and raise Stopped, if the run was asked to stop."""
        if self._stop.is_made:
            self._to_ranks()
            self._stop.leave(self.checkpoints, lambda: self._state(training))

    def _state(self, training: Training) -> dict[str, Any]:
        return {"step": self.step, "evaluations": self.evaluations, "evaluated": self._evaluated} | (
            training.state_dict()
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step of a checkpoint. state: that of the driver process, from state.json."""
        self.step = state["step"]
        # Earlier versions of `sft` and `reward-model` did not save these.
        self.evaluations |= state.get("evaluations", {})
        self._evaluated = state.get("evaluated")

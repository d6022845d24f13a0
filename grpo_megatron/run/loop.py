"""The loop of steps that `train`, `sft` and `reward-model` share: step, evaluation, checkpoint, stop."""

from collections.abc import Callable
from typing import Any, Protocol

from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.run.checkpoints import Checkpoints
from grpo_megatron.run.stop import StopRequest


class Training(Protocol):
    """Interface of an object that makes a run's training steps, such as controller.Controller.

    StepLoop, the loop of steps, calls the methods.
    """

    def train_step(self, step: int) -> Any:
        """Take one training step, and report its metrics to the run's monitor.

        step: index of the step, from 1.
        """

    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the current weights, as they are after `step` steps.

        Returns {name: score}, or an empty dict if no evaluation is configured.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the driver process as JSON values, for a checkpoint's state.json."""


class StepLoop:
    """Runs the training steps of a run, with evaluations and checkpoints when they are due.

    checkpoints: writes the checkpoints
    step: index of the last step that was begun; 0 before the first step
    evaluations: {"before": scores before training, "after": newest scores}. The scores are {name: score},
        and empty until the evaluation has been made
    """

    def __init__(
        self,
        config: Config,
        checkpoints: Checkpoints,
        monitor: Monitor,
        stop: StopRequest | None = None,
        to_ranks: Callable[[], None] = lambda: None,
    ):
        """Create a loop that starts at step 0. Call `load_state_dict` to continue from a checkpoint.

        stop: tells whether the run has been asked to stop. None: the run cannot be asked to stop.
        to_ranks: function that gives shared GPUs to the trainer's ranks. It is called before a checkpoint is
            written.
        """
        self.checkpoints, self.step = checkpoints, 0
        self.evaluations: dict[str, dict[str, float]] = {"before": {}, "after": {}}
        self._total_steps, self._evaluate_every = config.run.total_steps, config.eval.every
        self._monitor, self._stop, self._to_ranks = monitor, stop or StopRequest(), to_ranks
        self._evaluated: int | None = None  # the step after which evaluations["after"] was made

    def run(self, training: Training) -> None:
        """Train until step run.total_steps, with evaluations and checkpoints.

        The weights are also evaluated before the first step and after the last step. If the run is asked to
        stop, the current step is completed, a checkpoint is saved, and Stopped is raised.

        training: makes the steps and the evaluations.
        """
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
        """Count the next training step as begun, and return its index, from 1.

        `run` calls this method. Code that makes the steps itself, without `run`, must call it too.
        """
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
            self.checkpoints.complete_written()
            if due:
                self.checkpoints.save(self.step, lambda: self._state(training))

    def _leave_if_asked(self, training: Training) -> None:
        """Save a checkpoint and raise Stopped if the run has been asked to stop."""
        if self._stop.is_made:
            self._to_ranks()
            self._stop.leave(self.checkpoints, lambda: self._state(training))

    def _state(self, training: Training) -> dict[str, Any]:
        return {"step": self.step, "evaluations": self.evaluations, "evaluated": self._evaluated} | (
            training.state_dict()
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step of a checkpoint.

        state: content of the checkpoint's state.json.
        """
        self.step = state["step"]
        # Earlier versions of `sft` and `reward-model` did not save the two keys below.
        self.evaluations |= state.get("evaluations", {})
        self._evaluated = state.get("evaluated")

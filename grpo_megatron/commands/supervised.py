"""The part of supervised training that `sft` and `reward-model` have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from grpo_megatron.algorithm.losses import TokenLoss
from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.examples import ExampleBatch
from grpo_megatron.batch.pairs import PairBatch
from grpo_megatron.commands.assemble import Run
from grpo_megatron.data import EpochOrder
from grpo_megatron.metrics import to_floats
from grpo_megatron.monitoring.samples import TrainedOn
from grpo_megatron.run.stop import StopRequest

Record = TypeVar("Record")


class SupervisedTraining(ABC, Generic[Record]):
    """Base class of supervised trainings, which make one optimizer step for each batch of records.

    If the Run has loaded a checkpoint, the training continues from there. After a failure, a new object is
    created for the next attempt.
    """

    loss: TokenLoss | PreferenceLoss
    """The loss that is minimized."""
    loss_metric: str
    """Name of the metric that is the loss of a step."""
    shown_every: int
    """Number of steps from one line on the terminal to the next."""
    tokens_key: str
    """Key in the checkpoint's state.json for the number of tokens trained so far."""

    def __init__(self, run: Run, records: Sequence[Record]):
        """Prepare the training. If `run` has loaded a checkpoint, the training continues from there.

        run: the started processes of this attempt at the run.
        records: all training records.
        """
        self.run, self.config = run, run.config
        self._records = records
        self._order = EpochOrder.of(records, run.config.run.seed, run.config.data.shuffle)
        self._tokens, self._last_loss = 0, None
        if run.state:
            self._order.load_state_dict(run.state["order"])
            self._tokens = run.state[self.tokens_key]
            self._last_loss = run.state.get("loss")  # checkpoints of earlier versions lack it

    def train(self, stop: StopRequest) -> dict[str, Any]:
        """Train until step run.total_steps, with evaluations and checkpoints.

        If the run is asked to stop, a checkpoint is saved after the current step, and Stopped is raised.

        Returns a dict with "step" (the last step), "loss" (of the last step), and "tokens" (in all steps). If
        there are held-out records, it also has "before" and "after": the scores before and after training.
        """
        loop = self.run.loop(stop)
        loop.run(self)
        result = {"step": loop.step, "loss": self._last_loss, "tokens": self._tokens}
        return result | (loop.evaluations if loop.evaluations["after"] else {})

    def train_step(self, step: int) -> None:
        """Make one optimizer step on the next data.train_batch_size records, and log its metrics.

        step: index of the step, from 1.
        """
        monitor, trainer = self.run.monitor, self.run.trainer
        with monitor.phases("prepare"):
            records = [self._records[i] for i in self._order.take(self.config.data.train_batch_size)]
            streams = self.streams(records)
        with monitor.phases("train"):
            metrics = to_floats(trainer.train_step(streams, self.loss, step))
        lengths = np.concatenate([stream.lengths for own in streams for stream in own])
        self._tokens += int(lengths.sum())
        self._last_loss = metrics[self.loss_metric]
        scalars = monitor.finish_step(step, metrics, TrainedOn(lengths))
        if step in (1, self.config.run.total_steps) or step % self.shown_every == 0:
            monitor.line(step, scalars)

    @abstractmethod
    def streams(self, records: list[Record]) -> list[list[ExampleBatch]] | list[list[PairBatch]]:
        """Divide the records of an optimizer step into micro-batches, for each data-parallel replica.

        Returns one list for each data-parallel replica, with the micro-batches that it trains on.
        """

    def evaluate(self, step: int) -> dict[str, float]:
        """Return {name: score} on held-out records. The default is {}, for trainings without such records.

        step: number of steps trained before the evaluation.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self._order.state_dict(),
            self.tokens_key: self._tokens,
            "loss": self._last_loss,
        }

"""Protocols of the parts of a weight sync: the trainer, the engines, and a comparison of their outputs."""

from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Process
from grpo_megatron.weights.sync.messages import SyncCommand


class WeightSource(Protocol):
    """The trainer, as a weight sync uses it. Implemented by trainer.weights.TrainerWeights.

    processes: the trainer's ranks.
    """

    processes: list[Process]

    def send_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every trainer rank carry out its side of a weight-sync command.

        Return one Ray reference per rank, to the rank's SyncReport.
        """


class WeightTarget(Protocol):
    """The engines, as a weight sync uses them. Implemented by sglang.pool.EnginePool.

    Between `begin_update` and `end_update` (the update session) the engines serve no requests. If anything
    fails in between, their weights are undefined, and they must not serve again.

    processes: one process per engine.
    """

    processes: list[Process]

    def begin_update(self) -> None: ...

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of a weight-sync command.

        Return one Ray reference per engine, to the list of SyncReports of the engine's ranks.
        """

    def end_update(self, version: int) -> None:
        """Resume serving. From now on, the engines' samples report `version` as their weight version."""


class Probe(Protocol):
    """A comparison of what the trainer and the engines compute after a weight sync.

    It detects errors that checksums cannot: weights that arrived intact, but that an engine uses differently.
    Implemented by trainer.weight_probe.WeightProbe. The two steps are separate methods, because trainer and
    engines may have to take turns on devices that they share.
    """

    def ask_trainer(self) -> None:
        """Compute outputs with the trainer, and keep them as the values that `ask_engines` expects."""

    def ask_engines(self) -> dict[str, float]:
        """Compute the outputs of `ask_trainer` with the engines, and compare them. Return {metric: value}.

        Raises RuntimeError if the outputs differ too much.
        """

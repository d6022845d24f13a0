"""Protocols of the parts of a weight sync: trainer, engines and comparison of their outputs."""

from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Process
from grpo_megatron.weights.sync.messages import SyncCommand


class WeightSource(Protocol):
    """The trainer, whose ranks are `processes`. Implemented by trainer.weights.TrainerWeights."""

    processes: list[Process]

    def send_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every trainer rank carry out its side of a command.

        Return one reference per rank, to its SyncReport.
        """


class WeightTarget(Protocol):
    """The engines. `processes` has one process per engine. Implemented by sglang.pool.EnginePool.

    Between `begin_update` and `end_update` (the update session) the engines serve no requests. If anything
    fails in between, their weights are undefined, and they must not serve again.
    """

    processes: list[Process]

    def begin_update(self) -> None: ...

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of a command.

        Return one reference per engine, to the list of its ranks' SyncReports.
        """

    def end_update(self, version: int) -> None:
        """Resume serving. The engines' samples report `version` as their weight version from now on."""


class Probe(Protocol):
    """A comparison of what the trainer and the engines compute after a weight sync.

    It detects errors that checksums cannot: right weights that an engine uses differently. Implemented by
    trainer.weight_probe.WeightProbe. The two steps are separate methods, because trainer and engines may have
    to take turns on devices that they share.
    """

    def ask_trainer(self) -> None:
        """Compute the expected outputs with the trainer, and keep them."""

    def ask_engines(self) -> dict[str, float]:
        """Compute the same outputs with the engines, compare them, and return {metric: value}.

        Raises RuntimeError if they differ from the trainer's.
        """

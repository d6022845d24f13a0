"""Protocols of the parts of a weight sync: the trainer, the engines, and a comparison of their outputs."""

from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Calls, Process
from grpo_megatron.weights.sync.messages import SyncCommand


class EnginesLost(Exception):
    """Engines have died during a sync, and were reported to WeightTarget.lost. The sync can be repeated."""


class WeightSource(Protocol):
    """Interface of the trainer in a weight sync. trainer.weights.TrainerWeights implements it.

    processes: one process per trainer rank.
    """

    processes: list[Process]

    def send_weights(self, command: SyncCommand) -> Calls:
        """Make every trainer rank carry out its side of a weight-sync command.

        Return the calls to the ranks without waiting. The result of each is the rank's SyncReport.
        """


class WeightTarget(Protocol):
    """Interface of the engines in a weight sync. sglang.pool.EnginePool implements it.

    Between `begin_update` and `end_update` the engines serve no requests. If anything fails in between, the
    engines' weights are undefined, and the engines must not serve again.

    processes: one process per member, in the order of `members`.
    members: (index, number of starts) of each engine that takes part in the update. The number of starts
        shows that an engine was restarted, and so lacks the weights of earlier syncs.
    nodes: name of the node of each rank of each member, all ranks of the first member first.
    waits_for_weights: True if no engine serves requests, but one has been restarted and needs the weights.
    """

    processes: list[Process]
    members: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]
    waits_for_weights: bool

    def begin_update(self, again: bool = False) -> None:
        """Begin an update of the weights. No engine serves requests until `end_update`.

        again: True to go on with the update in progress, without engines that have been lost since it began,
            and with engines that have been restarted.
        """

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of a weight-sync command.

        Return one Ray reference per member, to the list of SyncReports of the engine's ranks in rank order.
        """

    def lost(self, index: int, starts: int, error: Exception) -> None:
        """Remove an engine that has died or has wrong weights.

        Raises `error` if the run cannot go on without the engine.

        index, starts: the engine's entry in `members`.
        error: the error by which the loss was noticed.
        """

    def end_update(self, version: int) -> None:
        """Let the engines serve requests again. Their samples then report `version` as the weight version."""


class Probe(Protocol):
    """Interface of a check, after a weight sync, that trainer and engines compute the same log-probs.

    The check detects errors that checksums cannot detect: weights that arrived intact, but that an engine
    uses wrongly. trainer.weight_probe.WeightProbe implements it. Its two steps are separate methods, because
    trainer and engines may have to take turns on devices that they share.
    """

    def ask_trainer(self) -> None:
        """Compute log-probs of fixed token sequences with the trainer, and keep them for `ask_engines`."""

    def ask_engines(self) -> dict[str, float]:
        """Compute the same log-probs with the engines, and compare them with those of `ask_trainer`.

        Return metrics, such as {"probe_mean": mean absolute difference}. Raises RuntimeError if the log-probs
        differ too much.
        """

"""Protocols of the parts of a weight sync: the trainer, the engines, and a comparison of their outputs."""

from typing import Protocol

import ray

from grpo_megatron.cluster.processes import Calls, Process
from grpo_megatron.weights.sync.messages import SyncCommand


class EnginesLost(Exception):
    """Error of a weight sync in which engines have died. The sync can be repeated with the other engines.

    The engines that died have already been reported to WeightTarget.lost.
    """


class WeightSource(Protocol):
    """Interface of the trainer in a weight sync. trainer.weights.TrainerWeights implements it.

    processes: one process per trainer rank.
    """

    processes: list[Process]

    def send_weights(self, command: SyncCommand) -> Calls:
        """Make every trainer rank carry out its side of a weight-sync command.

        Return the calls to the ranks without waiting. The result of each call is the rank's SyncReport.
        """


class WeightTarget(Protocol):
    """Interface of the engines in a weight sync. sglang.pool.EnginePool implements it.

    Between `begin_update` and `end_update` the engines serve no requests. If anything fails in between, the
    engines' weights are undefined, and the engines must not serve again.

    members: (index, number of starts) of each engine that takes part in the update. The number of starts
        shows that an engine was restarted, and so lacks the weights of earlier syncs.
    processes: one process per engine of `members`, in the same order.
    nodes: node of each engine rank: all ranks of the first engine of `members`, then those of the second, ...
    waits_for_weights: True if no engine serves requests, but a restarted engine could serve if it got the
        weights.
    """

    processes: list[Process]
    members: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]
    waits_for_weights: bool

    def begin_update(self, again: bool = False) -> None:
        """Begin an update of the weights. No engine serves requests until `end_update`.

        again: True to continue the update that is in progress. Engines that were lost since the update began
            no longer take part. Engines that were restarted take part.
        """

    def receive_weights(self, command: SyncCommand) -> list[ray.ObjectRef]:
        """Make every engine carry out its side of a weight-sync command.

        Return one Ray reference per engine, in the order of `members`. Its value is a list with the
        SyncReport of each rank of the engine, in rank order.
        """

    def lost(self, index: int, starts: int, error: Exception) -> None:
        """Remove an engine that has died or has wrong weights.

        Raises `error` if the run cannot go on without the engine.

        index: index of the engine among all engines.
        starts: number of starts of the engine, as in `members`.
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

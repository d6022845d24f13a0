"""Forwarders: processes that pass a call of the driver on to all ranks of a node.

A Ray call costs the driver a third of a millisecond of CPU time (benchmarks/controller.py). With a forwarder
on each node, a call to all ranks takes one Ray call for each node.
"""

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_megatron.cluster.processes import ForwardedAnswer, ForwardedCall, Process, redirect_output


@ray.remote
class _ForwarderProcess:
    """Ray actor that passes a call of the driver on to all ranks of a node.

    `Forwarder` is the driver's handle for this process.
    """

    def __init__(self, log: str, workers: dict[int, ray.actor.ActorHandle]):
        redirect_output(log)
        self._workers = workers

    def call(self, method: str, arguments: dict[int, tuple], timeout: float) -> ForwardedAnswer:
        """Call a method of the ranks. Wait until all have finished, one has failed, or the time is over.

        method: name of a method of the ranks' actors.
        arguments: {rank: tuple of positional arguments}. An argument may be a Ray reference. The rank then
            gets the object itself, from the object store of its node.
        timeout: seconds to wait at most.

        Returns the results of the ranks that have finished, and Ray's references to the results of all other
        ranks.
        """
        deadline = time.monotonic() + timeout
        others = {rank: getattr(self._workers[rank], method).remote(*own) for rank, own in arguments.items()}
        rank_of = {reference: rank for rank, reference in others.items()}
        results: dict[int, Any] = {}
        while others:
            left = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(list(others.values()), num_returns=1, timeout=left)
            if not ready:
                break
            try:
                results[rank_of[ready[0]]] = ray.get(ready[0])
            except Exception:  # the driver gets the same error by the reference
                break
            del others[rank_of[ready[0]]]
        return ForwardedAnswer(results, others)


class Forwarder:
    """The driver's handle of a forwarder, the process that passes calls on to all ranks of a node."""

    def __init__(self, process: Process, node: str, workers: dict[int, ray.actor.ActorHandle]):
        """Start the forwarder's process on the node of its ranks.

        process: name and log of the process.
        node: id of the Ray node of the ranks.
        workers: {rank: Ray's handle} for the ranks of this node.
        """
        self._process, self._ranks = process, tuple(workers)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        self._actor = _ForwarderProcess.options(num_cpus=0, scheduling_strategy=where).remote(
            process.log, workers
        )

    def call(self, method: str, arguments: Sequence[tuple], timeout: float) -> ForwardedCall:
        """Call a method of the ranks of this node, without waiting. processes.gather waits for the answer.

        method: name of a method of the ranks' actors.
        arguments: positional arguments of each rank of the whole group, in rank order.
        timeout: seconds after which the forwarder answers even if ranks have not finished.
        """
        own = {rank: arguments[rank] for rank in self._ranks}
        return ForwardedCall(self._actor.call.remote(method, own, timeout), self._process)

    def close(self) -> None:
        """Kill the process, without waiting."""
        ray.kill(self._actor)

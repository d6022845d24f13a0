"""Groups of processes that compute together, such as the ranks of a distributed model.

A group starts, calls, watches and restarts its processes together. It does not know what they compute: every
process builds one object, and calls go to the methods of this object or of its attributes.
"""

import gc
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import ray

from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.memory import occupied
from grpo_megatron.cluster.processes import Process, gather, redirect_output
from grpo_megatron.cluster.store import StoreAddress, StoreServer

# Function that is called in each process with the rank, the store by which the ranks find each other, and the
# Heartbeat. It returns the object that calls go to, and a value that the group keeps for this rank.
Build = Callable[[int, StoreAddress, Heartbeat], tuple[Any, Any]]


@ray.remote
class _Worker:
    """The process of one rank: a Ray actor with a Heartbeat and the object whose methods are called."""

    def __init__(self, log: str):
        redirect_output(log)
        self._heartbeat = Heartbeat()
        self._heartbeat.start()

    def serve_store(self, timeout: float) -> StoreAddress:
        """Start the key-value store by which all ranks find each other, and return its address.

        Only rank 0 serves the store.

        timeout: seconds that a request to the store may wait for its answer.
        """
        self._store = StoreServer(ray.util.get_node_ip_address(), timeout)
        return self._store.address

    def build(self, build: Build, rank: int, store: StoreAddress) -> Any:
        with self._heartbeat.phase("start"):
            self._target, info = build(rank, store, self._heartbeat)
            gc.freeze()  # imported objects stay, so garbage collection need not scan them
        self._heartbeat.role = str(info)
        return info

    def call(self, method: str, *arguments) -> Any:
        with self._heartbeat.phase(method):
            return attrgetter(method)(self._target)(*arguments)

    def call_shared(self, method: str, arguments: tuple) -> Any:
        return self.call(method, *arguments)

    def beat(self) -> None:
        """Send a heartbeat now. The hang detector calls this, for example to find out if the rank lives."""
        self._heartbeat.beat()

    def occupied(self) -> int:
        return occupied()


class WorkerGroup:
    """A group of processes that are called together, such as the ranks of the trainer.

    Methods wait until all ranks are done, except `submit` and `close`. If a rank fails, dies or takes too
    long, they raise the errors of cluster.processes.gather.

    ranks: for each rank, the second value that `build` returned, such as the rank's parallel coordinates
    """

    def __init__(
        self,
        name: str,
        options: list[dict],
        log_dir: str,
        build: Build,
        timeout: float,
        hang_detector: HangDetector,
    ):
        """Start one process for each element of `options`, and build their objects.

        name: name of one process in messages, such as `trainer rank`
        options: Ray's actor options of each rank's process, which bind it to a device
        log_dir: folder of the processes' logs
        build: called in every process. Returns the object that calls go to, and a value for `ranks`.
        timeout: time limit of each call in seconds
        hang_detector: watches all processes of the group
        """
        size = len(options)
        self.processes = [
            Process(f"{name} {rank} of {size}", f"{log_dir}/rank{rank}.log") for rank in range(size)
        ]
        self._options, self._build, self._timeout, self._hang_detector = (
            options,
            build,
            timeout,
            hang_detector,
        )
        self._workers: list = []
        self.ranks: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start all processes and build their objects. Raises RuntimeError if they run already."""
        if self._workers:
            raise RuntimeError("the processes of this group are already running")
        try:
            for options, process in zip(self._options, self.processes, strict=True):
                self._workers.append(_Worker.options(**options).remote(process.log))
                self._hang_detector.add(process, self._workers[-1])
            store = self._gather({0: self._workers[0].serve_store.remote(self._timeout)}, "start")[0]
            started = {
                rank: worker.build.remote(self._build, rank, store)
                for rank, worker in enumerate(self._workers)
            }
            self.ranks = list(self._gather(started, "start").values())
        except BaseException:
            self.close()  # the caller has no handle to end the processes
            raise

    def restart(self) -> None:
        """Kill the remaining processes and start all of them anew. The state of the objects is lost."""
        self.close()
        self.start()

    def submit(self, method: str, *arguments) -> list[ray.ObjectRef]:
        """Call `method` on every rank with the same arguments, without waiting for the results.

        method: name of a method of the object that `build` made, such as `close`, or of an attribute of this
            object, such as `passes.scores`.

        Returns Ray's references to the results, in rank order.
        """
        return [worker.call.remote(method, *arguments) for worker in self._workers]

    def call(
        self, method: str, arguments: list[tuple] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `method` on every rank, wait, and return all results in rank order.

        method: name of a method of the object that `build` made, or of an attribute of this object, such as
            `passes.logprobs`.
        arguments: a tuple of positional arguments for each rank. If None, the method gets no arguments.
        timeout: seconds to wait for all ranks. If None, the group's timeout holds.
        """
        arguments = [()] * len(self._workers) if arguments is None else arguments
        pairs = enumerate(zip(self._workers, arguments, strict=True))
        calls = {rank: worker.call.remote(method, *own) for rank, (worker, own) in pairs}
        return list(self._gather(calls, method, timeout).values())

    def call_shared(self, method: str, arguments: list[ray.ObjectRef]) -> list[Any]:
        """Call `method` on every rank as `call` does, with arguments that ranks share.

        Ray serializes an argument anew for each rank, but not one that is in its object store.

        arguments: for each rank, Ray's reference to a tuple of positional arguments.
        """
        pairs = enumerate(zip(self._workers, arguments, strict=True))
        calls = {rank: worker.call_shared.remote(method, own) for rank, (worker, own) in pairs}
        return list(self._gather(calls, method).values())

    def occupied(self) -> list[int]:
        """Return how many bytes each rank has reserved on its GPU, or uses on a host without GPU."""
        return list(
            self._gather(
                {rank: worker.occupied.remote() for rank, worker in enumerate(self._workers)}, "occupied"
            ).values()
        )

    def _gather(
        self, references: dict[int, ray.ObjectRef], call: str, timeout: float | None = None
    ) -> dict[int, Any]:
        return gather(references, self.processes, call, self._timeout if timeout is None else timeout)

    def close(self) -> None:
        """Kill all processes, without waiting."""
        for worker in self._workers:
            self._hang_detector.remove(worker)
            ray.kill(worker)
        self._workers = []

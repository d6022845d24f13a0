"""Groups of processes that compute together, such as the ranks of a distributed model.

A group starts, calls, watches and restarts its processes together. It does not know what they compute: every
process builds one object, and calls go to the methods of this object or of its attributes.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import ray

from grpo_megatron.cluster.forwarder import Forwarder
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.heartbeat import Heartbeat
from grpo_megatron.cluster.memory import occupied
from grpo_megatron.cluster.processes import Calls, Process, gather, redirect_output
from grpo_megatron.cluster.store import StoreAddress, StoreServer

# Function that is called in each process with the rank, the store by which the ranks find each other, and the
# Heartbeat. It returns the object that calls go to, and a value that the group keeps for this rank.
Build = Callable[[int, StoreAddress, Heartbeat], tuple[Any, Any]]
# Number of ranks from which a group has forwarders. In a smaller group the driver calls every rank itself,
# which is quicker and needs fewer processes.
FORWARDED_FROM = 64


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

    ranks: one value for each rank, such as its parallel coordinates. The function `build`, which makes the
        rank's object, has returned it.
    """

    def __init__(
        self,
        name: str,
        options: list[dict],
        nodes: Sequence[str],
        log_dir: str,
        build: Build,
        timeout: float,
        hang_detector: HangDetector,
    ):
        """Start one process for each element of `options`, and build their objects.

        name: name of one process in messages, such as `trainer rank`
        options: Ray's actor options of each rank's process, which bind it to a device
        nodes: id of the Ray node of each rank's process
        log_dir: folder of the processes' logs
        build: called in every process with the rank, the store by which the ranks find each other, and the
            process's Heartbeat. Returns the object that calls go to, and a value for `ranks`.
        timeout: time limit of each call in seconds
        hang_detector: watches all processes of the group
        """
        size = len(options)
        self.processes = [
            Process(f"{name} {rank} of {size}", f"{log_dir}/rank{rank}.log") for rank in range(size)
        ]
        self._options, self._nodes, self._log_dir = options, nodes, log_dir
        self._name, self._build, self._timeout, self._hang_detector = name, build, timeout, hang_detector
        self._workers: list = []
        self._forwarders: list[Forwarder] = []
        self._called_directly: list[int] = []  # the ranks without forwarder
        self.ranks: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start all processes and build their objects. If this fails, kill the processes.

        Raises RuntimeError if the processes run already.
        """
        if self._workers:
            raise RuntimeError("the processes of this group are already running")
        try:
            for options, process in zip(self._options, self.processes, strict=True):
                self._workers.append(_Worker.options(**options).remote(process.log))
                self._hang_detector.add(process, self._workers[-1])
            self._start_forwarders()
            served = {0: self._workers[0].serve_store.remote(self._timeout)}
            store = gather(served, self.processes, "start", self._timeout)[0]
            build = ray.put(self._build)
            self.ranks = self._on_all(
                "build", [(build, rank, store) for rank in range(len(self._workers))], "start"
            )
        except BaseException:
            self.close()  # the caller has no handle to end the processes
            raise

    def _start_forwarders(self) -> None:
        """Start a forwarder on each node that has several ranks, if the group is large.

        A forwarder is a process that passes a call of the driver on to all ranks of its node.
        """
        of_nodes = defaultdict(list)
        for rank, node in enumerate(self._nodes):
            of_nodes[node].append(rank)
        is_large = len(self._nodes) >= FORWARDED_FROM
        forwarded = {node: ranks for node, ranks in of_nodes.items() if is_large and len(ranks) > 1}
        for number, (node, ranks) in enumerate(forwarded.items()):
            process = Process(
                f"forwarder of {self._name} {ranks[0]} and {len(ranks) - 1} more",
                f"{self._log_dir}/forwarder{number}.log",
            )
            workers = {rank: self._workers[rank] for rank in ranks}
            self._forwarders.append(Forwarder(process, node, workers))
        self._called_directly = [rank for rank, node in enumerate(self._nodes) if node not in forwarded]

    def restart(self) -> None:
        """Kill the remaining processes and start all of them anew. The state of the objects is lost."""
        self.close()
        self.start()

    def submit(self, method: str, *arguments) -> Calls:
        """Call `method` on every rank with the same arguments, without waiting for the results.

        method: name of a method of the object that `build` made, such as `close`, or of an attribute of this
            object, such as `passes.scores`.

        Returns the calls in progress, for processes.gather.
        """
        return self._submit("call", [(method, *arguments)] * len(self.processes), self._timeout)

    def call(
        self, method: str, arguments: list[tuple] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `method` on every rank, wait, and return all results in rank order.

        method: name of a method of the object that `build` made, or of an attribute of this object, such as
            `passes.logprobs`.
        arguments: a tuple of positional arguments for each rank. If None, the method gets no arguments.
        timeout: seconds to wait for all ranks. If None, the group's timeout holds.
        """
        arguments = [()] * len(self.processes) if arguments is None else arguments
        return self._on_all("call", [(method, *own) for own in arguments], method, timeout)

    def call_shared(self, method: str, arguments: list[ray.ObjectRef]) -> list[Any]:
        """Call `method` on every rank, wait, and return all results in rank order.

        Unlike `call`, this method takes the arguments from Ray's object store. If several ranks get the same
        arguments, these are serialized only once.

        arguments: for each rank, Ray's reference to a tuple of positional arguments.
        """
        return self._on_all("call_shared", [(method, own) for own in arguments], method)

    def occupied(self) -> list[int]:
        """Return how many bytes each rank has reserved on its GPU, or uses on a host without GPU."""
        return self._on_all("occupied", [()] * len(self.processes), "occupied")

    def _on_all(
        self, method: str, arguments: list[tuple], call: str, timeout: float | None = None
    ) -> list[Any]:
        """Call a method of the ranks' actors, wait, and return all results in rank order.

        method: name of a method of _Worker.
        arguments: a tuple of positional arguments for each rank.
        call: name of the call, for messages.
        timeout: seconds to wait for all ranks. If None, the group's timeout holds.
        """
        timeout = self._timeout if timeout is None else timeout
        calls = self._submit(method, arguments, timeout)
        return list(gather(calls.references, self.processes, call, timeout, calls.forwarded).values())

    def _submit(self, method: str, arguments: list[tuple], timeout: float) -> Calls:
        """Call a method of the ranks' actors, without waiting. Return the calls in progress.

        The ranks of a node with a forwarder are called through it: a process that passes the call on to them.

        method: name of a method of _Worker.
        arguments: a tuple of positional arguments for each rank.
        timeout: seconds after which forwarders answer even if ranks have not finished.
        """
        direct = {
            rank: getattr(self._workers[rank], method).remote(*arguments[rank])
            for rank in self._called_directly
        }
        forwarded = [forwarder.call(method, arguments, timeout) for forwarder in self._forwarders]
        return Calls(direct, forwarded)

    def close(self) -> None:
        """Kill all processes, without waiting."""
        for forwarder in self._forwarders:
            forwarder.close()
        for worker in self._workers:
            self._hang_detector.remove(worker)
            ray.kill(worker)
        self._forwarders, self._workers, self._called_directly = [], [], []

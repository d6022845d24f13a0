"""Processes that compute as one, such as the ranks of a distributed model: started, called, watched, restarted together.

What they compute is somebody else's: every process builds one object, and calls go to its methods.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from grpo_megatron.cluster.heart import Heart
from grpo_megatron.cluster.memory import occupied
from grpo_megatron.cluster.processes import Process, fetch, gather, redirect_output
from grpo_megatron.cluster.store import StoreAddress, StoreServer
from grpo_megatron.cluster.watch import Watch

# (rank, the store by which the ranks find each other, the process's heart) -> (the object that calls go to, what the group keeps of
# this rank)
Build = Callable[[int, StoreAddress, Heart], tuple[Any, Any]]


@ray.remote
class _Worker:
    """One rank in its own process."""

    def __init__(self, log: str):
        redirect_output(log)
        self._heart = Heart()
        self._heart.start()

    def serve_store(self, timeout: float) -> StoreAddress:
        """Where all ranks meet; on rank 0."""
        self._store = StoreServer(ray.util.get_node_ip_address(), timeout)
        return self._store.address

    def build(self, build: Build, rank: int, store: StoreAddress) -> Any:
        with self._heart.phase("start"):
            self._target, info = build(rank, store, self._heart)
            gc.freeze()  # what was imported stays; no collection need walk through it
        self._heart.role = str(info)
        return info

    def call(self, method: str, *arguments) -> Any:
        with self._heart.phase(method):
            return getattr(self._target, method)(*arguments)

    def beat(self) -> None:
        """Tell the driver's watch what was done until now."""
        self._heart.beat()

    def occupied(self) -> int:
        return occupied()

    def stream(self, method: str, *arguments) -> Iterator[Any]:
        with self._heart.phase(method):
            yield from getattr(self._target, method)(*arguments)


class WorkerGroup:
    """Every method returns when all ranks are done, and raises if one of them failed, died or took too long.

    ranks: what each rank's `build` said of itself.
    """

    def __init__(
        self, name: str, options: list[dict], log_dir: str, build: Build, timeout: float, watch: Watch
    ):
        """name: of one process in messages, such as `trainer rank`. options: Ray's for each process, see
        placement.Cluster.options. build: runs in every process. timeout: most seconds of any one call. watch: is told of all processes."""
        world = len(options)
        self.processes = [
            Process(f"{name} {rank} of {world}", f"{log_dir}/rank{rank}.log") for rank in range(world)
        ]
        self._options, self._build, self._timeout, self._watch = options, build, timeout, watch
        self._workers: list = []
        self.ranks: list[Any] = []
        self.start()

    def start(self) -> None:
        """Start all processes and build their objects. Raises RuntimeError if they run already."""
        if self._workers:
            raise RuntimeError("the processes of this group run already")
        try:
            for options, process in zip(self._options, self.processes, strict=True):
                self._workers.append(_Worker.options(**options).remote(process.log))
                self._watch.add(process, self._workers[-1])
            store = self._gather({0: self._workers[0].serve_store.remote(self._timeout)}, "start")[0]
            started = {
                rank: worker.build.remote(self._build, rank, store)
                for rank, worker in enumerate(self._workers)
            }
            self.ranks = list(self._gather(started, "start").values())
        except BaseException:
            self.close()  # nobody else knows of them
            raise

    def restart(self) -> None:
        """End what is left of the processes, and start the group anew; nothing of its state survives."""
        self.close()
        self.start()

    def submit(self, method: str, *arguments) -> list[ray.ObjectRef]:
        """Call `method` on every rank with the same arguments, and return at once; references in the order of ranks."""
        return [worker.call.remote(method, *arguments) for worker in self._workers]

    def call(
        self, method: str, arguments: list[tuple] | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Call `method` on every rank, with the arguments of each (none: without); all results, in the order of ranks.

        timeout: in seconds, if not the group's.
        """
        arguments = [()] * len(self._workers) if arguments is None else arguments
        pairs = enumerate(zip(self._workers, arguments, strict=True))
        calls = {rank: worker.call.remote(method, *own) for rank, (worker, own) in pairs}
        return list(self._gather(calls, method, timeout).values())

    def occupied(self) -> list[int]:
        """Bytes that each rank's process occupies, see memory.occupied."""
        return list(
            self._gather(
                {rank: worker.occupied.remote() for rank, worker in enumerate(self._workers)}, "occupied"
            ).values()
        )

    def _gather(
        self, references: dict[int, ray.ObjectRef], call: str, timeout: float | None = None
    ) -> dict[int, Any]:
        return gather(references, self.processes, call, self._timeout if timeout is None else timeout)

    @contextmanager
    def stream(self, method: str, *arguments) -> Iterator[Iterator[ray.ObjectRef]]:
        """Within this context: references to what the ranks' generators `method` yield, rank by rank, made as they are taken.

        The bytes stay in the object store; the driver only passes references on. All must be taken. A
        rank that failed is named also where the consumer stumbled over its item first.
        """
        # Held back to two items a rank: else all of them would lie in the object store.
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2}
        streams = [worker.stream.options(**options).remote(method, *arguments) for worker in self._workers]
        ended = {stream.completed(): rank for rank, stream in enumerate(streams)}
        try:
            yield itertools.chain.from_iterable(streams)
        except Exception:
            ready, _ = ray.wait(list(ended), num_returns=len(ended), timeout=5.0)
            for reference in ready:
                fetch(reference, self.processes[ended[reference]], method)
            raise
        self._gather({rank: reference for reference, rank in ended.items()}, method)

    def close(self) -> None:
        """End all processes; nothing is waited for."""
        for worker in self._workers:
            self._watch.remove(worker)
            ray.kill(worker)
        self._workers = []

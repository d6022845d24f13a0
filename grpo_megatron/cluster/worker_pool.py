"""Pools of processes, on all nodes, that run code from outside the package, such as reward functions.

If a process hangs or crashes, only the call that caused it fails. Each worker is a Ray actor that holds one
object. Waiting calls are sent to the worker together, because one Ray call costs as much as many cheap
rewards. A worker that finishes many calls at a time gets its next batch early, so that it need not wait for
the driver. A call whose process has died is tried once more, alone in a new process. If the new process also
dies, the call is assumed to be the cause.
"""

import asyncio
import logging
import math
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from grpo_megatron.cluster.pool_worker import BatchLost, Bounds, Place, Worker
from grpo_megatron.cluster.processes import Process
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.logs import Rarely

logger = logging.getLogger(__name__)

_LARGEST_BATCH = 256


class WorkerDied(ProcessLost):
    """A call failed because its worker process died. It was not retried, or the second try failed too."""


class WorkerHangs(UserError):
    """A call exceeded its time limit and could not be interrupted, so its process was killed."""


def worker_places(nodes: Sequence[str], per_node: int, log_dir: str, role: str = "reward") -> list[Place]:
    """Assign a node, a name and a log file to each worker of a pool.

    Consecutive workers are on different nodes, if there are several.

    nodes: ids of the Ray nodes that the workers run on.
    per_node: number of workers on each node.
    role: prefix of the names and logs of the workers. No two pools of a run may have the same prefix.
    """
    found = [node for _ in range(per_node) for node in nodes]
    return [
        Place(Process(f"{role} worker {n}", f"{log_dir}/{role}_worker{n}.log"), node)
        for n, node in enumerate(found)
    ]


@dataclass(eq=False)
class _Job:
    """A call that waits in the queue or has been sent to a worker in a batch."""

    item: Any
    future: asyncio.Future | None  # receives the result; None: no caller waits for it
    alone: bool = False  # the call must be alone in its batch, because a process has died in it once

    @property
    def is_forgotten(self) -> bool:
        return self.future is not None and self.future.done()

    def answer(self, result: Any) -> None:
        if self.future and not self.future.done():
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        if self.future and not self.future.done():
            self.future.set_exception(error)


class WorkerPool:
    """A pool of worker processes, with a queue of calls that the workers execute in order."""

    def __init__(
        self, what: str, build: Callable[[], Any], bounds: Bounds, places: Sequence[Place], again: bool = True
    ):
        """Start a worker process at each place.

        what: name of what runs in the workers, such as `reward math`, for messages.
        build: makes the object that executes calls. It is called once in each worker process.
        bounds: limits of time, memory and file size for the user's code.
        places: node, name and log of each worker.
        again: True if a call is tried once more after its process has died. It must be False if calls depend
            on the state that earlier calls have left in the process, such as the state of an environment.
        """
        self._again, self._warn = again, Rarely(logger)
        reference = ray.put(build)  # once for all workers, because it may hold a tokenizer
        self._all = tuple(Worker(what, place, reference, bounds) for place in places)
        self._loop: asyncio.AbstractEventLoop | None = None  # event loop of the callers
        self._waiting: deque[_Job] = deque()
        self._running: set[asyncio.Task] = set()
        self._most = 1  # most calls of a batch; grows as long as workers finish whole batches in time

    async def call(self, item: Any) -> Any:
        """Have a worker's object work on one item, and return the result.

        Many calls may wait at the same time, all in one event loop.

        Raises WorkerDied or WorkerHangs if the worker's process died or hung and this call is assumed to be
        the cause, or if the pool does not retry calls. Raises ProcessLost if a worker does not start. Errors
        of the worker's object are passed on.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(item, future))
        if self._loop is not future.get_loop():
            # An event loop that has ended may have left unfinished tasks, which never release their workers.
            self._loop = future.get_loop()
            self._running.clear()
            for worker in self._all:
                worker.forget()
        self._loop.call_soon(self._dispatch)  # later, so that calls made until then join the batch
        return await future

    def tell(self, item: Any) -> None:
        """Queue an item for a worker without waiting for a result, such as a request to close an environment.

        The item may wait until the next `call`. Its result and its errors are ignored.
        """
        self._waiting.append(_Job(item, None))

    def _dispatch(self) -> None:
        while self._waiting:
            if self._waiting[0].is_forgotten:
                self._waiting.popleft()
                continue
            worker = min(self._all, key=lambda one: (one.busy, not one.takes_more))
            if worker.busy and not (
                worker.busy == 1 and worker.takes_more and self._most > 1 and not self._waiting[0].alone
            ):
                return
            if jobs := self._next_batch():
                worker.busy += 1
                worker.is_for_one = jobs[0].alone
                task = self._loop.create_task(self._run(worker, jobs))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _next_batch(self) -> list[_Job]:
        """Take the next batch of calls from the queue.

        A call that is retried is alone in its batch. Calls whose callers no longer wait are dropped, so the
        batch may be empty.
        """
        idle = sum(not worker.busy for worker in self._all) or len(self._all)
        share = max(1, min(self._most, math.ceil(len(self._waiting) / idle)))
        jobs: list[_Job] = []
        while (
            self._waiting and len(jobs) < share and not (jobs and (jobs[0].alone or self._waiting[0].alone))
        ):
            job = self._waiting.popleft()
            if not job.is_forgotten:
                jobs.append(job)
        return jobs

    async def _run(self, worker: Worker, jobs: list[_Job]) -> None:
        loop = self._loop
        try:
            results = pickle.loads(await worker.work(pickle.dumps([job.item for job in jobs])))
        except BatchLost as lost:
            self._blame(jobs, lost)
        except Exception as error:
            for job in jobs:
                job.fail(error)
        else:
            for job, result in zip(jobs, results, strict=False):
                job.answer(result)
            self._waiting.extendleft(reversed(jobs[len(results) :]))
            if len(results) < len(jobs):
                # Not below half: the worker may only have had to wait for its core.
                self._most = max(1, len(results), self._most // 2)
            elif len(jobs) == self._most:
                self._most = min(2 * self._most, _LARGEST_BATCH)
        finally:
            if self._loop is loop:
                worker.busy -= 1
        self._dispatch()

    def _blame(self, jobs: list[_Job], lost: BatchLost) -> None:
        """Queue the calls of a batch again after its process was lost, or let them fail.

        If the pool does not retry calls (`again`), all calls of the batch fail. Otherwise a call fails only
        if it must have been the cause of the loss: it was alone in its batch, and either it hung or this was
        its second try. Any other call is queued again. If the process had begun the batch, each of these
        calls then gets a last try, alone in a batch.

        jobs: the calls of the batch.
        lost: says how the process ended, and whether it had begun this batch.
        """
        if not lost.begun and self._again:
            self._waiting.extendleft(reversed(jobs))
            return
        certain = len(jobs) == 1 and (jobs[0].alone or lost.hung)
        if certain or not self._again:
            for job in jobs:
                job.fail((WorkerHangs if lost.hung else WorkerDied)(str(lost)))
            return
        self._warn(f"{lost}; the calls that it was working on are retried once")
        for job in jobs:
            job.alone = True
        self._waiting.extendleft(reversed(jobs))

    def close(self) -> None:
        """Kill all processes, without waiting."""
        for worker in self._all:
            worker.close()

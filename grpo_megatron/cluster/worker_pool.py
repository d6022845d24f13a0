"""Processes that run code from outside the package, on all nodes: what hangs or dies there costs the one call that is to blame.

Each is a Ray actor that holds one object. Calls that wait go to it together, because a Ray call costs as much as many cheap rewards.
A worker that is done with many calls at a time gets its next ones before, so that it need not wait for the driver.
A call whose process has died is tried once more, alone in a new process: only who then takes it down again is to blame.
"""

import asyncio
import contextlib
import faulthandler
import math
import os
import pickle
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_megatron.cluster.last_words import killed_by_ray
from grpo_megatron.cluster.processes import Process, process_error, redirect_output
from grpo_megatron.cluster.ray_errors import LOST
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.monitoring.terminal import Rarely

# What a worker may take to start: the imports of what it runs.
_START_SECONDS = 120.0
# How often a worker may die while it starts.
_STARTS = 2
# A worker begins no further call of a batch after this time, so that one who waits for a cheap call does not wait for dear ones.
_BATCH_SECONDS = 0.1
_LARGEST_BATCH = 256
# What a call has over its time limit, which ends what is Python, until its process is ended.
_GRACE_SECONDS = 3.0
# Until the driver ends a process that does not even end itself, such as one that was stopped.
_PATIENCE_SECONDS = 30.0


class WorkerDied(ProcessLost):
    """The process of a call died; that of its second trial too, where there is one."""


class WorkerHangs(UserError):
    """A call did not return, and could not be interrupted: its process was ended."""


@dataclass(frozen=True)
class Place:
    """Of one worker: how messages call it, and where its log is; the id of its Ray node."""

    process: Process
    node: str


def worker_places(nodes: Sequence[str], per_node: int, log_dir: str, role: str = "reward") -> list[Place]:
    """nodes: ids of Ray's nodes. Workers that follow each other are on different nodes. role: of this pool alone, for names and logs."""
    found = [node for _ in range(per_node) for node in nodes]
    return [
        Place(Process(f"{role} worker {n}", f"{log_dir}/{role}_worker{n}.log"), node)
        for n, node in enumerate(found)
    ]


@dataclass(frozen=True)
class Bounds:
    """Of what a worker's code may take. seconds: of one call. memory: bytes beyond what the process has when it is ready; file: bytes of
    one file; None: no bound."""

    seconds: float
    memory: int | None = None
    file: int | None = None

    def apply(self) -> None:
        """To this process and all that it starts; the seconds are each call's own."""
        if self.memory is not None:
            # What is private and can be written. RLIMIT_AS would count Ray's object store too, which every worker maps.
            _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + self.memory)
        if self.file is not None:
            _limit(resource.RLIMIT_FSIZE, self.file)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


# -- in the processes ---------------------------------------------------------------------------


@ray.remote
class PoolWorker:
    """Holds what `build` makes: an object with `work(items, seconds)`, which returns what came of the first items, of as many as it
    could begin within these seconds but at least of one. It may have an attribute `is_worn`: whether another process is to take the
    place of this one; it may return less then, but not in its first call."""

    def __init__(self, log: str):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes the pool
        redirect_output(log)

    def start(self, build: Callable[[], Any], folder: str, bounds: Bounds) -> None:
        """folder: the driver's working directory, where modules and files are looked for."""
        with contextlib.suppress(OSError):  # this node may not have it
            os.chdir(folder)
        if "" not in sys.path:
            sys.path.insert(0, "")
        self._target, self._bounds = build(), bounds
        bounds.apply()

    def work(self, items: bytes) -> tuple[bytes, bool]:
        """The results, and whether this process is worn."""
        self._shorten_log()
        # Ends this process even in code that never returns to Python, and says in the log where it is.
        faulthandler.dump_traceback_later(
            _BATCH_SECONDS + self._bounds.seconds + _GRACE_SECONDS, exit=True, file=2
        )
        try:
            results = self._target.work(pickle.loads(items), _BATCH_SECONDS)
            return pickle.dumps(results), getattr(self._target, "is_worn", False)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _shorten_log(self) -> None:
        """The log is a file under the limit, too. Once it was full, every reward that prints would fail, in the next process as well."""
        if self._bounds.file is not None and os.fstat(1).st_size > self._bounds.file // 2:
            os.ftruncate(1, 0)


# -- in the driver ------------------------------------------------------------------------------


class _Lost(Exception):
    """The process is gone, and another is in its place. begun: it was at this batch. hung: because it did not return."""

    def __init__(self, begun: bool, hung: bool, text: str):
        super().__init__(text)
        self.begun, self.hung = begun, hung


class _Worker:
    """One worker as the driver sees it: started, asked, replaced where it died."""

    def __init__(self, what: str, place: Place, build: ray.ObjectRef, bounds: Bounds):
        self._what, self._place, self._build, self._bounds = what, place, build, bounds
        self._longest = _BATCH_SECONDS + bounds.seconds + _GRACE_SECONDS
        self.busy = 0  # batches that it has
        self.is_for_one = False  # whether the last of them is a call that is tried alone
        self._asked: list[ray.ObjectRef] = []  # in their order, the first of which it is at
        self._forgotten: list[ray.ObjectRef] = []
        self._guilty: ray.ObjectRef | None = None  # what it was at when it was lost
        self._answered = 0.0  # when it was last done with a batch, by time.monotonic
        self._start()

    @property
    def takes_more(self) -> bool:
        """Whether it can have its next batch now: it is ready, and not at a call that is tried alone. The answer to that one would be lost
        with the process, which then died of the next, and it would have the blame."""
        return self._starting is None and not self._forgotten and not self.is_for_one

    def _start(self) -> None:
        where = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
        self._actor = PoolWorker.options(num_cpus=0, scheduling_strategy=where).remote(
            self._place.process.log
        )
        self._starting: ray.ObjectRef | None = self._actor.start.remote(
            self._build, os.getcwd(), self._bounds
        )

    def forget(self) -> None:
        """Nobody waits any more for what it has."""
        self.busy, self._forgotten = 0, list(self._asked)

    async def work(self, items: bytes) -> bytes:
        """Raises _Lost, ProcessLost if it cannot be started, or what the work raised. The first one of several at a time makes it ready."""
        while self._forgotten:
            with contextlib.suppress(Exception):  # nobody wants to know any more
                await self._answer(self._forgotten.pop(0))
        await self._started()
        actor = self._actor
        asked = actor.work.remote(items)
        self._asked.append(asked)
        results, is_worn = await self._answer(asked)
        if is_worn and actor is self._actor:  # it may have said so with its other batch, too
            self._replace(None)
        return results

    async def _started(self) -> None:
        for trial in range(_STARTS):
            if self._starting is None:
                return
            try:
                await asyncio.wait_for(_fetched(self._starting, self._place.process, "start"), _START_SECONDS)
                self._starting = None
            except LOST as error:
                if trial == _STARTS - 1:
                    raise self._place.process.died("start", error) from error
                self._start()
            except asyncio.TimeoutError as error:
                self.close()
                raise ProcessLost(
                    f"{self._place.process.name} did not start within {_START_SECONDS:.0f} s; its log is {self._place.process.log}"
                ) from error

    def _replace(self, guilty: ray.ObjectRef | None) -> None:
        """Another process, and nothing asked of it yet. guilty: see _guilty."""
        self._guilty, self._asked = guilty, []
        self.close()
        self._start()

    async def _answer(self, reference: ray.ObjectRef) -> tuple[bytes, bool]:
        asked, patience = time.monotonic(), self._longest * len(self._asked) + _PATIENCE_SECONDS
        try:
            answer = await asyncio.wait_for(_fetched(reference, self._place.process, "work"), patience)
        except (*LOST, asyncio.TimeoutError) as error:
            if reference in self._asked:  # else who waited for its other batch has done this already
                self._replace(self._asked[0])
            begun = reference == self._guilty
            # It was not at this one before it was done with the one before.
            hung = (
                begun
                and time.monotonic() - max(asked, self._answered) >= self._bounds.seconds + _GRACE_SECONDS
            )
            raise _Lost(begun, hung, self._text(hung, error)) from error
        except Exception:
            self._done(reference)
            raise
        self._done(reference)
        return answer

    def _done(self, reference: ray.ObjectRef) -> None:
        # A large answer comes a while after it was given, and the process may have been lost at its next batch by then.
        if reference in self._asked:
            self._asked.remove(reference)
            self._answered = time.monotonic()

    def _text(self, hung: bool, error: Exception) -> str:
        log = f"its log is {self._place.process.log}"
        if hung:
            return (
                f"{self._what} did not return within reward.timeout={self._bounds.seconds} s, and cannot be interrupted; its process "
                f"({self._place.process.name}) was ended, {log}"
            )
        how = killed_by_ray(error) or " (out of memory, killed, or it called exit)"
        return f"{self._what}: its process ({self._place.process.name}) died{how}; {log}"

    def close(self) -> None:
        ray.kill(self._actor)


async def _fetched(reference: ray.ObjectRef, process: Process, call: str) -> Any:
    """Return the answer. Raises what the code there raised, see process_error.

    The loss of a process as Ray reports it.
    """
    try:
        return await reference
    except RayTaskError as error:
        raise process_error(error, process, call) from None


@dataclass(eq=False)
class _Job:
    item: Any
    future: asyncio.Future | None  # None: nobody waits for it
    alone: bool = False  # its process has died once

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
    """Calls to as many workers as there are places; what is called first begins first."""

    def __init__(
        self, what: str, build: Callable[[], Any], bounds: Bounds, places: Sequence[Place], again: bool = True
    ):
        """what: runs there, such as `reward math`, for messages. build: called in each process. again: a call whose process died is
        tried once more; not where objects of earlier calls died with it."""
        self._again, self._again_said = again, Rarely()
        reference = ray.put(build)  # once, not with each worker: it may hold a tokenizer
        self._all = tuple(_Worker(what, place, reference, bounds) for place in places)
        self._loop: asyncio.AbstractEventLoop | None = None  # of those that wait
        self._waiting: deque[_Job] = deque()
        self._running: set[asyncio.Task] = set()
        self._most = 1  # calls of a batch; grows as long as workers are done with all of them in time

    async def call(self, item: Any) -> Any:
        """What the workers' `work` makes of one item. Many may wait at a time, all in one event loop.

        Raises what `work` raised, WorkerDied, WorkerHangs, or ProcessLost for a worker that does not start.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Job(item, future))
        if self._loop is not future.get_loop():
            # One that has ended may have left tasks in the middle, which never give their workers back.
            self._loop = future.get_loop()
            self._running.clear()
            for worker in self._all:
                worker.forget()
        self._loop.call_soon(self._dispatch)  # with what else comes until then
        return await future

    def tell(self, item: Any) -> None:
        """As `call`, but nobody waits for it, and nobody hears of what went wrong; it is done before the next call."""
        self._waiting.append(_Job(item, None))

    def _dispatch(self) -> None:
        while self._waiting:
            if self._waiting[0].is_forgotten:
                self._waiting.popleft()
                continue
            worker = min(self._all, key=lambda one: one.busy)
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
        """As many as one worker is given now; none where nobody waits for what is left."""
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

    async def _run(self, worker: _Worker, jobs: list[_Job]) -> None:
        loop = self._loop
        try:
            results = pickle.loads(await worker.work(pickle.dumps([job.item for job in jobs])))
        except _Lost as lost:
            self._blame(jobs, lost)
        except Exception as error:
            for job in jobs:
                job.fail(error)
        else:
            for job, result in zip(jobs, results, strict=False):
                job.answer(result)
            self._waiting.extendleft(reversed(jobs[len(results) :]))
            if len(results) < len(jobs):
                self._most = max(
                    1, len(results), self._most // 2
                )  # a worker may just have had to wait for its core
            elif len(jobs) == self._most:
                self._most = min(2 * self._most, _LARGEST_BATCH)
        finally:
            if self._loop is loop:
                worker.busy -= 1
        self._dispatch()

    def _blame(self, jobs: list[_Job], lost: _Lost) -> None:
        if not lost.begun and self._again:
            self._waiting.extendleft(reversed(jobs))
            return
        certain = len(jobs) == 1 and (jobs[0].alone or lost.hung)
        if certain or not self._again:
            for job in jobs:
                job.fail((WorkerHangs if lost.hung else WorkerDied)(str(lost)))
            return
        self._again_said(f"{lost}; what it did is tried once more")
        for job in jobs:
            job.alone = True
        self._waiting.extendleft(reversed(jobs))

    def close(self) -> None:
        """End all processes; nothing is waited for."""
        for worker in self._all:
            worker.close()

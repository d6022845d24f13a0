"""One worker of a pool: its process, and the driver's handle for that process.

`PoolWorker` is the process, a Ray actor. It holds an object, and does batches of calls. `Worker` is the
handle: it starts the process, sends batches to it, and replaces it if it dies or hangs. worker_pool.py
decides which calls are in a batch, and what happens to the calls of a lost process.
"""

import asyncio
import contextlib
import faulthandler
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_megatron.cluster.last_words import killed_by_ray
from grpo_megatron.cluster.processes import Process, process_error, redirect_output, use_folder
from grpo_megatron.cluster.ray_errors import LOST
from grpo_megatron.errors import ProcessLost

# How long a worker may take to start, including the imports of the code that it runs.
_START_SECONDS = 120.0
# How often a worker is started before its death counts.
_STARTS = 2
# A worker begins no further call of a batch after this time, so that the caller of a cheap call need not wait
# for expensive ones.
_BATCH_SECONDS = 0.1
# How long after a call's time limit the process ends itself. The limit itself can only interrupt Python code.
_GRACE_SECONDS = 3.0
# How much later the driver kills a process that could not end itself, for example because a signal has
# stopped it.
_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True)
class Place:
    """Node, name and log file of a worker's process.

    process: name and log file of the process
    node: id of the Ray node on which the process runs
    """

    process: Process
    node: str


@dataclass(frozen=True)
class Bounds:
    """Limits for the code that a worker runs, such as a reward function.

    seconds: time limit of one call
    memory: bytes that the process may allocate in addition to those that it uses after its start; None: no
        limit
    file: maximum size in bytes of each file that the process writes; None: no limit
    """

    seconds: float
    memory: int | None = None
    file: int | None = None

    def apply(self) -> None:
        """Apply the limits of memory and file size to this process and its children, by setrlimit.

        The time limit is not applied here. Each call applies it anew.
        """
        if self.memory is not None:
            # RLIMIT_DATA counts private memory that can be written. RLIMIT_AS would also count Ray's object
            # store, which every worker maps.
            _limit(resource.RLIMIT_DATA, psutil.Process().memory_info().data + self.memory)
        if self.file is not None:
            _limit(resource.RLIMIT_FSIZE, self.file)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


@ray.remote
class PoolWorker:
    """The process of a worker: a Ray actor that holds an object, which runs the user's code.

    `start` makes the object. The object must have a method `work(items, seconds)`, which works on the items
    in order and returns a list of results. The method begins no further item after `seconds`, but always
    begins the first one. So the list may have only the results of the first items.

    The object may have an attribute `is_worn`. `work` sets it to True if a new process must replace this
    process. The first call of `work` must return at least one result. Later calls may return an empty list if
    `is_worn` is True.
    """

    def __init__(self, log: str):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes the pool
        redirect_output(log)

    def start(self, build: Callable[[], Any], folder: str, bounds: Bounds) -> None:
        """Build the object that does the work, and apply the limits to this process.

        build: makes and returns the object.
        folder: the driver's working directory, with the user's modules and files. It becomes the working
            directory of this process.
        """
        use_folder(folder)
        self._target, self._bounds = build(), bounds
        bounds.apply()

    def work(self, items: bytes) -> tuple[bytes, bool]:
        """Work on the items of a batch, as many as the time for a batch allows.

        items: pickled list of items.

        Returns (results, is_worn). `results` is the pickled list of results of the first items. `is_worn` is
        True if a new process must replace this process. If one item exceeds its time limit by some seconds,
        this process ends.
        """
        self._shorten_log()
        # This timer ends the process even in code that never returns to Python, and logs the stacks.
        faulthandler.dump_traceback_later(
            _BATCH_SECONDS + self._bounds.seconds + _GRACE_SECONDS, exit=True, file=2
        )
        try:
            results = self._target.work(pickle.loads(items), _BATCH_SECONDS)
            return pickle.dumps(results), getattr(self._target, "is_worn", False)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _shorten_log(self) -> None:
        """Empty the log file of this process when its size exceeds half of the limit of file sizes.

        The limit also applies to the log. If the log reached it, every reward function that prints would
        fail, also in the next process, which has the same log.
        """
        if self._bounds.file is not None and os.fstat(1).st_size > self._bounds.file // 2:
            os.ftruncate(1, 0)


class BatchLost(Exception):
    """A worker's process ended before it returned the results of a batch. A new process has replaced it.

    begun: True if the process was working on this batch, False if it was still working on an earlier batch
    hung: True if the process ended because a call of this batch did not return in time
    """

    def __init__(self, begun: bool, hung: bool, text: str):
        super().__init__(text)
        self.begun, self.hung = begun, hung


class Worker:
    """The driver's handle for one worker: starts its process, sends batches, and replaces a dead process.

    what: name of what runs in the worker, such as `reward math`, for messages
    place: node, name and log file of the process
    build: Ray's reference to the function that makes the worker's object
    bounds: limits for the code in the worker
    """

    def __init__(self, what: str, place: Place, build: ray.ObjectRef, bounds: Bounds):
        self._what, self._place, self._build, self._bounds = what, place, build, bounds
        self._longest = _BATCH_SECONDS + bounds.seconds + _GRACE_SECONDS
        self.busy = 0  # number of batches that the worker has
        self.is_for_one = False  # whether the last of these is a call that is retried alone
        self._asked: list[ray.ObjectRef] = []  # batches in order; the process is working on the first
        self._forgotten: list[ray.ObjectRef] = []
        self._guilty: ray.ObjectRef | None = None  # batch that the process was working on when it was lost
        self._answered = 0.0  # when the process last finished a batch, by time.monotonic
        self._start()

    @property
    def takes_more(self) -> bool:
        """True if the worker may get its next batch while it still works on another batch.

        False while the process starts, and while batches that `forget` gave up are unfinished. Also False
        while the worker retries a call alone: if the process dies, this call is blamed. With another batch,
        the process might die in that batch before the answer to the retried call arrives.
        """
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
        """Give up the unfinished batches of the worker, because the event loop of their callers has ended.

        Before the next batch is sent, `work` waits for the answers to these batches and drops the answers.
        """
        self.busy, self._forgotten = 0, list(self._asked)

    async def work(self, items: bytes) -> bytes:
        """Send a batch to the worker, and return the pickled list of results.

        If the time for a batch was too short, the list has only the results of the first items.

        items: pickled list of items.

        Raises BatchLost if the process is lost before it answers. Raises ProcessLost if the process cannot be
        started. Errors of the worker's code are passed on.
        """
        while self._forgotten:
            with contextlib.suppress(Exception):  # no caller waits for the answer any more
                await self._answer(self._forgotten.pop(0))
        await self._started()
        actor = self._actor
        asked = actor.work.remote(items)
        self._asked.append(asked)
        results, is_worn = await self._answer(asked)
        if is_worn and actor is self._actor:  # the other batch may have replaced the process already
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
                    f"{self._place.process.name} did not start within {_START_SECONDS:.0f} s; its log is "
                    f"{self._place.process.log}"
                ) from error

    def _replace(self, guilty: ray.ObjectRef | None) -> None:
        """Kill the process, and start a new one, which has no batches yet.

        guilty: the batch that the process was working on when it was lost; None if the process was not lost.
        """
        self._guilty, self._asked = guilty, []
        self.close()
        self._start()

    async def _answer(self, reference: ray.ObjectRef) -> tuple[bytes, bool]:
        asked, patience = time.monotonic(), self._longest * len(self._asked) + _PATIENCE_SECONDS
        try:
            answer = await asyncio.wait_for(_fetched(reference, self._place.process, "work"), patience)
        except (*LOST, asyncio.TimeoutError) as error:
            if reference in self._asked:  # otherwise the other batch's coroutine has replaced the process
                self._replace(self._asked[0])
            begun = reference == self._guilty
            # The process began this batch only after it had finished the earlier one.
            hung = (
                begun
                and time.monotonic() - max(asked, self._answered) >= self._bounds.seconds + _GRACE_SECONDS
            )
            raise BatchLost(begun, hung, self._text(hung, error)) from error
        except Exception:
            self._done(reference)
            raise
        self._done(reference)
        return answer

    def _done(self, reference: ray.ObjectRef) -> None:
        # A large answer arrives some time after it was given. By then the process may have been lost in its
        # next batch.
        if reference in self._asked:
            self._asked.remove(reference)
            self._answered = time.monotonic()

    def _text(self, hung: bool, error: Exception) -> str:
        log = f"its log is {self._place.process.log}"
        if hung:
            return (
                f"{self._what} did not return within reward.timeout={self._bounds.seconds} s and cannot be "
                f"interrupted, so its process ({self._place.process.name}) was killed; {log}"
            )
        how = killed_by_ray(error) or " (it ran out of memory, was killed, or called exit)"
        return f"{self._what}: its process ({self._place.process.name}) died{how}; {log}"

    def close(self) -> None:
        ray.kill(self._actor)


async def _fetched(reference: ray.ObjectRef, process: Process, call: str) -> Any:
    """Wait for the answer to a remote call, and return it.

    reference: Ray's reference to the answer.
    process: name and log of the called process, for messages.
    call: name of the method that was called, for messages.

    An error of the remote code is raised with the process's name. If the process is lost, Ray's own error is
    raised, which `Worker` handles.
    """
    try:
        return await reference
    except RayTaskError as error:
        raise process_error(error, process, call) from None

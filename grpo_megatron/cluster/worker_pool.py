"""Processes that run code from outside the package: what fails there, or never returns, is one clear error."""

import asyncio
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.process_tree import end_with_parent

# What a worker may take to start: a spawned interpreter and the imports of what it runs.
_START_SECONDS = 120.0


class WorkerPool:
    """A pool of processes; what is submitted starts in its order.

    kind, name: of what runs there, such as reward and math, for messages. timeout: most seconds of one
    unit of work, which the work itself keeps to (rewards.base.time_limit) as long as it is Python.
    initializer: called with the arguments in each process as it starts.
    """

    def __init__(self, kind: str, name: str, timeout: float, workers: int, initializer: Callable, *arguments):
        self._what, self._timeout = f"{kind} {name}", timeout
        self._died = f"{kind} {name}: one of its processes died (out of memory, or it called exit)"
        self._unfinished, self._workers, self._lock = 0, workers, threading.Lock()
        self._pool = ProcessPoolExecutor(
            max_workers=workers,
            # A forked process would inherit the locks of Ray's threads, but not the threads that unlock them.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(initializer, *arguments),
        )

    def submit(self, function: Callable, *arguments) -> Future:
        """A future of function(*arguments), to be waited for by `finished`."""
        with self._clear_errors():
            future = self._pool.submit(function, *arguments)
        self._count(1)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    def _count(self, change: int) -> None:
        with self._lock:
            self._unfinished += change

    def _longest(self) -> float:
        """Seconds in which everything submitted so far is done, or hangs in code that is not Python."""
        return self._timeout * (math.ceil(self._unfinished / self._workers) + 1) + _START_SECONDS

    @contextmanager
    def _clear_errors(self):
        try:
            yield
        except BrokenProcessPool as error:
            raise ProcessLost(self._died) from error
        except asyncio.TimeoutError as error:
            self._kill()
            raise UserError(
                f"{self._what} did not return within reward.timeout={self._timeout} s, and cannot be interrupted"
            ) from error

    async def finished(self, future: Future):
        """The result of a future of `submit`, waited for at most the time limits of everything queued.

        Raises UserError as the work does, or if it cannot be interrupted, or ProcessLost if its process died.
        """
        with self._clear_errors():
            return await asyncio.wait_for(asyncio.wrap_future(future), self._longest())

    def _kill(self) -> None:
        for process in self._processes():
            process.kill()

    def _processes(self) -> list:
        return list((self._pool._processes or {}).values())

    def close(self) -> None:
        processes = self._processes()  # the pool forgets them
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()  # nobody will wait for a result


def _start(initializer: Callable, *arguments) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which closes the pool
    end_with_parent()  # a pool's processes wait for work for ever otherwise
    initializer(*arguments)

"""Worker processes that convert checkpoints. They end when the process that started them ends."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from grpo_megatron.errors import UserError
from grpo_megatron.process_tree import end_with_parent

_REFRESH_SECONDS = 0.1  # time between two updates of the progress bar


class Job(Protocol):
    """Interface of a job that worker processes do, one unit of work at a time.

    The job is sent to each process once, before its first unit of work. A unit of work is any object that the
    job's method `do` accepts, such as the description of an output file.
    """

    def start(self) -> None:
        """Open files and allocate buffers. Called once in each process, before its first unit of work."""

    def do(self, unit: Any, advance: Callable[[int], None]) -> Any:
        """Do one unit of work and return its result. Raises UserError if the unit cannot be done.

        advance: function to call with the number of bytes done since its last call, for the progress bar.
        """


@dataclass(frozen=True)
class Progress:
    """The amount of work that was done, and the time that it took.

    bytes: number of bytes that were converted or read.
    seconds: seconds from when all worker processes were ready to the end of the last unit of work. The start
        and the end of the processes do not count.
    """

    bytes: int
    seconds: float

    def __str__(self):
        return (
            f"{self.bytes / 1e9:.2f} GB in {self.seconds:.1f} s "
            f"({self.bytes / max(self.seconds, 1e-9) / 1e9:.2f} GB/s)"
        )


def default_processes() -> int:
    """Return the number of processes if the user does not choose one: a process per core, at most 8."""
    return min(len(os.sched_getaffinity(0)), 8)


def run(
    job: Job, units: list, processes: int, title: str, total: int, done: Callable[[Any, Any], None]
) -> Progress:
    """Do all units of work in the order of the list. Return the bytes done and the seconds taken.

    With one process or one unit, the calling process does the work. Otherwise new worker processes do it.

    job: the object that does the work. It is sent to every worker process.
    units: the arguments of `job.do`, one per unit of work.
    processes: maximum number of worker processes.
    title: label of the progress bar on a terminal, such as the target folder.
    total: bytes of all units, for the progress bar.
    done: called in the calling process with each unit and the result of `job.do`.

    Raises UserError if a worker process dies. Errors of `job` and `done` are passed on. All worker processes
    are ended in both cases.
    """
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None, smoothing=0.1) as bar:
        if min(processes, len(units)) <= 1:
            job.start()
            begun = time.monotonic()
            for unit in units:
                done(unit, job.do(unit, bar.update))
            seconds = time.monotonic() - begun
        else:
            seconds = _share(job, units, min(processes, len(units)), bar, done)
    return Progress(total, seconds)


def _share(job: Job, units: list, processes: int, bar: tqdm, done: Callable[[Any, Any], None]) -> float:
    """Do all units of work in worker processes. Return the seconds taken, without the start of the processes.

    job: the object that does the work, of which each process gets a copy.
    units: the arguments of `job.do`, one per unit of work.
    processes: number of worker processes, at most the number of units.
    bar: the progress bar.
    done: called in this process with each unit and its result.
    """
    context = multiprocessing.get_context("spawn")
    # The counts have no lock, because a killed process would leave it locked. Each unit has its own count.
    counts, begun = context.RawArray("q", len(units)), context.RawValue("d")
    # If a process dies before it is ready, the others wait at this barrier until the pool ends them.
    all_ready = context.Barrier(processes)
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes,
        mp_context=context,
        initializer=_begin,
        initargs=(os.getpid(), job, counts, begun, all_ready),
    )
    futures = {pool.submit(_do, index, unit): unit for index, unit in enumerate(units)}
    workers = set(multiprocessing.active_children()) - others
    pending = set(futures)
    try:
        while pending:
            finished, pending = wait(pending, _REFRESH_SECONDS, FIRST_COMPLETED)
            bar.update(sum(counts) - bar.n)
            for future in finished:
                done(futures[future], future.result())
        ended = time.monotonic()
        pool.shutdown()
    except BrokenProcessPool:
        pool.shutdown()  # ends the other processes by SIGTERM
        raise _death_of(workers) from None
    except BaseException:
        for process in workers:
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    return ended - begun.value


def _death_of(workers: set) -> UserError:
    """Return the error to raise after a worker process has died. It says which process died, and how.

    When a worker process dies, the pool ends the other processes by SIGTERM. A process that ended in another
    way, and not with status 0, is therefore the one that died.

    workers: all worker processes.
    """
    dead = min(workers, key=lambda process: process.exitcode in (0, None, -signal.SIGTERM))
    code = dead.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
    return UserError(
        f"a conversion process (pid {dead.pid}) {how}; if the machine ran out of memory, use fewer "
        "processes (--processes)"
    )


_worker: dict[str, Any] = {}  # the arguments of `_begin` in a worker process, for `_do`


def _begin(parent: int, job: Job, counts, begun, all_ready) -> None:
    """Prepare a new worker process for its units of work. Called in that process.

    parent: id of the process that started the worker process.
    job: the object that does the work.
    counts: array, shared by all processes: the number of bytes done of each unit.
    begun: number, shared by all processes: the time at which all worker processes were ready; 0 before.
    all_ready: barrier at which all worker processes wait for each other before their first unit.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    end_with_parent(parent)
    torch.set_num_threads(1)
    _worker.update(job=job, counts=counts, begun=begun, all_ready=all_ready, is_started=False)


def _do(index: int, unit: Any) -> Any:
    """Do one unit of work in a worker process and return its result.

    index: index of the unit among all units.
    """
    if not _worker["is_started"]:
        # Not in `_begin`, because the pool does not pass on errors that are raised there.
        _worker["job"].start()
        _worker["is_started"] = True
        _worker["all_ready"].wait()
        _worker["begun"].value = _worker["begun"].value or time.monotonic()

    def advance(count: int) -> None:
        _worker["counts"][index] += count

    return _worker["job"].do(unit, advance)

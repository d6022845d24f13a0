"""Pool of worker processes that convert checkpoints. They end when the process that started them ends."""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
from tqdm import tqdm

from grpo_megatron.errors import UserError
from grpo_megatron.process_tree import end_with_parent


class Job(Protocol):
    """Interface of the work that the worker processes do.

    The object is sent to each process once, before the first unit of work.
    """

    def start(self) -> None:
        """Open files and allocate buffers. Called once in each worker process, before the first unit."""

    def do(self, unit: Any, advance: Callable[[int], None]) -> Any:
        """Do one unit of work and return its result. Raises UserError if the unit cannot be done.

        advance: function to call with the number of bytes done since its last call, for the progress bar.
        """


@dataclass(frozen=True)
class Progress:
    """The number of bytes done, and the seconds that it took after all processes were ready."""

    bytes: int
    seconds: float

    def __str__(self):
        return (
            f"{self.bytes / 1e9:.2f} GB in {self.seconds:.1f} s "
            f"({self.bytes / max(self.seconds, 1e-9) / 1e9:.2f} GB/s)"
        )


def default_processes() -> int:
    return min(len(os.sched_getaffinity(0)), 8)


def run(
    job: Job, units: list, processes: int, title: str, total: int, done: Callable[[Any, Any], None]
) -> Progress:
    """Do all units of work in the order of the list. Return the bytes done and the seconds taken.

    With one process or one unit, the calling process does the work. Otherwise new worker processes do it.

    job: the work, which is sent to every worker process.
    processes: largest number of worker processes.
    title: label of the progress bar on a terminal, such as the target folder.
    total: bytes of all units, for the progress bar.
    done: called in the calling process with each unit and its result.

    Raises UserError if a unit raises it, or if a worker process dies. All worker processes are ended then.
    """
    with tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=None, smoothing=0.1) as bar:
        if min(processes, len(units)) <= 1:
            job.start()
            begun = time.perf_counter()
            for unit in units:
                done(unit, job.do(unit, bar.update))
        else:
            with _workers(job, min(processes, len(units))) as workers:
                begun = time.perf_counter()
                for unit, result in _distribute(workers, units, bar.update):
                    done(unit, result)
    return Progress(total, time.perf_counter() - begun)


@contextmanager
def _workers(job: Job, count: int):
    """Start `count` worker processes and yield {connection: process} when all have started the job.

    The processes are killed when the `with` block ends.
    """
    context = multiprocessing.get_context("spawn")
    workers = {}
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, os.getpid(), job))
            process.start()
            theirs.close()
            workers[ours] = process
        for connection, process in workers.items():
            _receive(connection, process)
        yield workers
    finally:
        for connection, process in workers.items():
            process.kill()
            process.join()
            connection.close()


def _distribute(workers: dict, units: list, advance: Callable[[int], None]) -> Iterator[tuple[Any, Any]]:
    """Yield (unit, result) as units are completed. A worker that has completed its unit gets the next one."""
    waiting, busy = list(units), {}

    def give(connection) -> None:
        busy[connection] = waiting.pop(0)
        try:
            connection.send(busy[connection])
        except OSError:
            raise _lost(workers[connection]) from None

    for connection in workers:
        give(connection)
    while busy:
        for connection in wait(list(busy)):
            kind, value = _receive(connection, workers[connection])
            if kind == "advance":
                advance(value)
                continue
            unit = busy.pop(connection)
            if waiting:
                give(connection)
            yield unit, value


def _receive(connection, process) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except (EOFError, OSError):  # OSError: the process died before it read its unit
        raise _lost(process) from None
    if kind == "user error":
        raise UserError(value)
    if kind == "defect":
        raise RuntimeError(f"a process of the conversion failed:\n{value}")
    return kind, value


def _lost(process) -> UserError:
    process.join()
    how = (
        f"was killed by signal {-process.exitcode}"
        if process.exitcode < 0
        else f"ended with status {process.exitcode}"
    )
    return UserError(
        f"a process of the conversion (pid {process.pid}) {how}; if the machine ran out of "
        "memory, use fewer processes (--processes)"
    )


def _serve(connection, parent: int, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    end_with_parent(parent)
    torch.set_num_threads(1)
    try:
        job.start()
        connection.send(("ready", None))
        while True:
            result = job.do(connection.recv(), lambda count: connection.send(("advance", count)))
            connection.send(("done", result))
    except UserError as error:
        connection.send(("user error", str(error)))
    except (EOFError, BrokenPipeError):
        return
    except Exception:
        connection.send(("defect", traceback.format_exc()))

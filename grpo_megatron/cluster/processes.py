"""Waiting for many remote calls, and turning what goes wrong into one clear error."""

import logging
import os
import sys
import time
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from grpo_megatron.cluster.last_words import last_words
from grpo_megatron.cluster.ray_errors import ENDED, LOST, plain, raised_there, what_is_lacking
from grpo_megatron.errors import ProcessLost, UserError

logger = logging.getLogger(__name__)
# How long to wait after a failure for the news that another process died, which is then the cause.
_GRACE_SECONDS = 5.0


class ProcessDied(ProcessLost):
    """A trainer rank or an engine is gone. The message names it, the call that it was in, and its log."""


class Process(NamedTuple):
    """A process as messages name it.

    name: such as `trainer rank 1 of 8`
    log: path of its log file
    """

    name: str
    log: str

    def died(self, call: str, error: RayError | None = None) -> ProcessDied:
        """Return the error for the loss of this process during `call`, with the cause.

        error: the loss as Ray reported it.
        """
        how, lines = last_words(self.log, error)
        what = "was lost" if isinstance(error, LOST) and not isinstance(error, ENDED) else "died"
        return ProcessDied(
            "\n  | ".join([f"{self.name} {what} in `{call}`{how}; its log is {self.log}", *lines])
        )


def redirect_output(path: str) -> None:
    """Send this process's and its children's stdout and stderr to a file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def gather(
    references: dict[int, ray.ObjectRef], processes: list[Process], call: str, timeout: float | None = None
) -> dict:
    """Return the results of {process index: reference}. Raise as soon as the first call fails.

    Waiting for all of them first could wait for ranks in a collective whose partner is dead.

    call: what was called, for messages.
    timeout: seconds, after which ProcessLost is raised; None: no limit.

    If a UserError was the cause on the other side, that UserError is raised.
    """
    numbers = {reference: number for number, reference in references.items()}
    pending, results = list(numbers), {}
    deadline = None if timeout is None else time.monotonic() + timeout
    while pending:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not ready:
            names = ", ".join(processes[numbers[reference]].name for reference in pending)
            raise ProcessLost(f"`{call}` was not done within {timeout:.0f} s by {names}")
        # Take all that are ready by now. With one ray.wait for each of 1,000 references, every call would
        # look at all the remaining ones.
        more, pending = ray.wait(pending, num_returns=len(pending), timeout=0) if pending else ([], [])
        for reference in (*ready, *more):
            number = numbers[reference]
            try:
                results[number] = fetch(reference, processes[number], call)
            except ProcessDied:
                raise
            except Exception:
                # A process whose partner died in a collective or in a weight sync often fails before the
                # death is known.
                others = [one for one in numbers if one != reference and numbers[one] not in results]
                _raise_if_one_died(others, numbers, processes, call)
                raise
    return {number: results[number] for number in references}


def _raise_if_one_died(pending: list, numbers: dict, processes: list[Process], call: str) -> None:
    deadline = time.monotonic() + _GRACE_SECONDS
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, num_returns=1, timeout=deadline - time.monotonic())
        for reference in ready:
            try:
                fetch(reference, processes[numbers[reference]], call)
            except ProcessDied:
                raise
            except Exception:
                logger.debug("also failed: %s", processes[numbers[reference]].name, exc_info=True)


def fetch(reference: ray.ObjectRef, process: Process, call: str) -> Any:
    """Return ray.get(reference). Raise what Ray's error means for a run, see `process_error`."""
    try:
        return ray.get(reference)
    except RayError as error:
        raise process_error(error, process, call) from (None if isinstance(error, RayTaskError) else error)


def process_error(error: RayError, process: Process, call: str) -> Exception:
    """Return what Ray's error means for a run, as an exception to raise.

    - ProcessDied: the process is lost, and the run can go on with another.
    - UserError: the process raised one, or its machine lacks something.
    - RuntimeError: the process's code failed.
    - Any other error of Ray stays as it is.
    """
    if isinstance(error, RayTaskError):
        cause, said = raised_there(error)
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            return process_error(cause, process, call)  # a process that this one waited for is lost
        return RuntimeError(
            f"{process.name} failed in `{call}`: {said}; its log is {process.log}\n{plain(error)}"
        )
    if isinstance(error, LOST):
        return process.died(call, error)
    if lacking := what_is_lacking(error):
        return UserError(f"{process.name} failed in `{call}`: {lacking}")
    return error

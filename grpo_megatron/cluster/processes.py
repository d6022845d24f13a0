"""Waiting for many remote calls, and turning their failures into one clear error."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from grpo_megatron.cluster.last_words import last_words
from grpo_megatron.cluster.ray_errors import ENDED, LOST, plain, raised_there, what_is_lacking
from grpo_megatron.errors import ProcessLost, UserError

logger = logging.getLogger(__name__)
# How long to wait after a failure for the news that another process died, which is then the cause.
_GRACE_SECONDS = 5.0
# How long after its time limit a forwarder may take to tell which of its processes have not finished.
_FORWARDER_SECONDS = 5.0


class ProcessDied(ProcessLost):
    """A trainer rank, an engine or a worker died or cannot be reached.

    The message names the process, the call in which it was lost, and its log.
    """


class Process(NamedTuple):
    """Name and log of a process, for messages.

    name: name of the process, such as `trainer rank 1 of 8`
    log: path of its log file
    """

    name: str
    log: str

    def died(self, call: str, error: RayError | None = None) -> ProcessDied:
        """Return the error to raise when this process was lost. The message quotes the cause from the log.

        call: name of the method that was called in the process.
        error: Ray's error about the loss; None if there is none.
        """
        how, lines = last_words(self.log, error)
        what = "was lost" if isinstance(error, LOST) and not isinstance(error, ENDED) else "died"
        return ProcessDied(
            "\n  | ".join([f"{self.name} {what} in `{call}`{how}; its log is {self.log}", *lines])
        )


def redirect_output(path: str) -> None:
    """Send stdout and stderr of this process, and of the children that it starts, to a log file."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def use_folder(folder: str) -> None:
    """Change to the driver's working directory, and let this process import the user's modules from it.

    folder: path of the directory. If this node does not have it, the working directory stays as it is.
    """
    with contextlib.suppress(OSError):  # this node may not have the folder
        os.chdir(folder)
    if "" not in sys.path:
        sys.path.insert(0, "")


class ForwardedCall(NamedTuple):
    """A call in progress that a forwarder passes on to all processes of a group on one node.

    answer: Ray's reference to the ForwardedAnswer, which has the results
    forwarder: name and log of the forwarder's process
    """

    answer: ray.ObjectRef
    forwarder: Process


class Calls(NamedTuple):
    """The same call to several processes, in progress. `gather` waits for the results.

    references: {process index: Ray's reference to the result} of processes that were called directly
    forwarded: the calls to all other processes, which forwarders (cluster.forwarder) pass on
    """

    references: dict[int, ray.ObjectRef]
    forwarded: Sequence[ForwardedCall] = ()


class ForwardedAnswer(NamedTuple):
    """The answer of a forwarder, which has passed a call of the driver on to several processes.

    results: {process index: result} of processes that have finished the call
    others: {process index: Ray's reference to the result} of all other processes. It is empty unless a
        process has failed or the time limit has passed. Some of these calls may still be in progress.
    """

    results: dict[int, Any]
    others: dict[int, ray.ObjectRef]


def gather(
    references: dict[int, ray.ObjectRef],
    processes: list[Process],
    call: str,
    timeout: float | None = None,
    forwarded: Sequence[ForwardedCall] = (),
) -> dict[int, Any]:
    """Wait for the same call to many processes, and return {process index: result}, sorted by index.

    An error is raised as soon as one process fails. ray.get(list) would first wait for all processes, which
    could take forever, because they may wait in a collective for a dead one.

    references: {process index: Ray's reference to the result}.
    processes: name and log of each process, by process index.
    call: name of the method that was called, for messages.
    timeout: seconds; None: no limit.
    forwarded: the same call to further processes, through forwarders that have the same time limit.

    Raises:

    - ProcessLost if a process has not answered after `timeout`.
    - ProcessDied if a process or a forwarder has died. If another process failed first, because it waited for
      the dead process, the death is still the error that is raised.
    - UserError if the remote code raised a UserError, or if its machine lacks something, such as disk space.
    - RuntimeError if the remote code raised another error.
    """
    calls = _Pending(references, forwarded, processes, call)
    deadline = None if timeout is None else time.monotonic() + timeout
    while calls.pending:
        ready = calls.ready(None if deadline is None else deadline - time.monotonic() + calls.patience)
        if not ready:
            names = ", ".join(calls.process(asked).name for asked in calls.pending.values())
            raise ProcessLost(f"{names} did not finish `{call}` within {timeout:.0f} s")
        for reference in ready:
            try:
                calls.take(reference)
            except ProcessDied:
                raise
            except Exception:
                # A process whose partner died in a collective or in a weight sync often fails before the
                # death is known.
                calls.raise_if_one_died()
                raise
    return dict(sorted(calls.results.items()))


def outcomes(
    references: dict[int, ray.ObjectRef],
    processes: list[Process],
    call: str,
    timeout: float,
    forwarded: Sequence[ForwardedCall] = (),
) -> dict[int, Any]:
    """Wait until the same call to many processes has ended everywhere, even if it fails in some of them.

    Unlike `gather`, this function returns the errors of processes, and does not raise the first error.

    references: {process index: Ray's reference to the result}.
    processes: name and log of each process, by process index.
    call: name of the method that was called, for messages.
    timeout: seconds.
    forwarded: the same call to further processes, through forwarders.

    Returns {process index: result, or the error of this process}. Raises ProcessLost if a process has not
    answered after `timeout`, or if a forwarder has died.
    """
    calls, found = _Pending(references, forwarded, processes, call), {}
    deadline = time.monotonic() + timeout
    while calls.pending:
        ready = calls.ready(deadline - time.monotonic())
        if not ready:
            raise ProcessLost(f"{len(calls.pending)} processes did not end `{call}` within {timeout:.0f} s")
        for reference in ready:
            asked = calls.pending[reference]
            try:
                calls.take(reference)
            except Exception as error:
                if isinstance(asked, ForwardedCall):
                    raise
                found[asked] = error
    return calls.results | found


class _Pending:
    """The calls that `gather` or `outcomes` waits for.

    pending: {Ray's reference to an answer: index of the process, or the ForwardedCall} of all answers that
        have not been taken
    results: {process index: result} of the answers that have been taken
    """

    def __init__(
        self,
        references: dict[int, ray.ObjectRef],
        forwarded: Sequence[ForwardedCall],
        processes: list[Process],
        call: str,
    ):
        self.pending: dict[ray.ObjectRef, int | ForwardedCall] = {
            **{reference: index for index, reference in references.items()},
            **{one.answer: one for one in forwarded},
        }
        self.results: dict[int, Any] = {}
        self._processes, self._call = processes, call

    def process(self, asked: int | ForwardedCall) -> Process:
        """Return name and log of the process that gives a pending answer.

        asked: index of a process that was called directly, or the call to a forwarder.
        """
        return asked.forwarder if isinstance(asked, ForwardedCall) else self._processes[asked]

    @property
    def patience(self) -> float:
        """Seconds to wait beyond the time limit, so that forwarders can report unfinished processes.

        It is 0 if no answer of a forwarder is pending.
        """
        awaits_forwarder = any(isinstance(asked, ForwardedCall) for asked in self.pending.values())
        return _FORWARDER_SECONDS if awaits_forwarder else 0.0

    def ready(self, seconds: float | None) -> list[ray.ObjectRef]:
        """Wait up to `seconds` for an answer, and return the references of all answers that have arrived.

        seconds: time limit; None: no limit. If no answer arrives in time, the list is empty.
        """
        timeout = None if seconds is None else max(0.0, seconds)
        first, rest = ray.wait(list(self.pending), num_returns=1, timeout=timeout)
        # Take all answers that are ready by now. With one answer at a time, ray.wait would look at up to
        # 1,000 remaining references 1,000 times.
        more = ray.wait(rest, num_returns=len(rest), timeout=0)[0] if first and rest else []
        return [*first, *more]

    def take(self, reference: ray.ObjectRef) -> None:
        """Fetch an answer that has arrived. Raises the errors of `fetch`.

        The answer of a forwarder has the results of several processes. If one of them has failed or not
        finished, the remaining calls become pending, as if their processes had been called directly.
        """
        asked = self.pending.pop(reference)
        answer = fetch(reference, self.process(asked), self._call)
        if isinstance(asked, ForwardedCall):
            self.results |= answer.results
            self.pending |= {other: index for index, other in answer.others.items()}
        else:
            self.results[asked] = answer

    def raise_if_one_died(self) -> None:
        """Wait up to five seconds for the news that a process has died. Raises ProcessDied if one has.

        Called after another failure, which the death may have caused. Other errors are only logged.
        """
        deadline = time.monotonic() + _GRACE_SECONDS
        while self.pending and (left := deadline - time.monotonic()) > 0:
            for reference in self.ready(left):
                name = self.process(self.pending[reference]).name
                try:
                    self.take(reference)
                except ProcessDied:
                    raise
                except Exception:
                    logger.debug("also failed: %s", name, exc_info=True)


def fetch(reference: ray.ObjectRef, process: Process, call: str) -> Any:
    """Wait for the result of a remote call and return it. Errors of Ray are turned into clearer errors.

    reference: Ray's reference to the result.
    process: the process that was called. The error names it and its log.
    call: name of the method that was called, for messages.

    Raises ProcessDied, UserError, RuntimeError or another error of Ray, as `process_error` decides.
    """
    try:
        return ray.get(reference)
    except RayError as error:
        raise process_error(error, process, call) from (None if isinstance(error, RayTaskError) else error)


async def fetched(reference: ray.ObjectRef, process: Process, call: str) -> Any:
    """Return the result of a remote call, as `fetch` does, but without blocking the event loop.

    reference: Ray's reference to the result.
    process: the process that was called. An error names it and its log.
    call: name of the method that was called, for messages.

    Raises ProcessDied, UserError, RuntimeError or another error of Ray, as `process_error` decides.
    """
    try:
        return await reference
    except RayError as error:
        raise process_error(error, process, call) from (None if isinstance(error, RayTaskError) else error)


def process_error(error: RayError, process: Process, call: str) -> Exception:
    """Convert an error of Ray from a call to a process into the exception that the driver must raise.

    - ProcessDied: the process, or a process that it waited for, is lost. A run can go on with a new process.
    - UserError: the remote code raised a UserError, or its machine lacks something, such as disk space.
    - RuntimeError: the remote code raised any other exception.
    - Any other error of Ray is returned unchanged.

    process: name and log of the process that was called.
    call: name of the method that was called, for messages.
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

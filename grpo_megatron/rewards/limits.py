"""Limits of time and memory for untrusted code, enforced within the process that runs it."""

import asyncio
import gc
import math
import resource
import signal

import psutil


class OutOfTime(BaseException):
    """The error that `time_limit` raises in its `with` block when the time is over.

    It is not an Exception, because libraries such as math-verify catch every Exception and go on.
    """


def interruptible_loop() -> asyncio.AbstractEventLoop:
    """Return an asyncio event loop that `time_limit` can interrupt, by an exception in a signal handler.

    It is asyncio's own loop. Ray's workers use uvloop by default, in which an exception raised by a signal
    handler does not interrupt the running call.
    """
    return asyncio.SelectorEventLoop()


_AGAIN_SECONDS = 1.0


class time_limit:
    """A context manager that ends its `with` block after `seconds`.

    Usage: `with time_limit(seconds) as limit:`. When the time is over, OutOfTime is raised in the block. The
    context manager catches this error, so execution continues after the block. `limit.reached` is True there
    if OutOfTime ended the block.

    The alarm signal (SIGALRM) raises OutOfTime, so this works only in the main thread. The alarm repeats
    every second, or every `seconds` if that is longer, in case code in the block catches the error. An alarm
    that was set before, such as by an enclosing time_limit, is set again after the block, with the time that
    it had left before the block.
    """

    def __init__(self, seconds: float):
        self.seconds, self.reached = seconds, False

    def __enter__(self):
        self._handler = signal.signal(signal.SIGALRM, _out_of_time)
        self._outer = signal.setitimer(signal.ITIMER_REAL, self.seconds, max(self.seconds, _AGAIN_SECONDS))
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        signal.setitimer(signal.ITIMER_REAL, *self._outer)
        signal.signal(signal.SIGALRM, self._handler)
        self.reached = kind is OutOfTime
        return self.reached


def _out_of_time(signum, frame):
    # On a slow or paused machine, an alarm may also arrive in these functions. An exception raised there
    # would not be caught, and the alarm would repeat for ever. Before the block, the alarm comes again. After
    # the block, there is nothing to leave.
    if frame.f_code not in _NOT_IN_THE_BLOCK:
        raise OutOfTime


_NOT_IN_THE_BLOCK = {
    function.__code__ for function in (time_limit.__enter__, time_limit.__exit__, _out_of_time)
}


class FreeMemory:
    """A detector of memory that reward calls leave allocated in this process after they end.

    Create the object before the first reward call: it stores how much memory the process may still allocate.
    `is_kept` compares the amount at a later time with the stored amount.
    """

    def __init__(self) -> None:
        self._at_first = _free_bytes()

    def is_kept(self) -> bool:
        """Run the garbage collector, then return True if reward calls have left much memory allocated.

        "Much" means that the process may now allocate less than half of what it could when this object was
        created. The result is False if the process has no memory limit.
        """
        gc.collect()
        return _free_bytes() < self._at_first / 2


def _free_bytes() -> float:
    """Return how many bytes of private memory the process may still allocate; infinity if it has no limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if most == resource.RLIM_INFINITY else most - psutil.Process().memory_info().data

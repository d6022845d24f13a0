"""Limits for code from outside, in the process that runs it."""

import asyncio
import gc
import math
import resource
import signal

import psutil


class OutOfTime(BaseException):
    """Not an Exception: libraries such as math-verify turn every Exception into "not equal" and go on."""


def interruptible_loop() -> asyncio.AbstractEventLoop:
    """An event loop that a time_limit leaves too: that of uvloop, which Ray's workers have, only notes what the alarm raises in it."""
    return asyncio.SelectorEventLoop()


_AGAIN_SECONDS = 1.0


class time_limit:
    """`with time_limit(s) as limit:` leaves the block after s seconds, with limit.reached True.

    By the alarm signal, in the main thread only; it comes again, in case something caught it. An
    alarm set outside, such as that of an enclosing time_limit, is running again afterwards.
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
    # On a machine that is slow or paused an alarm meets these functions too. What is raised in them nobody catches, and the
    # alarm would go on for ever. Before the block it comes again; behind it there is nothing to leave any more.
    if frame.f_code not in _NOT_IN_THE_BLOCK:
        raise OutOfTime


_NOT_IN_THE_BLOCK = {
    function.__code__ for function in (time_limit.__enter__, time_limit.__exit__, _out_of_time)
}


class FreeMemory:
    """Whether calls that are over keep the memory of their process. What is free when this is made is the measure."""

    def __init__(self) -> None:
        self._at_first = _free_bytes()

    def is_kept(self) -> bool:
        gc.collect()
        return _free_bytes() < self._at_first / 2


def _free_bytes() -> float:
    """Until the limit of memory that is private and can be written."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if most == resource.RLIM_INFINITY else most - psutil.Process().memory_info().data

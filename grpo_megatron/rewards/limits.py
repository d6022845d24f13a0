"""Limits for code from outside, in the process that runs it."""

import asyncio
import gc
import math
import os
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
        def out_of_time(signum, frame):
            raise OutOfTime

        self._handler = signal.signal(signal.SIGALRM, out_of_time)
        # Not again at once: the next alarm must not meet the end of this block, which nobody would catch.
        self._outer = signal.setitimer(signal.ITIMER_REAL, self.seconds, max(self.seconds, _AGAIN_SECONDS))
        return self

    def __exit__(self, kind, error, traceback) -> bool:
        signal.setitimer(signal.ITIMER_REAL, *self._outer)
        signal.signal(signal.SIGALRM, self._handler)
        self.reached = kind is OutOfTime
        return self.reached


class FreeMemory:
    """What calls find of their process' memory, and whether those that are over have kept it from them."""

    def __init__(self) -> None:
        self._lacked, self._at_first = False, math.nan

    def begin(self) -> None:
        """Before a batch. What is free at the first one is the measure of all."""
        if math.isnan(self._at_first):
            self._at_first = _free_bytes()

    def lacks(self) -> None:
        """A call of this batch has found too little."""
        self._lacked = True

    def leave_if_kept(self) -> None:
        """Behind a batch: end this process if a call found too little, and less than half is free again. All later calls would fail, too;
        so another process takes this one's place, and does the batch."""
        if self._lacked:
            self._lacked = False
            gc.collect()
            if _free_bytes() < self._at_first / 2:
                print("out of memory, most of which earlier calls have kept; this process ends", flush=True)
                os._exit(1)


def _free_bytes() -> float:
    """Until the limit of memory that is private and can be written."""
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return math.inf if most == resource.RLIM_INFINITY else most - psutil.Process().memory_info().data

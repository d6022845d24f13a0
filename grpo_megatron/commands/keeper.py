"""The keeper: a small process around a run, which outlives it however it ends, and leaves nothing of it behind.

The run itself goes on in a child, the driver, in a session of its own. All that the driver starts descends from the keeper, and orphans
become its children, so that it finds them all. Signals are passed on to the driver, which answers them (commands.driver).
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from grpo_megatron.process_tree import adopt_orphans, kill_descendants, killed_for_memory
from grpo_megatron.run.stop import outlook

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
INTERRUPTED = 130
# The driver was lost, without a signal and without a message: Ray's library ends its process so.
LOST = 3
# What a driver that was interrupted for the second time may take to leave.
_LEAVING_SECONDS = 5.0


def keep(drive: Callable[[Connection], int]) -> int:
    """drive(connection to the keeper) in a child; its exit status, when no process of it is left. Returns in both processes.

    128 + N for a driver that signal N has killed.
    """
    # What is ignored, as nohup has it, stays so.
    watched = {number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN} | {
        signal.SIGCHLD
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    adopt_orphans()
    ours, theirs = Pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    driver = os.fork()
    if driver == 0:
        ours.close()
        os.setsid()
        # Requests to stop wait until the driver has handlers for them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return drive(theirs)
    theirs.close()
    return _Keeper(driver, ours, watched).status()


class _Keeper:
    def __init__(self, driver: int, connection: Connection, watched: set[int]):
        self._driver, self._connection, self._watched = driver, connection, watched
        self._killed_for_memory = killed_for_memory()
        self._folder: str | None = None
        self._told: int | None = None  # the status that the driver ends with, once it has said why

    def status(self) -> int:
        """Waits for the driver's end, and sees to everything's."""
        wait_status = self._wait()
        left = kill_descendants()
        self._hear()
        if left:
            _say(f"error: these processes of the run do not end: {', '.join(left)}")
        if wait_status is None:
            _say(f"interrupted; {outlook(self._folder)}")
            return INTERRUPTED
        if self._told:
            # It need not be the process's own: where Ray's daemons die, Ray's code ends the driver, too, with status 1 a moment later.
            return self._told
        if os.WIFSIGNALED(wait_status):
            number = os.WTERMSIG(wait_status)
            _say(
                f"error: the driver (process {self._driver}) was killed by {self._named(number)}; {outlook(self._folder)}"
            )
            return 128 + number
        status = os.WEXITSTATUS(wait_status)
        if status and self._told is None:
            _say(
                f"error: the driver (process {self._driver}) ended with status {status} and no message; {outlook(self._folder)}"
            )
            return LOST
        return status

    def _wait(self) -> int | None:
        """As waitpid returns it; None if it was interrupted twice and did not leave."""
        interrupted, deadline = 0, None
        while deadline is None or time.monotonic() < deadline:
            info = signal.sigtimedwait(self._watched, 1.0)
            # Also where no signal came: one SIGCHLD may stand for several ends.
            if (ended := self._reap()) is not None:
                return ended
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            with contextlib.suppress(OSError):  # it has just ended
                self._connection.send(info.si_signo)
            interrupted += info.si_signo == signal.SIGINT
            if interrupted == 2:
                deadline = time.monotonic() + _LEAVING_SECONDS
        return None

    def _reap(self) -> int | None:
        """The driver's wait status, if it has ended; takes those of adopted orphans too."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self._driver:
                    return status
                if pid == 0:
                    return None
        except ChildProcessError:
            return None

    def _hear(self) -> None:
        """What the driver has told meanwhile: its folder, and that it gives the last message itself, with this status."""
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                told = self._connection.recv()
                self._folder = told.get("folder", self._folder)
                self._told = told.get("status", self._told)

    def _named(self, number: int) -> str:
        name = signal.Signals(number).name
        if number != signal.SIGKILL:
            return name
        if killed_for_memory() > self._killed_for_memory:
            return f"{name}, as the kernel does when memory is short, and did meanwhile"
        return f"{name}, by hand or by a scheduler"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(text, file=sys.stderr, flush=True)

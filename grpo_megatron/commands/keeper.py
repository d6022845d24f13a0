"""The keeper: a small process around a run. It outlives the run and kills whatever the run leaves behind.

The run itself is in a child process, the driver, which has a session of its own. All processes that the
driver starts descend from the keeper. Orphans among them become the keeper's children, so the keeper finds
all of them. The keeper passes signals on to the driver, which handles them (commands.driver).
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
# Exit status if the driver ended without a signal and without a message, as when Ray's library ends it.
LOST = 3
# A signal to every process of a job reaches the driver twice: directly and from the keeper. So the driver
# ignores a further SIGINT within this time after the first.
SAME_SIGNAL_SECONDS = 0.5
# The keeper ignores further SIGINTs for longer, because the driver may see the first one later. Otherwise the
# keeper would kill a driver that waits for the end of its step.
_KEEPERS_SAME_SIGNAL_SECONDS = 2 * SAME_SIGNAL_SECONDS
# Time limit for a driver to end after the second interrupt.
_LEAVING_SECONDS = 5.0


def keep(drive: Callable[[Connection], int]) -> int:
    """Fork the driver process, which executes the run, and stay behind as its keeper. Return the exit status.

    The keeper waits for the driver's end, and then kills all processes that the run has left behind.

    drive: executes the run in the driver. It takes the driver's end of a connection to the keeper, and
        returns the exit status.

    This function returns in both processes. In the driver it returns what `drive` returned. In the keeper it
    returns when no process of the run is left. The keeper's status is INTERRUPTED if the driver did not end
    after a second SIGINT, and else the status that the driver announced. Without an announced status, it is
    128 + N if signal N has killed the driver, LOST if the driver failed in another way, and else 0.
    """
    # Signals that are ignored, such as with nohup, stay ignored.
    watched = {signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN} | {
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
        # Requests to stop stay blocked until the driver has handlers for them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return drive(theirs)
    theirs.close()
    return _Keeper(driver, ours, watched).status()


class _Keeper:
    """The keeper process's work: pass signals on to the driver, wait for its end, kill leftover processes.

    driver: pid of the driver
    connection: connection to the driver
    watched: signals that are blocked in the keeper, so that sigtimedwait can receive them
    """

    def __init__(self, driver: int, connection: Connection, watched: set[int]):
        self._driver, self._connection, self._watched = driver, connection, watched
        self._killed_for_memory = killed_for_memory()
        self._folder: str | None = None
        # the exit status that the driver announced; None as long as it has not shown the last message itself
        self._told: int | None = None

    def status(self) -> int:
        """Wait for the end of the driver, kill its remaining descendants, and return the exit status.

        The driver is killed too if it has not ended five seconds after the second Ctrl-C.

        Prints the run's last message if the driver could not print it itself.
        """
        wait_status = self._wait()
        left = kill_descendants()
        self._hear()
        if left:
            say_last(
                f"error: these processes of the run could not be ended; end them manually: {', '.join(left)}"
            )
        if wait_status is None:
            say_last(f"interrupted; {outlook(self._folder)}")
            return INTERRUPTED
        if self._told is not None:
            # The announced status may differ from the process's own. When Ray's daemons die, Ray's code ends
            # the driver as well, with status 1 a moment later.
            return self._told
        if os.WIFSIGNALED(wait_status):
            signum = os.WTERMSIG(wait_status)
            say_last(
                f"error: the driver (process {self._driver}) was killed by {self._named(signum)}; "
                f"{outlook(self._folder)}"
            )
            return 128 + signum
        status = os.WEXITSTATUS(wait_status)
        if status:
            say_last(
                f"error: the driver (process {self._driver}) ended with status {status} and no message; "
                f"{outlook(self._folder)}"
            )
            return LOST
        return status

    def _wait(self) -> int | None:
        """Wait for the end of the driver, and pass signals on to it.

        Returns the driver's wait status, as os.waitpid gives it, or None if the driver has not ended
        _LEAVING_SECONDS after the second SIGINT.
        """
        first_interrupt = deadline = None
        while deadline is None or time.monotonic() < deadline:
            info = signal.sigtimedwait(self._watched, 1.0)
            # Check this even if no signal came: one SIGCHLD may stand for several ended processes.
            if (ended := self._reap()) is not None:
                return ended
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            with contextlib.suppress(OSError):  # the driver has just ended
                self._connection.send(info.si_signo)
            if info.si_signo == signal.SIGINT:
                now = time.monotonic()
                first_interrupt = first_interrupt or now
                if deadline is None and now - first_interrupt > _KEEPERS_SAME_SIGNAL_SECONDS:
                    deadline = now + _LEAVING_SECONDS
        return None

    def _reap(self) -> int | None:
        """Return the driver's wait status if it has ended, else None. Also reaps adopted orphans."""
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
        """Store the run's folder and the exit status, if the driver has sent them. Do not wait for them.

        The driver sends a status only if it prints the run's last message itself, or if there is no message.
        """
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                told = self._connection.recv()
                self._folder = told.get("folder", self._folder)
                self._told = told.get("status", self._told)

    def _named(self, signum: int) -> str:
        name = signal.Signals(signum).name
        if signum != signal.SIGKILL:
            return name
        if killed_for_memory() > self._killed_for_memory:
            return f"{name}, probably by the kernel, which killed processes for lack of memory"
        return f"{name}, probably manually or by a scheduler"


def say_last(text: str) -> None:
    """Print a message about the end of a run on stderr. Errors are ignored: the terminal may be gone."""
    with contextlib.suppress(OSError):  # a terminal that is gone
        print(text, file=sys.stderr, flush=True)

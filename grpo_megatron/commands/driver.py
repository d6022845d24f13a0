"""The driver: the process that runs a command such as `train`. A guard thread in it can end the run.

`drive` handles exceptions that the run raises. The guard thread handles events from outside, even if the run
is blocked. It records requests to stop. It ends the process if the run has not stopped in time, if a Ray
daemon dies, or if the keeper dies (commands.keeper: the parent process, which cleans up after the driver). In
each case, the run ends with one message and leaves no process behind.
"""

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import psutil

from grpo_megatron.commands.keeper import INTERRUPTED, LOST, SAME_SIGNAL_SECONDS, STOP_SIGNALS, say_last
from grpo_megatron.errors import Stopped, UserError, last_message, shortened
from grpo_megatron.files import disk_is_full
from grpo_megatron.monitoring.status import State
from grpo_megatron.process_tree import adopt_orphans, kill_descendants
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.stop import outlook

UNEXPECTED = 1
# Interval at which the guard's thread looks for events.
_LOOK_SECONDS = 0.5


def drive(command: Callable[[Guard], int], keeper: Connection) -> int:
    """Run a command in the driver process of a run, and return the exit status.

    If the command raises, the error's message is printed on stderr, and the error decides the exit status.
    The traceback of an unexpected error goes to the driver's log, which the message names.

    command: called with the guard, from which it receives requests to stop. It returns the exit status.
    keeper: connection to the keeper, the parent process that cleans up after this process.
    """
    guard = DriverGuard(keeper)
    try:
        status, message = command(guard), None
    except (UserError, Stopped) as error:
        status, message = error.exit_status, last_message(error)
    except BaseException as error:
        if disk_is_full(error):
            status, message = UserError.exit_status, guard.disk_is_full(error)
        else:
            status, message = UNEXPECTED, guard.log.unexpected(error)
    guard.finish(message, status)
    return status


class DriverGuard(Guard):
    """Guard of a driver process. Its thread handles requests to stop, and ends the process when necessary.

    The thread ends the process if the run does not stop in time, at a second SIGINT, or if a Ray daemon or
    the keeper (the parent process, which cleans up) dies. Create this object in the main thread, because it
    installs signal handlers. Its creation also redirects the output of libraries and child processes to the
    driver's log.
    """

    def __init__(self, keeper: Connection):
        super().__init__()
        adopt_orphans()
        self.log = _Log()
        self._keeper = keeper
        self._folder: str | None = None
        self._grace = self._grace_usr1 = 0.0  # there is no step yet
        # {pidfd, which can be waited for: (pid, name)} of the processes that the run needs.
        self._needed: dict[int, tuple[int, str]] = {}
        # finds these processes, while they are still starting
        self._find: Callable[[], list[psutil.Process]] | None = None
        self._port: int | None = None  # port on which one of them listens
        self._finding = threading.Lock()
        self._first_interrupt: float | None = None
        self._deadline: float | None = None
        self._limit = ""  # the configuration key that set the deadline
        self._ending = threading.Lock()  # its holder ends the process, with the last message
        self._signals, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                # The handler raises nothing: an exception could come at any place in any library.
                signal.signal(signum, lambda signum, _: os.write(self._write, bytes([signum])))
        # The keeper has left the signals blocked until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()

    def entered(self, folder: str, grace: float, grace_usr1: float) -> None:
        self._folder, self._grace, self._grace_usr1 = folder, grace, grace_usr1
        self._tell(folder=folder)
        self.log.move(f"{folder}/logs/driver.log")

    def needs(self, find: Callable[[], list[psutil.Process]] | None, port: int | None = None) -> None:
        with self._finding:
            self._find, self._port = None if port else find, port
            if find is None:
                for descriptor in self._needed:
                    os.close(descriptor)
                self._needed = {}
            else:
                self._note(find())

    def _note(self, processes: list[psutil.Process]) -> None:
        known = {pid for pid, _ in self._needed.values()}
        for process in processes:
            if process.pid not in known:
                with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                    name = process.name()
                    self._needed = self._needed | {os.pidfd_open(process.pid): (process.pid, name)}

    def disk_is_full(self, error: BaseException) -> str:
        """Return the last message to the user of a run that failed because a disk is full.

        error: exception that reports the full disk. If the exception names no file, the message names the
            run's folder.
        """
        path = getattr(error, "filename", None) or self._folder
        return (
            f"error: no space left on the disk of {path}, or of a temporary folder; free some space; "
            f"{outlook(self._folder)}"
        )

    def finish(self, message: str | None, status: int) -> None:
        """Print the run's last message, close the log, and send the exit status to the keeper.

        The keeper is the parent process, which ends with the same status (commands.keeper). If the guard's
        thread is already ending the process, for example after the death of a Ray daemon, this method blocks
        until the process ends, and prints nothing. The guard's thread then prints a message of its own.

        message: text for stderr; None if the run succeeded.
        status: the exit status.
        """
        self._ending.acquire()
        self._end(message, status)

    def _watch(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:
                # Without this thread, no signal would end the run, and the death of a Ray daemon would go
                # unnoticed.
                self.log.failed("the guard", error)
                time.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        """Wait up to _LOOK_SECONDS for an event, and handle it: a signal, or the death of a needed process.

        Needed processes are the keeper (the parent process) and Ray's daemons. If the time limit of a request
        to stop is over, this method also ends the process. Requests to stop are handled first, so that a
        failure in handling other events does not keep the run from ending.
        """
        try:
            ready = wait([self._keeper, self._signals, *self._needed], timeout=_LOOK_SECONDS)
        except (OSError, ValueError):  # `needs` has closed a descriptor in the meantime
            return
        if self._keeper in ready:
            self._hear_keeper()
        if self._signals in ready:
            for signum in os.read(self._signals, 64):
                self._asked(signal.Signals(signum))
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._out_of_time()
        self._look_at_needed()

    def _look_at_needed(self) -> None:
        with self._finding:
            if self._find:
                self._note(self._find())
            for descriptor in wait(self._needed, timeout=0):
                pid, name = self._needed[descriptor]
                self.leave(
                    LOST,
                    f"error: the run cannot continue, because {name} (process {pid}) "
                    f"{_how_it_ended(descriptor)}; {outlook(self._folder)}",
                )
            if self._port and not _is_open(self._port):
                # On SIGTERM, Ray's GCS closes its port but does not end. A minute later Ray ends this process
                # without a message.
                self.leave(
                    LOST,
                    f"error: the run cannot continue, because Ray's GCS closed its port {self._port}; "
                    f"{outlook(self._folder)}",
                )

    def _hear_keeper(self) -> None:
        try:
            self._asked(signal.Signals(self._keeper.recv()))
        except (EOFError, OSError):
            self.leave(
                128 + signal.SIGKILL,
                f"error: the process that started the driver was killed; {outlook(self._folder)}",
            )

    def _asked(self, by: signal.Signals) -> None:
        now = time.monotonic()
        if by == signal.SIGINT:
            if self._first_interrupt and now - self._first_interrupt > SAME_SIGNAL_SECONDS:
                self.leave(INTERRUPTED, f"interrupted; {outlook(self._folder)}")
            self._first_interrupt = self._first_interrupt or now
        key, grace = (
            ("run.grace_usr1", self._grace_usr1) if by == signal.SIGUSR1 else ("run.grace", self._grace)
        )
        if not self.stop.is_made or now + grace < self._deadline:
            self._deadline, self._limit = now + grace, key
        if not self.stop.is_made:
            self.stop.signal = by
            if self.stop.step is None:
                self.leave(
                    Stopped.exit_status,
                    f"stopped on request ({by.name}) while no step was in progress; {outlook(self._folder)}",
                )
            say_last(
                f"{by.name}: the run stops after step {self.stop.step} and its checkpoint, in at most "
                f"{grace:.0f} s; a second SIGINT (Ctrl-C) ends it at once"
            )

    def _out_of_time(self) -> None:
        self.leave(
            Stopped.exit_status,
            f"stopped on request ({self.stop.signal.name}) in step {self.stop.step}, which took longer than "
            f"{self._limit} allows; " + outlook(self._folder),
        )

    def leave(self, status: int, message: str) -> NoReturn:
        """End this process and all of its descendants now, with this exit status and last message.

        Before that, the message is printed, and the run's final state is written to status.json. If `finish`
        has been called already, only the calling thread ends. Only the guard's thread may call this method.
        """
        if not self._ending.acquire(blocking=False):
            sys.exit()  # ends only this thread: the run has just ended by itself
        try:
            self._end(message, status)
            self._note_end(
                State.interrupted if status in (Stopped.exit_status, INTERRUPTED) else State.failed, message
            )
            # Other threads may report failures that are only consequences of the end.
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            kill_descendants()
        finally:
            os._exit(status)  # always, because no other code would end the process

    def _end(self, message: str | None, status: int) -> None:
        self._tell(status=status)
        if message:
            say_last(message)
        self.log.close()

    def _note_end(self, state: State, message: str) -> None:
        """Write the run's final state to status.json before os._exit ends this process.

        os._exit skips StatusFile.__exit__, which usually writes the state. Without this method, the file
        would say `running` forever.
        """
        if self.status:
            self.status.overrule(state, message.removeprefix("error: "))

    def _tell(self, **what: Any) -> None:
        with contextlib.suppress(OSError):  # the keeper is gone, which the guard's thread notices
            self._keeper.send(what)


class _Log:
    """The driver's log file. It receives what libraries and child processes write to stdout and stderr.

    File descriptors 1 and 2 lead to the log, while sys.stdout and sys.stderr still write to the terminal. The
    log is a temporary file until the run has a folder.
    """

    def __init__(self) -> None:
        self.path, self._temporary = None, True
        descriptor, self.path = tempfile.mkstemp(prefix="grpo-megatron-", suffix=".log")
        for fd, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, name)
            stream.flush()
            terminal = open(  # noqa: SIM115
                os.dup(fd), "w", buffering=1, encoding=stream.encoding, errors="backslashreplace"
            )
            setattr(sys, name, terminal)
        self._redirect(descriptor)
        threading.excepthook = self._thread_failed

    def _redirect(self, descriptor: int) -> None:
        for fd in (1, 2):
            os.dup2(descriptor, fd)
        os.close(descriptor)

    def move(self, path: str) -> None:
        """Move the log to the file `path`, and write to `path` from now on."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, Path(self.path).read_bytes())
        self._redirect(descriptor)
        os.unlink(self.path)
        self.path, self._temporary = path, False

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        self.failed(f"thread {failure.thread}", failure.exc_value)

    def failed(self, where: str, error: BaseException) -> None:
        self._write([f"in {where}:\n", *traceback.format_exception(error)])

    def unexpected(self, error: BaseException) -> str:
        """Write an unexpected error's traceback to the log, and return a message that names the log.

        The log is then kept, even if it is a temporary file.
        """
        self._write(traceback.format_exception(error))
        self._temporary = False  # keep the file
        first = next(iter(str(error).splitlines()), "")
        return (
            f"error: unexpected {type(error).__name__}: {shortened(first, 300)}\n"
            f"its traceback is in {self.path}"
        )

    def _write(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Delete the log file if it is still temporary: the run got no folder, and no message names it."""
        if self._temporary:
            Path(self.path).unlink(missing_ok=True)
            self._temporary = False


def _is_open(port: int) -> bool:
    """Return False if this machine refuses connections to `port`, because no process listens there any more.

    A process that is too busy to answer in time counts as open.
    """
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _how_it_ended(descriptor: int) -> str:
    """Return how a process ended, such as `was killed by SIGKILL`, for a message.

    descriptor: file descriptor of the process, from os.pidfd_open.
    """
    try:
        # WNOWAIT leaves the exit status for the process's parent.
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        end = None
    if end is None:
        return "has ended"
    if end.si_code == os.CLD_EXITED:
        return f"ended with status {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"

"""The process that drives a run: how it hears that it shall end, and how it ends; with one message, and nothing left running.

Whatever raises here or elsewhere ends in `drive`. What comes from outside is seen by a thread, which does not wait for the run: it notes
requests to stop, and ends the process when a request's time is over, the keeper is gone, or a process dies that the run cannot do without.
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

from grpo_megatron.commands.keeper import INTERRUPTED, LOST, STOP_SIGNALS
from grpo_megatron.errors import Stopped, UserError, shortened
from grpo_megatron.monitoring.status import State
from grpo_megatron.paths import disk_is_full, within
from grpo_megatron.process_tree import adopt_orphans, kill_descendants
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.stop import outlook

UNEXPECTED = 1
# A signal to every process of a job reaches the driver twice, by the keeper too.
_SAME_SIGNAL_SECONDS = 0.5
# The guard looks around as often.
_LOOK_SECONDS = 0.5
# What a disk that hangs may take of the time of a process that is about to end.
_WRITING_SECONDS = 2.0


def drive(command: Callable[[Guard], int], keeper: Connection) -> int:
    """command(guard) as a run with a keeper; its exit status, or that of what it raised, whose message is on stderr."""
    guard = DriverGuard(keeper)
    try:
        status, message = command(guard), None
    except (UserError, Stopped) as error:
        status, message = error.exit_status, describe(error)
    except BaseException as error:
        if disk_is_full(error):
            status, message = UserError.exit_status, guard.disk_is_full(error)
        else:
            status, message = UNEXPECTED, guard.log.unexpected(error)
    guard.finish(message, status)
    return status


def describe(error: UserError | Stopped) -> str:
    return str(error) if isinstance(error, Stopped) else f"error: {error}"


class DriverGuard(Guard):
    """A Guard that ends the run. To be made in the main thread."""

    def __init__(self, keeper: Connection):
        super().__init__()
        adopt_orphans()
        self.log = _Log()
        self._keeper = keeper
        self._folder: str | None = None
        self._grace = self._grace_usr1 = 0.0  # there is no step yet
        self._needed: dict[
            int, tuple[int, str]
        ] = {}  # pid and name of each, by a descriptor that can be waited for
        self._find: Callable[[], list[psutil.Process]] | None = None  # while they start
        self._port: int | None = None  # where one of them listens
        self._finding = threading.Lock()
        self._first_interrupt: float | None = None
        self._deadline: float | None = None
        self._limit = ""  # the key that set it
        self._ending = threading.Lock()  # whoever has it says the last word
        self._signals, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                # Nothing is raised: that would be at any place in any library.
                signal.signal(number, lambda number, _: os.write(self._write, bytes([number])))
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, STOP_SIGNALS
        )  # the keeper has left them blocked until here
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
        """The message for a write that failed for it, wherever in a library. Not every such error knows the file."""
        path = getattr(error, "filename", None) or self._folder
        return f"error: no space left on the disk of {path}, or of a temporary folder; make room; {outlook(self._folder)}"

    def finish(self, message: str | None, status: int) -> None:
        """The run has ended by itself. Does not return where the thread is ending it already: its message explains what failed here."""
        self._ending.acquire()
        self._end(message, status)

    def _watch(self) -> None:
        told = ""
        while True:
            try:
                self._look()
            except Exception as error:
                # Without this thread no signal would end the run, and no death of Ray's be noticed.
                if repr(error) != told:
                    told = repr(error)
                    with contextlib.suppress(OSError):
                        within(_WRITING_SECONDS, lambda error=error: self.log.failed("the guard", error))
                time.sleep(_LOOK_SECONDS)

    def _look(self) -> None:
        """Waits a little for news, and answers it. Requests come first: what else fails here must not keep the run from its end."""
        try:
            ready = wait([self._keeper, self._signals, *self._needed], timeout=_LOOK_SECONDS)
        except (OSError, ValueError):  # closed meanwhile by `needs`
            return
        if self._keeper in ready:
            self._hear_keeper()
        if self._signals in ready:
            for number in os.read(self._signals, 64):
                self._asked(signal.Signals(number))
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
                    f"error: {name} (process {pid}) {_how_it_ended(descriptor)}, and the run with it; {outlook(self._folder)}",
                )
            if self._port and not _is_open(self._port):
                # Ray's GCS closes its port on SIGTERM, and then does not end. A minute later Ray ends this process without a word.
                self.leave(
                    LOST,
                    f"error: Ray's GCS closed its port {self._port}, and the run with it; {outlook(self._folder)}",
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
            if self._first_interrupt and now - self._first_interrupt > _SAME_SIGNAL_SECONDS:
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
                    f"stopped on request ({by.name}) with no step to finish; {outlook(self._folder)}",
                )
            self._say(
                f"{by.name}: stopping after step {self.stop.step} and its checkpoint, within {grace:.0f} s (SIGINT: at once)"
            )

    def _out_of_time(self) -> None:
        self.leave(
            Stopped.exit_status,
            f"stopped on request ({self.stop.signal.name}) in step {self.stop.step}, which took longer than {self._limit} allows; "
            + outlook(self._folder),
        )

    def leave(self, status: int, message: str) -> NoReturn:
        """End this process and all that descends from it, now. For the thread."""
        if not self._ending.acquire(blocking=False):
            sys.exit()  # of the thread: the run has ended by itself just now
        try:
            self._end(message, status)
            self._note_end(
                State.interrupted if status in (Stopped.exit_status, INTERRUPTED) else State.failed, message
            )
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - what other threads say to what follows is no news
            kill_descendants()
        finally:
            os._exit(status)  # whatever fails above: nobody else would end the process

    def _end(self, message: str | None, status: int) -> None:
        self._tell(status=status)
        if message:
            self._say(message)
        self.log.close()

    def _note_end(self, state: State, message: str) -> None:
        """In status.json, which would go on to say that the run is running: no context of this process is left by its end."""
        if self.status:
            with contextlib.suppress(TimeoutError):  # a disk that hangs
                within(_WRITING_SECONDS, lambda: self.status.overrule(state, message.removeprefix("error: ")))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(text, file=sys.stderr, flush=True)

    def _tell(self, **what: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone, which the thread sees
            self._keeper.send(what)


class _Log:
    """Where the terminal does not follow: what libraries and child processes write to the descriptors 1 and 2 themselves.

    Python's own stdout and stderr stay where they are. In a temporary file until the run has a folder.
    """

    def __init__(self) -> None:
        self.path, self._temporary = None, True
        descriptor, self.path = tempfile.mkstemp(prefix="grpo-megatron-", suffix=".log")
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, name)
            stream.flush()
            terminal = open(
                os.dup(number), "w", buffering=1, encoding=stream.encoding, errors="backslashreplace"
            )  # noqa: SIM115
            setattr(sys, name, terminal)
        self._redirect(descriptor)
        threading.excepthook = self._thread_failed

    def _redirect(self, descriptor: int) -> None:
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.close(descriptor)

    def move(self, path: str) -> None:
        """From here on into this file."""
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
        """The message for what is no UserError, whose traceback is in the log."""
        self._write(traceback.format_exception(error))
        self._temporary = False  # it stays
        first = next(iter(str(error).splitlines()), "")
        return f"error: unexpected {type(error).__name__}: {shortened(first, 300)}\nwhere it came from is in {self.path}"

    def _write(self, lines: list[str]) -> None:
        with contextlib.suppress(OSError):  # a full disk
            os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        """Nothing but a driver without a run's folder and without a defect leaves a temporary file, which goes."""
        if self._temporary:
            Path(self.path).unlink(missing_ok=True)
            self._temporary = False


def _is_open(port: int) -> bool:
    """Whether somebody listens there on this machine, or is too busy to say."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.2).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        pass
    return True


def _how_it_ended(descriptor: int) -> str:
    """descriptor: of a process that has ended, by pidfd_open."""
    try:
        # Left for its parent to be told too.
        end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        end = None
    if end is None:
        return "has ended"
    if end.si_code == os.CLD_EXITED:
        return f"ended with status {end.si_status}"
    return f"was killed by {signal.Signals(end.si_status).name}"

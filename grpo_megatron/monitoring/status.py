"""The file status.json in the run's folder: state, step and phase of a run, for `grpo-megatron status`.

A thread replaces the file atomically: at most once a second if something has changed, and every ten seconds
if nothing has. So the file's age shows on any machine whether the run still exists.
"""

import os
import socket
import threading
import time
from enum import Enum
from pathlib import Path
from typing import Any

from grpo_megatron.errors import Stopped, UserError
from grpo_megatron.files import json_text, read_object, replace_text
from grpo_megatron.paths import folder_problem, is_absent
from grpo_megatron.process_tree import is_running, start_mark

STATUS = "status.json"
# Seconds between two writes: if something has changed, and if nothing has.
_CHANGED, _UNCHANGED = 1.0, 10.0
# If a file has not been rewritten for this many seconds, and its process is on another machine, the run is
# considered gone.
_OLD = 60.0


class State(str, Enum):
    running = "running"
    finished = "finished"
    failed = "failed"
    interrupted = "interrupted"
    gone = "gone"  # never written; readers report it if the writer was killed


class StatusFile:
    """Keeps status.json up to date inside a `with` block, for `grpo-megatron status`.

    At the end of the block, the final state is written: `finished`, `interrupted` after Stopped or
    KeyboardInterrupt, or `failed` after another exception.
    """

    def __init__(self, directory: str, run: str, total_steps: int):
        """Prepare the values of a run that is starting. Nothing is written before the `with` block.

        directory: the run's folder
        run: the run's name
        total_steps: number of steps that the run will make
        """
        self._path = Path(directory, STATUS)
        now = time.time()
        self._values: dict[str, Any] = {
            "state": State.running.value,
            "run": run,
            "step": 0,
            "total_steps": total_steps,
            "phase": "start",
            "phase_since": now,
            "restarts": 0,
            "started": now,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_started": start_mark(os.getpid()),
            "pid_namespace": _pid_namespace(),
        }
        self._seconds = 0.0
        self._lock, self._changed, self._end = threading.Lock(), True, threading.Event()
        self._writing, self._is_overruled = threading.Lock(), False
        self._thread = threading.Thread(target=self._keep, name="status", daemon=True)

    def __enter__(self) -> "StatusFile":
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback) -> None:
        state, words = State.finished, ""
        if isinstance(error, UserError):
            state, words = State.failed, str(error)
        elif isinstance(error, Stopped):
            state, words = State.interrupted, str(error)
        elif isinstance(error, Exception):
            state, words = State.failed, f"{type(error).__name__}: {error}"
        elif error is not None:  # such as KeyboardInterrupt
            state, words = State.interrupted, type(error).__name__
        self.note(state=state.value, error=words)
        self._close()

    def overrule(self, state: State, message: str) -> None:
        """Write the run's final state, for a process that will end without leaving the `with` block.

        The thread of the driver's guard calls this method before it ends the process. Calls of `note`, and
        errors raised inside the `with` block, then do not change the file any more.

        message: text for the user about the end of the run.
        """
        with self._lock:
            self._values |= {"state": state.value, "error": message}
            self._is_overruled = True
        self._close()

    def _close(self) -> None:
        self._end.set()
        self._thread.join()
        self._write()

    def phase(self, name: str) -> None:
        """Record the phase that the driver begins now."""
        self.note(phase=name, phase_since=time.time())

    def note(self, **values: Any) -> None:
        """Set values of status.json by name. Another thread writes the file within about a second.

        Does nothing after `overrule` has set the final state.

        values: new values, which must be of JSON's types. `processes` is a list of rows from
            cluster.hang.at_work.
        """
        with self._lock:
            if not self._is_overruled:
                self._values |= values
                self._changed = True

    def take_seconds(self) -> float:
        """Return the seconds spent on writing the file since the last call, for the metric time/monitor."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _keep(self) -> None:
        written = time.monotonic()
        while not self._end.wait(_CHANGED):
            if self._changed or time.monotonic() - written >= _UNCHANGED:
                self._write()
                written = time.monotonic()

    def _write(self) -> None:
        start = time.perf_counter()
        with self._writing:
            with self._lock:
                self._values["written"] = time.time()
                text, self._changed = json_text(self._values), False
            try:
                replace_text(self._path, text, durable=False)
            except OSError:
                # Try again later. Other writers report that the disk is full.
                self._changed = True
        self._seconds += time.perf_counter() - start


def read_status(folder: str) -> dict[str, Any]:
    """Return the values of status.json in a run's folder, as {name: value}.

    If the file says `running`, but the process that wrote the file has ended, the returned state is `gone`.
    Raises UserError if the folder is not the folder of a run, or if the file is not a status or is damaged.
    """
    problem = folder_problem(folder)
    if problem:
        cause = None if is_absent(folder) else OSError(problem)
        raise UserError(f"{folder} {problem}; it must be the folder of a run") from cause
    path = Path(folder, STATUS)
    if is_absent(path):
        raise UserError(f"{folder} contains no {STATUS}, so it is not the folder of a run; check the path")
    found = read_object(path)
    if found.get("state") not in list(State):
        raise UserError(f"{path} does not contain the status of a run; check the path")
    if found["state"] == State.running and not _writer_is_running(found):
        found["state"] = State.gone.value
    return found


def _writer_is_running(found: dict[str, Any]) -> bool:
    """Return True if the process that wrote status.json is still running.

    A process on another machine cannot be checked. It counts as running if the file is recent.

    found: the values of the file.
    """
    # The host name is not enough: a container may have the name of its machine, but its pids are its own.
    if (found["host"], found.get("pid_namespace")) != (socket.gethostname(), _pid_namespace()):
        return time.time() - found["written"] < _OLD
    return is_running(found["pid"], found["pid_started"])


def _pid_namespace() -> str:
    """Return the id of this process's pid namespace. Pids can be compared only within one namespace."""
    return os.readlink("/proc/self/ns/pid")

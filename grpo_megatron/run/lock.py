"""Locks on a run's folder and on checkpoints.

One run at a time owns a run's folder. A checkpoint that a run begins from is not deleted by another run.

The locks are the kernel's (flock). They end with the process that holds them, however it ends. Processes that
it starts do not inherit them, because Python opens files that way.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.monitoring.status import State, read_status
from grpo_megatron.process_tree import is_running, start_mark
from grpo_megatron.run.manifest import MANIFEST

logger = logging.getLogger(__name__)

_OWNER = "owner.json"
# A file server keeps the locks of a lost node for a while: NFS for 90 seconds.
_WAIT_SECONDS = 120


class Ownership:
    """Ownership of a run's folder until `release`. The folder is created if it does not exist.

    If the owner's node may be lost, the constructor waits up to _WAIT_SECONDS until the file server releases
    the lock. Raises UserError, which names the owner, if another run has the folder. Raises OSError if the
    folder cannot be created.

    note: a line to show to the user, if the file system has no locks; else ""
    """

    def __init__(self, folder: Path):
        """Take the folder, and write this process's host and pid into owner.json."""
        self.note = ""  # a line to show about the lock
        self._file = self._take(folder)
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json_text(_self_description()))
        self._file.flush()
        os.fsync(self._file.fileno())  # for other nodes, and for the next start if this node is lost

    def _take(self, folder: Path) -> IO[str]:
        path = folder / _OWNER
        waited = 0
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held for the run
            except FileNotFoundError:
                continue  # the folder was moved aside in between
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                record = _record(file)
                if not record or _may_live(record) or waited == _WAIT_SECONDS:
                    _refuse(folder, record)
                if not waited:
                    logger.warning(
                        f"{folder} is locked by {_named(record)}, which is gone or an earlier start of this "
                        f"job; waits up to {_WAIT_SECONDS} s for the file server to release that"
                    )
                file.close()
                time.sleep(1)
                waited += 1
                continue
            except OSError as error:
                record = _record(file)
                if _may_live(record):
                    _refuse(folder, record, f"; if that run has ended, delete {path}")
                self.note = (
                    f"{folder}: this file system has no locks ({error.strerror}), so a second run is known "
                    f"by {_OWNER} alone"
                )
            else:
                record = _record(file)
                # Some file systems have separate locks for each node. An owner on this node is gone, because
                # the kernel has just granted its lock. An owner on another node may still be there.
                if (
                    record.get("host") != socket.gethostname()
                    and _may_live(record)
                    and self._goes_on(folder, record)
                ):
                    file.close()
                    _refuse(folder, record)
            # Another run that was about to begin may have moved the folder aside before this one had the
            # lock.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
            file.close()

    def _goes_on(self, folder: Path, record: dict[str, Any]) -> bool:
        """Return True if an owner on another node still rewrites status.json, so that its run goes on.

        record: the owner's entry in owner.json. Watches the file for up to _WAIT_SECONDS.
        """
        written = None
        for _ in range(_WAIT_SECONDS):
            try:
                status = read_status(str(folder))
            except UserError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # a file that cannot be read says nothing about its run
                return False  # the owner had not begun
            if status["state"] != State.running:
                return False
            if written is None:
                logger.warning(f"{folder} may be written to by {_named(record)}; looks whether that goes on")
                written = status["written"]
            elif status["written"] != written:
                return True
            time.sleep(1)
        return False

    def release(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.close()


def _refuse(folder: Path, record: dict[str, Any], advice: str = "") -> None:
    known = _named(record) or "it is just starting"
    raise UserError(
        f"another run writes to {folder} ({known}): wait for its end, or choose another run.name{advice}"
    )


def _named(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record.items() if name != "started")


def _self_description() -> dict[str, Any]:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    job = os.environ.get("SLURM_JOB_ID")
    return own | {"started": start_mark(os.getpid())} | ({"Slurm job": job} if job else {})


def _record(file: IO[str]) -> dict[str, Any]:
    """Return what the owner of the folder wrote into owner.json; empty if the file is empty or incomplete."""
    file.seek(0)
    try:
        found = json.load(file)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _may_live(record: dict[str, Any]) -> bool:
    """Return True if the owner may still be running, judged by its record in owner.json rather than by locks.

    A process on another host counts as running, with one exception: if it belongs to an earlier start of this
    Slurm job, it has ended.
    """
    if not record:
        return False
    if record.get("host") == socket.gethostname():
        return is_running(record.get("pid"), record.get("started"))
    job = os.environ.get("SLURM_JOB_ID")
    return job is None or job != record.get("Slurm job")


@contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """Keep other runs from deleting a checkpoint while the context is open.

    It holds a shared lock on the checkpoint's manifest, for which the deleting run looks (`is_in_use`).
    """
    with open(checkpoint / MANIFEST, "rb") as file:
        with suppress(OSError):  # no locks here
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_in_use(checkpoint: Path) -> bool:
    try:
        with open(checkpoint / MANIFEST, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # no locks here, or no manifest: not a checkpoint that a run begins from
    return False

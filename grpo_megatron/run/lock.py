"""Locks on a run's folder and on checkpoints.

The lock on a folder ensures that only one run at a time writes to it. The lock on a checkpoint prevents other
runs from deleting the checkpoint that a run begins from.
"""

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, read_object, replace_text
from grpo_megatron.monitoring.status import STATUS, State, read_status
from grpo_megatron.process_tree import is_running, start_mark
from grpo_megatron.run.manifest import MANIFEST

logger = logging.getLogger(__name__)

OWNER = "owner.json"  # names the owner of a run's folder
# Seconds to wait for a lock. A file server keeps the locks of a lost node for a while: NFS for 90 seconds.
_WAIT_SECONDS = 120
# Largest difference, in seconds, that is expected between the clocks of two nodes.
_CLOCKS_DIFFER = 600.0


class Ownership:
    """Lock on a run's folder, held until `release` is called or this process ends.

    The locked file lies beside the folder, so that the folder can be renamed. The file owner.json in the
    folder tells other runs which process owns the folder.

    note: warning to show to the user if the file system does not support locks; otherwise ""
    """

    def __init__(self, folder: Path):
        """Lock a run's folder, and write this process's host and pid into owner.json in the folder.

        The folder is created if it does not exist. This may wait up to two minutes for each of two reasons. A
        file server may still keep the lock of a process that has ended. Or owner.json names a process on
        another node, and only changes of status.json show if that process still runs.

        Raises UserError, which names the owner, if another run owns the folder. Raises UserError if
        owner.json or status.json cannot be read. Raises OSError if the folder cannot be created or written.
        """
        self.note = ""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(f".{folder.name}.lock")
        self._lock = FileLock(lock, timeout=0, thread_local=False, fallback_to_soft=False)
        self._take()
        replace_text(folder / OWNER, json_text(_self_description()))

    def release(self) -> None:
        (self._folder / OWNER).unlink(missing_ok=True)
        self._lock.release()

    def _take(self) -> None:
        owner = self._owner()
        try:
            self._lock.acquire()
        except Timeout:
            if not owner or self._lives(owner):
                self._refuse(owner)
            self._wait(owner)
        except OSError as error:
            if _may_live(owner):
                self._refuse(owner, f"; if that run has ended, delete {self._folder / OWNER}")
            self.note = (
                f"{self._folder}: this file system does not support locks ({error.strerror}), so only the "
                f"file {OWNER} prevents a second run from using the folder"
            )
        else:
            # Some file systems keep separate locks for each node. An owner on this node has ended, because
            # the kernel has just granted its lock. An owner on another node may still be running.
            if owner.get("host") != socket.gethostname() and self._lives(owner):
                self._lock.release()
                self._refuse(owner)

    def _wait(self, owner: dict[str, Any]) -> None:
        logger.warning(
            f"{self._folder} is locked by {_named(owner)}, which has ended or is an earlier start of this "
            f"job; waiting up to {_WAIT_SECONDS} s for the file server to release the lock"
        )
        try:
            self._lock.acquire(timeout=_WAIT_SECONDS, poll_interval=1)
        except Timeout:
            self._refuse(self._owner())

    def _lives(self, owner: dict[str, Any]) -> bool:
        """Return True if the owner is still running. For a process on another node, see `_goes_on`."""
        return _may_live(owner) and (owner["host"] == socket.gethostname() or self._goes_on(owner))

    def _goes_on(self, owner: dict[str, Any]) -> bool:
        """Return True if the owner, a process on another node, is still running.

        A running run rewrites status.json again and again. So this waits up to two minutes for a change of
        the file. The result is False at once if the file does not exist, is damaged, is older than the
        difference of two nodes' clocks may be, or does not say that the run is running. Raises UserError if
        reading the file fails.

        owner: content of owner.json, which gives host and pid of the owner.
        """
        written = None
        for _ in range(_WAIT_SECONDS):
            try:
                status = read_status(str(self._folder))
            except UserError as error:
                if isinstance(error.__cause__, OSError):
                    raise  # the file exists but cannot be read, so the run may be running
                return False  # the owner has not written status.json, so its run had not begun
            # `gone` only means that the file is old by the clock of this node.
            if status["state"] not in (State.running, State.gone):
                return False
            if time.time() - status["written"] > _CLOCKS_DIFFER:
                return False
            if written is None:
                logger.warning(
                    f"{self._folder} may still be written to by {_named(owner)}; waiting up to "
                    f"{_WAIT_SECONDS} s to see whether its {STATUS} changes"
                )
                written = status["written"]
            elif status["written"] != written:
                return True
            time.sleep(1)
        return False

    def _owner(self) -> dict[str, Any]:
        """Return the content of owner.json, which gives host and pid of the process that owns the folder.

        The result is empty if the file does not exist or is damaged. Raises UserError if reading the file
        fails.
        """
        try:
            return read_object(self._folder / OWNER)
        except UserError as error:
            if isinstance(error.__cause__, OSError):
                raise  # the file exists but cannot be read, so it may name an owner
            return {}

    def _refuse(self, owner: dict[str, Any], advice: str = "") -> None:
        known = _named(owner) or "it is just starting"
        raise UserError(
            f"another run is writing to {self._folder} ({known}); wait until it ends, or choose another "
            f"run.name{advice}"
        )


def _named(owner: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in owner.items() if name != "started")


def _self_description() -> dict[str, Any]:
    own = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    job = os.environ.get("SLURM_JOB_ID")
    return own | {"started": start_mark(os.getpid())} | ({"Slurm job": job} if job else {})


def _may_live(owner: dict[str, Any]) -> bool:
    """Return True if the process that owner.json names may still be running. Locks are not looked at.

    A process on this host is looked up. A process on another host counts as running, unless it belongs to an
    earlier start of the Slurm job in which this process runs.

    owner: content of owner.json. If it is empty, the result is False.
    """
    if not owner:
        return False
    if owner.get("host") == socket.gethostname():
        return is_running(owner.get("pid"), owner.get("started"))
    job = os.environ.get("SLURM_JOB_ID")
    return job is None or job != owner.get("Slurm job")


@contextmanager
def in_use(checkpoint: Path) -> Iterator[None]:
    """Prevent other runs from deleting a checkpoint, inside the `with` block.

    The block holds a shared lock on the checkpoint's manifest. A run that wants to delete a checkpoint checks
    this lock first (`is_in_use`). On a file system without locks, the checkpoint is not protected.

    checkpoint: the checkpoint's folder.
    """
    with open(checkpoint / MANIFEST, "rb") as file:
        with suppress(OSError):  # the file system does not support locks
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def is_in_use(checkpoint: Path) -> bool:
    try:
        with open(checkpoint / MANIFEST, "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # The file system does not support locks, or there is no manifest. No run begins from a folder without
        # a manifest.
        return False
    return False

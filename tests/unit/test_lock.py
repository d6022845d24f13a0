"""Ownership of a run's folder if the kernel's locks are no evidence.

That is so after the loss of a node, and where each node has locks of its own.
"""

import errno
import json
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.status import STATUS, StatusFile
from grpo_megatron.run.lock import Ownership
from tests.messages import logged

THERE = {"host": "there", "pid": 1, "started": 1.0, "Slurm job": "7"}


@pytest.fixture
def folder(tmp_path):
    """Folder of a run of Slurm job 7 on another node, which was killed or goes on.

    Its status has just been written.
    """
    with StatusFile(str(tmp_path), "mine", 4):
        pass
    write(tmp_path, state="running", host="there", written=time.time())
    (tmp_path / "owner.json").write_text(json.dumps(THERE))
    return tmp_path


def write(folder, **values) -> None:
    status = json.loads((folder / STATUS).read_text())
    (folder / STATUS).write_text(json.dumps(status | values))


@pytest.fixture
def sleeps(monkeypatch):
    """List of functions that are called for each second of watching. The waiting itself is left out."""
    called = []
    monkeypatch.setattr(time, "sleep", lambda seconds: [call() for call in called])
    return called


def lock_is_held(monkeypatch, seconds: int) -> None:
    """Let the file server hold the lock for so many seconds."""
    acquire = FileLock.acquire

    def held(lock, timeout=0, poll_interval=0):
        if timeout < seconds:
            raise Timeout(lock.lock_file)
        return acquire(lock)

    monkeypatch.setattr(FileLock, "acquire", held)


def own(folder) -> list[str]:
    """Own the folder and release it. Return the messages that are logged before."""
    with logged() as said:
        ownership = Ownership(folder)
    assert json.loads((folder / "owner.json").read_text())["pid"] == os.getpid()
    ownership.release()
    return said


def test_a_job_that_was_put_back_waits_for_the_lock_of_its_lost_node(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    lock_is_held(monkeypatch, 100)
    said = own(folder)
    assert len(said) == 1
    assert "is locked by host there" in said[0]


def test_it_does_not_wait_for_ever(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    lock_is_held(monkeypatch, 121)
    with pytest.raises(UserError, match=r"another run is writing to .* Slurm job 7"):
        own(folder)


@pytest.mark.parametrize("held", [0, 100])  # 0: each node has locks of its own
@pytest.mark.parametrize("behind", [0, 300])
@pytest.mark.parametrize("job", [None, "8"])
def test_a_run_on_another_node_keeps_its_folder_until_it_is_lost(
    job, behind, held, folder, sleeps, monkeypatch
):
    """A start on another node was refused without Slurm while the file server kept the lock of a lost node.

    A second run was let in if the clocks of the nodes differ.

    behind: seconds by which the clock of the other node is behind.
    held: seconds for which the file server keeps the lock.
    """
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    if held:
        lock_is_held(monkeypatch, held)
    write(folder, written=time.time() - behind)
    sleeps.append(lambda: write(folder, written=time.time() - behind))
    with pytest.raises(UserError, match=r"another run is writing to .*host there"):
        own(folder)
    assert json.loads((folder / "owner.json").read_text()) == THERE
    sleeps.clear()  # it is killed
    said = own(folder)
    assert len(said) == (2 if held else 1)
    assert "may still be written to by host there" in said[0]


@pytest.mark.parametrize(
    ("status", "job"),
    [({"written": time.time() - 601}, "8"), ({"state": "failed"}, "8"), ({"state": "none"}, "8"), ({}, "7")],
)
def test_a_run_that_has_ended_is_not_waited_for(status, job, folder, sleeps, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    write(folder, **status)
    sleeps.append(lambda: pytest.fail("waits"))
    assert own(folder) == []


@pytest.mark.parametrize("name", [STATUS, "owner.json"])
def test_a_file_that_cannot_be_read_does_not_let_a_second_run_in(name, folder, sleeps, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    read = Path.read_bytes

    def fail(path):
        if path.name == name:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(
        UserError, match=rf"{name} cannot be read on .*: Stale file handle; check the file system"
    ):
        own(folder)
    assert json.loads((folder / "owner.json").read_text()) == THERE

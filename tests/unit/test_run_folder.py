"""Leftovers of a killed run: half a file gives one message, or goes with the steps that are taken back.

Only one run writes at a time.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from grpo_megatron.cli import main
from grpo_megatron.config.command import Command
from grpo_megatron.errors import UserError
from grpo_megatron.process_tree import start_mark
from grpo_megatron.run.folder import (
    METRICS,
    beginning,
    open_ledger,
    open_run_folder,
    rewind_folder,
)
from grpo_megatron.run.lock import Ownership, is_in_use
from grpo_megatron.run.resume import open_checkpoint
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.serve.command import serve
from grpo_megatron.serve.tenant import FOLDER
from tests.ledgers import used_prompts
from tests.unit.run_folders import NAME, checkpoint, config_of, rows, run_with, state_of


def test_a_resumed_run_keeps_what_there_is_up_to_its_step(tmp_path):
    folder = run_with(tmp_path, 2, 4, metrics=rows(1, 2, 3, 4), trained=4)
    written = (folder / LEDGER).read_bytes()
    (folder / "result.json").write_text("{}")
    for name in ("step_00000004.deleted", "step_00000006.partial"):
        (folder / "checkpoints" / name).mkdir()
    begun = open_checkpoint(folder / "checkpoints" / "step_00000002", Command.train)
    rewind_folder(config_of(tmp_path), str(folder), begun)
    open_ledger(str(folder), begun, replayed=False)
    assert (folder / METRICS).read_text() == rows(1, 2)
    assert used_prompts(folder) == {1: [101], 2: [102]}
    assert (folder / LEDGER).read_bytes().startswith(written)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004.aside",
    ]
    assert not (folder / "result.json").exists()


def test_one_that_was_set_aside_stays_when_the_run_begins_from_it(tmp_path, capsys):
    folder = run_with(tmp_path, 2, 4)
    checkpoints = folder / "checkpoints"
    first = checkpoints / "step_00000004"
    for number in (1, 2):  # the user goes back to step 2 twice
        (first / "course").write_text(str(number))
        second = open_checkpoint(checkpoints / "step_00000002", Command.train)
        rewind_folder(config_of(tmp_path), str(folder), second)
        checkpoint(first, state_of(4))
    capsys.readouterr()
    aside = open_checkpoint(checkpoints / "step_00000004.aside", Command.train)
    rewind_folder(config_of(tmp_path), str(folder), aside)
    assert capsys.readouterr().out.startswith(f"renamed {first} to step_00000004.aside.2")
    assert (checkpoints / "step_00000004.aside" / "course").read_text() == "1"
    assert (checkpoints / "step_00000004.aside.1" / "course").read_text() == "2"
    assert beginning(config_of(tmp_path), Command.train).step == 2


@pytest.mark.slow
@pytest.mark.parametrize(("resume", "kept"), [("auto", False), ("named", True)])
def test_a_run_that_continues_by_itself_keeps_no_more_than_others(resume, kept, tmp_path):
    newest = run_with(tmp_path, 2) / "checkpoints" / "step_00000002"
    with open_run_folder(config_of(tmp_path, resume if resume == "auto" else str(newest)), Command.train):
        assert is_in_use(newest) is kept


@pytest.fixture
def held_open(monkeypatch):
    """Make files named `held` undeletable, like files on NFS that a process has open."""
    unlink = os.unlink

    def kept(path, **options):
        if os.path.basename(path) == "held":
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", kept)


def test_what_cannot_be_deleted_ends_no_start(held_open, tmp_path, capsys):
    folder = run_with(tmp_path, 2)
    checkpoints = folder / "checkpoints"
    for name in ("step_00000004.deleted", "step_00000006.partial"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "held").touch()
        (checkpoints / name / "other").touch()
    begun = open_checkpoint(checkpoints / "step_00000002", Command.train)
    rewind_folder(config_of(tmp_path), str(folder), begun)
    left = ["step_00000004.deleted", "step_00000006.partial.deleted"]
    assert [line.split()[0] for line in sorted(capsys.readouterr().out.splitlines())] == [
        str(checkpoints / n) for n in left
    ]
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(["step_00000002", *left])
    assert all([path.name for path in (checkpoints / name).iterdir()] == ["held"] for name in left)
    rewind_folder(config_of(tmp_path), str(folder), begun)  # the next start
    assert capsys.readouterr().out.count("could not be deleted") == 2


def _begin(folder) -> None:
    """Begin from step 2, as a start does."""
    config = config_of(folder.parent)
    with open_run_folder(config, Command.train) as (directory, begun):
        rewind_folder(config, directory, begun)


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    "torn",
    [
        '{"step": 3, "los',
        '{"step": 2, "los',  # of a step that is kept
        '{"step": 2, "loss": 0.5}',  # whole, for all one knows
        '{"st',
        '{"step": 2, "l' + 100 * "\0",
        100 * "\0",
        100 * "\0" + "\n",
        '{"step": 3, '
        + 100 * "\0"
        + '"loss": 0.5}\n'
        + rows(5),  # a part of the file that did not come to the disk
    ],
)
def test_what_the_loss_of_a_node_leaves_at_the_end_goes(torn, tmp_path, capsys):
    folder = run_with(tmp_path, 2)
    (folder / METRICS).write_text(rows(1, 2) + torn)
    _begin(folder)
    assert (folder / METRICS).read_text() == rows(1, 2)
    said = f"{folder / METRICS}: damaged lines are removed (1)\n" in capsys.readouterr().out
    assert said == ("\n" in torn)


_DAMAGED = ['{"step": 3, "los\n', "\n", "[1]\n", '{"loss": 1}\n', b"\xff\n", 100 * "\0" + "\n"]


def _cut(folder, left: int) -> bytes:
    """Remove the end of the ledger, so that `left` bytes are left, and return them."""
    path = folder / LEDGER
    path.write_bytes(path.read_bytes()[:left])
    return path.read_bytes()


@pytest.mark.parametrize("left", [0, 5, 60, 300, 500])
def test_a_ledger_that_lacks_steps_of_the_checkpoint_is_named_and_changes_nothing(left, tmp_path):
    folder = run_with(tmp_path, 2, trained=2)
    before = _cut(folder, left)
    with pytest.raises(UserError, match=f"{LEDGER} is not the ledger .* step 2 belongs to: it lacks"):
        _begin(folder)
    assert (folder / LEDGER).read_bytes() == before
    Ownership(folder).release()  # nobody has it


def test_a_run_of_the_version_before_is_refused_with_one_message(tmp_path):
    folder = run_with(tmp_path, metrics=rows(1, 2))
    old = state_of(2)
    del old["ledger"]
    checkpoint(folder / "checkpoints" / "step_00000002", old)
    (folder / "trained.jsonl").write_text('{"step": 1, "prompts": [4]}\n')
    with pytest.raises(UserError, match=r"has no ledger, .* a different version .*run\.resume=none"):
        _begin(folder)


@pytest.mark.parametrize("row", _DAMAGED)
def test_a_damaged_row_of_the_metrics_goes(row, tmp_path, capsys):
    _begin(_with_damage(tmp_path, METRICS, row))
    assert (tmp_path / NAME / METRICS).read_text() == rows(1, 2)
    assert capsys.readouterr().out.count(f"{METRICS}: damaged lines are removed (1)") == 1


def _with_damage(tmp_path, name, row):
    folder = run_with(tmp_path, 2)
    (folder / name).write_bytes(
        rows(1).encode() + (row if isinstance(row, bytes) else row.encode()) + rows(2).encode()
    )
    return folder


def test_check_reads_the_rows_of_the_run_to_continue(capsys, tmp_path):
    _cut(run_with(tmp_path, 3, trained=3), 300)
    arguments = ["config", "check", "model.path=/nowhere", "data.train=/nowhere", f"run.root={tmp_path}"]
    assert main([*arguments, f"run.name={NAME}"]) == 2
    assert "lacks the entries at byte" in capsys.readouterr().err
    assert main([*arguments, f"run.name={NAME}", "run.resume=none"]) == 0
    state = checkpoint(tmp_path / "another", state_of(5))
    assert main([*arguments, f"run.name={NAME}", f"run.resume={state}"]) == 0  # none of its steps is kept
    assert main([*arguments, "run.name=other", f"run.resume={state}"]) == 0


@pytest.mark.parametrize("name", ["x" * 300, "file/below"])
def test_a_folder_that_cannot_be_made(name, tmp_path):
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path)
    config.run.name = name
    with pytest.raises(UserError, match="cannot be created"), open_run_folder(config, Command.train):
        pass


def test_a_new_run_moves_an_earlier_one_aside(tmp_path):
    folder = run_with(tmp_path, 2, metrics=rows(1, 2))
    (folder / "slurm").mkdir()
    (folder / "slurm" / "7.log").write_text("of the job that starts the new run")
    for number, remains in ((1, rows(1, 2)), (2, rows(1))):
        with open_run_folder(config_of(tmp_path, "none"), Command.train) as (directory, start):
            assert (directory, start) == (str(folder), None)
            assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "owner.json", "slurm"]
            (folder / METRICS).write_text(rows(1))
        assert (tmp_path / f"{NAME}.{number}" / METRICS).read_text() == remains
    assert (folder / "slurm" / "7.log").is_file()


def test_the_model_is_not_moved_with_the_run_that_made_it(tmp_path):
    folder = run_with(tmp_path, metrics=rows(1))
    config = config_of(tmp_path, None)
    config.model.path = f"{folder}/hf"
    with pytest.raises(UserError, match=r"choose another run\.name"), open_run_folder(config, Command.train):
        pass
    assert (folder / METRICS).exists()


HOLD = """
import sys
from pathlib import Path
from grpo_megatron.run.lock import Ownership
ownership = Ownership(Path(sys.argv[1]))
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path):
    """Another process that owns the run's folder, as a subprocess.Popen."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / NAME)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("resume", ["auto", "none"])
def test_a_second_run_of_a_name_is_refused_and_changes_nothing(owner, tmp_path, resume):
    folder = run_with(tmp_path, 2, metrics=rows(1, 2, 3))
    owned = (folder / "owner.json").read_bytes()
    refusal = pytest.raises(UserError, match=f"another run is writing to {folder} .*pid {owner.pid}")
    with refusal, open_run_folder(config_of(tmp_path, resume), Command.train):
        pass
    assert (folder / METRICS).read_text() == rows(1, 2, 3)
    assert (folder / "owner.json").read_bytes() == owned
    assert {path.name for path in tmp_path.iterdir()} == {NAME, f".{NAME}.lock"}
    owner.kill()  # as the kernel's, the lock goes with the process
    owner.wait()
    with open_run_folder(config_of(tmp_path, resume), Command.train) as (directory, _):
        assert directory == str(folder)
        with pytest.raises(UserError, match=f"pid {os.getpid()}"):
            Ownership(folder)
    Ownership(folder).release()


def test_a_second_server_leaves_what_the_first_one_writes(tmp_path):
    """It used to delete the checkpoints of the first one before it was refused."""
    folder = run_with(tmp_path, 2)
    (folder / FOLDER).mkdir()
    ownership = Ownership(folder)
    with pytest.raises(UserError, match="another run is writing to"):
        serve(config_of(tmp_path), "127.0.0.1", 0, None, 60.0)
    assert (folder / "checkpoints" / "step_00000002" / "state.json").exists()
    ownership.release()


def test_a_folder_that_is_moved_aside_stays_locked(tmp_path):
    folder = run_with(tmp_path, 2, metrics=rows(1, 2))
    with open_run_folder(config_of(tmp_path, "none"), Command.train):
        assert (tmp_path / f"{NAME}.1" / METRICS).exists()
        assert not (tmp_path / f"{NAME}.1" / "owner.json").exists()
        with pytest.raises(UserError, match=f"another run is writing to {folder} .*pid {os.getpid()}"):
            Ownership(folder)


@pytest.mark.parametrize(
    ("owner", "job", "refused"),
    [
        ({}, None, False),
        ({"host": "here", "pid": os.getpid(), "started": start_mark(os.getpid())}, None, True),
        (
            {"host": "here", "pid": os.getpid(), "started": "boot:1"},
            None,
            False,
        ),  # the number is another process's now
        ({"host": "here", "pid": os.getpid(), "started": 1.0}, None, False),
        ({"host": "here", "pid": "?"}, None, False),
        ({"host": "there", "pid": 1}, None, True),
        ({"host": "there", "pid": 1, "Slurm job": "7"}, "7", False),  # started again elsewhere
        ({"host": "there", "pid": 1, "Slurm job": "7"}, "8", True),
    ],
)
def test_without_locks_the_owner_is_asked_for(owner, job, refused, tmp_path, monkeypatch, capsys):
    def none(file, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    folder = run_with(tmp_path)
    (folder / "owner.json").write_text(json.dumps(owner) if owner else '{"half')
    if refused:
        with pytest.raises(
            UserError, match=r"another run is writing .*; if that run has ended, delete .*owner\.json"
        ):
            Ownership(folder)
        return
    with open_run_folder(config_of(tmp_path), Command.train):
        assert json.loads((folder / "owner.json").read_text())["pid"] == os.getpid()
    assert "this file system does not support locks" in capsys.readouterr().out
    assert not (folder / "owner.json").exists()


@pytest.mark.parametrize("name", ["owner.json", "status.json"])
def test_a_folder_whose_owner_cannot_be_read_is_not_taken(name, tmp_path, monkeypatch):
    """The file server does not answer for one file.

    Such a file used to count as absent, so that a second run took the folder of a run on another node.
    """
    folder = run_with(tmp_path)
    (folder / "owner.json").write_text('{"host": "there", "pid": 1}')
    (folder / "status.json").write_text("{}")
    stat = os.stat

    def failing(path, *arguments, **options):
        if str(path) == str(folder / name):
            raise OSError(errno.EIO, "Input/output error")
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", failing)
    with pytest.raises(UserError, match="cannot be read: Input/output error"):
        Ownership(folder)

"""The driver's side of checkpoints: a final name always means a complete checkpoint, and the right ones
are kept.
"""

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_megatron.commands.assemble import Run
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import CheckpointConfig, Config
from grpo_megatron.errors import Stopped, UserError
from grpo_megatron.files import RowFile
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.run.checkpoints import DELETED, Checkpoints, NotWritten, SaveReport
from grpo_megatron.run.lock import in_use
from grpo_megatron.run.manifest import record_of
from grpo_megatron.run.resume import open_checkpoint
from grpo_megatron.run.stop import StopRequest
from grpo_megatron.samples.blocks import LEDGER
from tests.unit.ledger_steps import group, ledger_of, train


class SlowTrainer:
    """A trainer whose checkpoint is a file with the number of its steps.

    The file exists when the checkpoint is finished.

    full: True to fail at that moment.
    """

    def __init__(self):
        self.steps, self.written, self.full = 0, False, False

    def begin_checkpoint(self, folder: str) -> None:
        Path(folder).mkdir()
        self._file, self._value, self.written = Path(folder, "value"), str(self.steps), False

    def checkpoint_written(self) -> bool:
        return self.written

    def finish_checkpoint(self, timeout: float | None = None) -> SaveReport:
        if self.full:
            raise NotWritten("no space left")
        self._file.write_text(self._value)
        return SaveReport(1.0, 0.1, 1, {"value": record_of(self._file)})

    def save_hf(self, folder: str) -> None:
        Path(folder).mkdir()
        Path(folder, "value").write_text(str(self.steps))


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def trainer():
    return SlowTrainer()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def made(trainer, clock, tmp_path):
    """A function that makes a saver with these values of the configuration."""

    def make(**config) -> Checkpoints:
        settings = CheckpointConfig(**{"minutes": 0, "keep": 9, **config})
        return Checkpoints(str(tmp_path / "checkpoints"), settings, trainer, clock=clock)

    return make


@pytest.fixture
def saver(made):
    return made(every=2)


def contents(saver) -> dict[str, str]:
    """Return {folder: the trainer's value in it} for folders with a final name, which must be complete."""
    found = {}
    for folder in saver.folder.iterdir():
        if folder.name.endswith(".partial"):
            with pytest.raises(UserError, match="not a complete checkpoint"):
                open_checkpoint(folder, Command.sft)
        else:
            assert open_checkpoint(folder, Command.sft).step == int(folder.name.split("_")[1])
            found[folder.name] = (folder / "actor" / "value").read_text()
    return found


def state_of(step: int) -> dict:
    return {"step": step, "order": {}, "tokens": 0}


def run_step(saver, trainer, step, last=False):
    trainer.steps = step
    saver.complete_written()
    if saver.is_due(step, last):
        saver.save(step, lambda: state_of(step))


def test_a_checkpoint_appears_when_the_ranks_have_written_it(saver, trainer, capsys):
    run_step(saver, trainer, 1)
    assert not saver.folder.exists()
    run_step(saver, trainer, 2)
    run_step(saver, trainer, 3)
    assert contents(saver) == {}
    trainer.written = True
    run_step(saver, trainer, 3)
    assert contents(saver) == {"step_00000002": "2"}
    assert "checkpoint step_00000002: " in capsys.readouterr().out
    run_step(saver, trainer, 4)
    run_step(saver, trainer, 6)  # waits for that of step 4
    assert contents(saver) == {"step_00000002": "2", "step_00000004": "4"}
    saver.finish()
    saver.finish()
    assert [folder.name for folder in sorted(saver.folder.iterdir())] == [
        f"step_0000000{step}" for step in (2, 4, 6)
    ]


def test_one_that_is_written_is_put_in_place_within_a_step(saver, trainer):
    run_step(saver, trainer, 2)
    saver.complete_written()
    assert contents(saver) == {}
    trainer.written = True
    saver.complete_written()
    assert contents(saver) == {"step_00000002": "2"}


def test_one_is_due_after_its_minutes_and_at_the_end(made, clock):
    saver = made(minutes=15)
    assert not saver.is_due(1)
    clock.seconds = 899.0
    assert not saver.is_due(2)
    clock.seconds = 900.0
    assert saver.is_due(3)
    saver.save(3, lambda: state_of(3))
    clock.seconds = 1799.0
    assert not saver.is_due(4)
    assert saver.is_due(4, last=True)
    assert not saver.is_due(3, last=True)  # which has just been saved
    assert not made(at_end=False).is_due(4, last=True)


@pytest.mark.slow_when(lambda config: config != {"keep": 1, "keep_every": 3})
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"keep": 2}, [5, 6]),
        ({"keep": 1}, [6]),
        ({"keep": 1, "keep_every": 3}, [3, 6]),
        ({"keep": 2, "keep_every": 2}, [2, 4, 5, 6]),
    ],
)
def test_the_last_ones_are_kept_and_those_of_every_so_many_steps(made, trainer, config, kept):
    saver = made(every=1, **config)
    for step in range(1, 7):
        run_step(saver, trainer, step)
        # The one before goes when this one is whole, not when it is begun.
        assert len(contents(saver)) >= min(step - 1, 1)
    saver.finish()
    assert sorted(contents(saver)) == [f"step_{step:08d}" for step in kept]
    assert len(list(saver.folder.iterdir())) == len(kept)


def test_one_that_a_run_begins_from_is_not_deleted(made, trainer):
    saver = made(every=1, keep=1)
    run_step(saver, trainer, 1)
    saver.finish()
    with in_use(saver.folder / "step_00000001"):
        run_step(saver, trainer, 2)
        saver.finish()
        assert sorted(contents(saver)) == ["step_00000001", "step_00000002"]
    run_step(saver, trainer, 3)
    saver.finish()
    assert sorted(contents(saver)) == ["step_00000003"]


def test_one_of_an_earlier_step_than_others_is_kept_when_it_is_written(made, trainer):
    """A user's own loop may load an earlier checkpoint, and go on from there."""
    saver = made(keep=2, async_save=False)
    for step in (7, 8, 3):
        saver.save(step, lambda step=step: state_of(step))
    assert contents(saver).keys() == {"step_00000003", "step_00000007", "step_00000008"}
    saver.save(4, lambda: state_of(4))
    assert contents(saver).keys() == {"step_00000004", "step_00000007", "step_00000008"}


@pytest.mark.slow
def test_an_old_one_that_cannot_be_deleted_ends_no_run(made, trainer, monkeypatch, capsys):
    """This happens on NFS if some process has a file of it open."""
    monkeypatch.setattr(os, "rmdir", lambda path, **options: os.stat("/nowhere"))
    saver = made(every=1, keep=1)
    for name in ("step_00000001.deleted", "step_00000002.partial"):  # from earlier starts
        (saver.folder / name).mkdir(parents=True)
    for step in (1, 2, 3):
        run_step(saver, trainer, step)
    saver.finish()
    names = sorted(path.name for path in saver.folder.iterdir() if DELETED not in path.suffixes)
    assert names == ["step_00000003"]
    said = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "could not be deleted" in line
    ]
    names = ("step_00000002.partial.deleted", "step_00000001.deleted.1", "step_00000002.deleted")
    assert said == [str(saver.folder / name) for name in names]


def test_the_rows_are_on_the_disk_before_the_checkpoint_is_there(saver, trainer, monkeypatch):
    synced, fsync = [], os.fsync

    def noted(descriptor):
        if not list(saver.folder.glob("step_00000002")):
            synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    ledger_of(saver.folder.parent, 1)
    (saver.folder.parent / "metrics.jsonl").write_text("{}\n")
    run_step(saver, trainer, 2)
    saver.finish()
    assert {
        "metrics.jsonl",
        LEDGER,
        "manifest.json.tmp",
        "state.json",
        "step_00000002.partial",
    } <= set(synced)


def test_one_that_is_there_is_not_written_again(saver, trainer):
    """This happens at a request to stop right after a step that was saved.

    The state of the step is the same.
    """
    run_step(saver, trainer, 2)
    saver.save(2, lambda: state_of(2))
    saver.finish()
    assert contents(saver) == {"step_00000002": "2"}
    assert len(list(saver.folder.iterdir())) == 1


def test_after_one_that_failed_training_goes_on_and_the_next_one_is_tried(saver, trainer, capsys):
    run_step(saver, trainer, 2)
    saver.finish()
    trainer.full = True
    run_step(saver, trainer, 4)
    run_step(saver, trainer, 6)  # completes that of step 4
    assert (
        "training continues, but no space left; the newest checkpoint is step_00000002"
        in capsys.readouterr().out
    )
    assert contents(saver) == {"step_00000002": "2"}
    with pytest.raises(NotWritten, match="no space left"):
        saver.finish()  # of a run that ends without what was due it is an error
    assert len(list(saver.folder.iterdir())) == 1  # what was written of it would keep the disk full
    trainer.full = False
    run_step(saver, trainer, 8)
    saver.finish()
    assert contents(saver) == {"step_00000002": "2", "step_00000008": "8"}


def test_a_disk_that_takes_no_state_is_the_same(saver, trainer, monkeypatch, capsys):
    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        run_step(saver, trainer, 2)
    assert "No space left on device; there is no checkpoint yet" in capsys.readouterr().out
    assert list(saver.folder.iterdir()) == []
    with pytest.raises(NotWritten):
        saver.finish()
    run_step(saver, trainer, 4)
    saver.finish()
    assert contents(saver) == {"step_00000004": "4"}


def test_without_its_entries_in_the_ledger_no_checkpoint_is_written(made, tmp_path, monkeypatch):
    """No run can continue from such a checkpoint.

    It used to be written when room for it came with the end of an older one, after the ledger was refused.
    """

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def state(step: int):
        return lambda: state_of(step) | {"ledger": ledger.state_dict()}

    saver, ledger = made(every=1), ledger_of(tmp_path, 1)
    saver.save(1, state(1))
    with monkeypatch.context() as full:
        full.setattr(RowFile, "append", refuse)
        train(ledger, 2, [group(4)])
        saver.save(2, state(2))
        assert [path.name for path in saver.folder.iterdir()] == ["step_00000001"]
        with pytest.raises(NotWritten, match=rf"No space left on device: '{tmp_path}/ledger\.bin'"):
            saver.finish()
    saver.save(3, state(3))
    saver.finish()
    assert sorted(contents(saver)) == ["step_00000001", "step_00000003"]


def finish(saver, trainer, tmp_path) -> dict:
    config, monitor = (
        Config(checkpoint=CheckpointConfig(export_hf=True)),
        SimpleNamespace(phases=Phases(), tensorboard_dir=""),
    )
    whole = SimpleNamespace(weights=trainer)
    return Run(config, str(tmp_path), monitor, saver, whole, None, None, None, 0.0, Command.train).finish(
        {"step": trainer.steps}
    )


def test_a_model_is_exported_though_its_last_checkpoint_has_no_room(saver, trainer, tmp_path):
    run_step(saver, trainer, 2)
    trainer.full = True
    run_step(saver, trainer, 4)
    with pytest.raises(NotWritten, match=f"no space left; .*; the trained model is in {tmp_path}/hf"):
        finish(saver, trainer, tmp_path)
    assert (tmp_path / "hf" / "value").read_text() == "4"
    assert not (tmp_path / "result.json").exists()  # by which the same command would take the run as done


def test_a_result_says_of_which_command_it_is(saver, trainer, tmp_path):
    run_step(saver, trainer, 2)
    finish(saver, trainer, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["command"] == "train"


def test_a_request_to_stop_is_one_with_a_full_disk_too(saver, trainer):
    run_step(saver, trainer, 2)
    saver.finish()
    stop, trainer.full = StopRequest(), True
    stop.signal, stop.step = signal.SIGUSR1, 3
    with pytest.raises(Stopped) as stopped:
        stop.leave(saver, lambda: state_of(3))
    first, second = str(stopped.value).splitlines()
    assert first == (
        "stopped on request (SIGUSR1) after step 3, whose checkpoint could not be written; the run's newest "
        f"checkpoint is {saver.folder}/step_00000002; the same command continues from it"
    )
    assert second.startswith("no space left")


def test_the_state_is_that_of_the_moment(saver):
    state = state_of(2) | {"order": {"taken": 1}}
    saver.save(2, lambda: state)
    state["order"]["taken"] = 7
    saver.finish()
    assert json.loads((saver.folder / "step_00000002" / "state.json").read_text())["order"] == {"taken": 1}


def test_without_background_it_is_there_at_once(made, trainer):
    saver = made(every=1, async_save=False)
    run_step(saver, trainer, 1)
    assert contents(saver) == {"step_00000001": "1"}

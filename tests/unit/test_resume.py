"""The checkpoint from which a run begins, which is never a damaged one."""

import errno
import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.commands import assemble
from grpo_megatron.config.command import Command
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.checkpoints import NotWritten
from grpo_megatron.run.folder import beginning, rewind_folder
from grpo_megatron.run.guard import Guard
from grpo_megatron.run.manifest import DamagedCheckpoint, must_be_sound, problems, record_of, write_manifest
from grpo_megatron.run.resume import as_saved, differences, finished_result, open_checkpoint
from grpo_megatron.run.tokenizer_files import tokenizer_changes, tokenizer_digests
from tests.messages import logged
from tests.unit.run_folders import NAME, STATE, checkpoint, config_of, rows, run_with, state_of


def test_a_whole_checkpoint_is_opened(tmp_path):
    found = open_checkpoint(checkpoint(tmp_path / "c", state_of(3)), Command.train)
    assert (found.step, found.state, list(found.files)) == (3, state_of(3), ["weights"])
    assert found.actor == str(tmp_path / "c" / "actor")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (b"", "is not valid JSON"),
        (b"[1]", "expected a JSON object"),
        (b"{}", "has no step, totals"),
        ({**STATE, "step": "3"}, "step must be a step number, but is"),
        ({**STATE, "step": -1}, "step must be a step number, but is"),
        ({"step": 3, "order": {}, "tokens": 0}, "a command other than `train` or a different version"),
    ],
)
def test_a_state_that_does_not_fit_is_one_message(state, said, capsys, tmp_path):
    folder = checkpoint(tmp_path / "c", state)
    with pytest.raises(UserError, match=r"state\.json") as caught:
        open_checkpoint(folder, Command.train)
    assert said in str(caught.value)
    assert (
        main(["config", "check", "model.path=/nowhere", "data.train=/nowhere", f"run.resume={folder}"]) == 2
    )
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_folder_that_is_no_checkpoint(tmp_path):
    for folder, said in ((tmp_path, "not a complete checkpoint"), (tmp_path / "none", "does not exist")):
        with pytest.raises(UserError, match=said):
            open_checkpoint(folder, Command.train)
    with pytest.raises(UserError, match="not a complete checkpoint"):
        open_checkpoint(checkpoint(tmp_path / "step_00000003.partial", state_of(3)), Command.train)


def _half(path):
    os.truncate(path, path.stat().st_size // 2)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("manifest.json", "state.json") for damage in (_half, _flip, os.unlink)),
        ("actor/weights", _half),
        ("actor/weights", os.unlink),
        ("actor", shutil.rmtree),
    ],
)
def test_a_damaged_one_is_passed_over_or_refused_by_name(name, damage, tmp_path):
    folder = run_with(tmp_path, 2, 4)
    newest = folder / "checkpoints" / "step_00000004"
    damage(newest / name)
    with logged() as said:
        assert beginning(config_of(tmp_path), Command.train).step == 2
    assert len(said) == 1
    assert str(newest) in said[0]
    assert said[0].startswith("skipped a checkpoint: ")
    with pytest.raises(DamagedCheckpoint, match=str(newest)):
        beginning(config_of(tmp_path, str(newest)), Command.train)


def _lose_entry(files):
    del files["actor/weights"]


def _take_size_of_file(files):
    files["actor/weights"][0] = 128


def _take_other_digest(files):
    files["actor/weights"][1] = files["state.json"][1]


def _name_another_file(files):
    files["actor/biases"] = files.pop("actor/weights")


@pytest.mark.parametrize("change", [_lose_entry, _take_size_of_file, _take_other_digest, _name_another_file])
def test_a_manifest_that_says_something_else_than_was_written_is_damaged(change, tmp_path):
    """It is still valid JSON, and every file that it names may be correct. Only its own digest reveals it."""
    folder = run_with(tmp_path, 2, 4)
    manifest = folder / "checkpoints" / "step_00000004" / "manifest.json"
    content = json.loads(manifest.read_text())
    change(content["files"])
    manifest.write_text(json.dumps(content))
    with logged() as said:
        assert beginning(config_of(tmp_path), Command.train).step == 2
    assert [f"{manifest} does not match its own digest" in line for line in said] == [True]


def test_a_truncated_file_is_damage_though_this_command_does_not_read_it(tmp_path):
    """A checkpoint may have files for another layout or command.

    A truncated one shows that the disk lost data.
    """
    folder = checkpoint(tmp_path / "step_00000004", state_of(4))
    (folder / "notes").write_bytes(bytes(1000))
    write_manifest(
        folder, {name: record_of(folder / name) for name in ("state.json", "actor/weights", "notes")}
    )
    open_checkpoint(folder, Command.train)
    os.truncate(folder / "notes", 999)
    with pytest.raises(DamagedCheckpoint, match="notes has 999 bytes, but 1000 were written"):
        open_checkpoint(folder, Command.train)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "actor/weights"])
def test_what_cannot_be_read_is_not_damaged(name, tmp_path):
    """A node may lack the mount, or have a stale handle of it.

    The run ends, instead of continuing from an earlier checkpoint.
    """
    file = run_with(tmp_path, 2, 4) / "checkpoints" / "step_00000004" / name
    file.unlink()
    file.symlink_to(file)  # to look at it is an OSError, ELOOP
    with pytest.raises(UserError, match=f"{file} cannot be read on {socket.gethostname()}") as caught:
        beginning(config_of(tmp_path), Command.train)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    run_with(tmp_path, 2)
    monkeypatch.setattr(os, "scandir", stale)
    monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(UserError, match=r"checkpoints cannot be read on .*: Stale file handle"):
        beginning(config_of(tmp_path), Command.train)


def test_ranks_tell_what_they_cannot_read_from_damage(tmp_path):
    found = open_checkpoint(checkpoint(tmp_path / "c", state_of(3)), Command.train)
    weights = Path(found.actor, "weights")
    assert problems(weights.parent, found.files, ["weights"]) == []
    weights.write_bytes(bytes(256))
    damaged = problems(weights.parent, found.files, ["weights"])
    with pytest.raises(DamagedCheckpoint, match="does not match its digest"):
        must_be_sound(damaged)
    weights.unlink()  # the driver has seen it
    unreadable = problems(weights.parent, found.files, ["weights"])
    with pytest.raises(UserError, match=f"cannot be read on {socket.gethostname()}") as caught:
        must_be_sound(damaged + unreadable)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_where_all_are_damaged_nothing_begins(tmp_path):
    folder = run_with(tmp_path, 2, 4)
    for step in (2, 4):
        _flip(folder / "checkpoints" / f"step_0000000{step}" / "state.json")
    with pytest.raises(
        UserError,
        match=r"contains only damaged checkpoints \(2\); set run\.resume=none to start from the beginning",
    ):
        beginning(config_of(tmp_path), Command.train)
    assert beginning(config_of(tmp_path, "none"), Command.train) is None


def test_without_checkpoints_it_is_a_new_run(tmp_path):
    folder = run_with(tmp_path, metrics=rows(1))
    (folder / "checkpoints" / "step_00000002.partial").mkdir(parents=True)
    assert beginning(config_of(tmp_path), Command.train) is None


def test_the_step_is_a_number_not_a_text(tmp_path):
    run_with(tmp_path, 99_999_999, 100_000_000)
    assert beginning(config_of(tmp_path), Command.train).step == 100_000_000


class _Cluster:
    def must_be_whole(self) -> None:
        pass


def attempts(tmp_path, resume, outcomes) -> list[int]:
    """Return the steps that a run begins from, one attempt after the other.

    outcomes: an exception or a result for each attempt.
    """
    config, begun = config_of(tmp_path, resume), []
    start = beginning(config, Command.train)
    folder = str(tmp_path / NAME)
    status, watch = StatusFile(folder, NAME, 100), HangDetector(folder, 600.0)
    context = assemble.RunContext(
        config, Command.train, folder, status, start, _Cluster(), watch, None, Guard(), 0.0
    )

    def attempt(context, checkpoint):
        begun.append(checkpoint.step if checkpoint else 0)
        outcome = outcomes.pop(0)
        if not isinstance(outcome, DamagedCheckpoint):
            rewind_folder(config, context.directory, checkpoint)  # it has been loaded
        if isinstance(outcome, BaseException):
            raise outcome
        if callable(outcome):
            outcome()
            raise assemble.ProcessLost("a rank died")
        return outcome

    assemble.run_with_restarts(context, attempt)
    return begun


def test_what_ranks_find_to_be_damaged_is_passed_over(tmp_path):
    folder = run_with(tmp_path, 2, 4, 6)
    assert attempts(tmp_path, "auto", [DamagedCheckpoint("6"), DamagedCheckpoint("4"), {}]) == [6, 4, 2]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000004.aside", "step_00000006.aside"]


def test_nothing_is_set_aside_before_a_checkpoint_is_loaded(tmp_path):
    folder = run_with(tmp_path, 2, 4, 6)
    with pytest.raises(DamagedCheckpoint):
        attempts(tmp_path, str(folder / "checkpoints" / "step_00000002"), [DamagedCheckpoint("2")])
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000004", "step_00000006"]


def test_a_restart_begins_from_what_was_saved_meanwhile(tmp_path):
    folder = run_with(tmp_path, 2)

    def save(step):
        return lambda: checkpoint(folder / "checkpoints" / f"step_{step:08d}", state_of(step))

    assert attempts(tmp_path, "auto", [save(4), assemble.ProcessLost("again"), {}]) == [2, 4, 4]


def test_a_run_from_another_folder_does_not_take_its_own_earlier_course(tmp_path):
    """It begins at step 5 of another run.

    Its own folder has steps 2, 5 and 8 of a course that this start abandons.
    """
    folder = run_with(tmp_path, 2, 5, 8)
    other = checkpoint(tmp_path / "other", state_of(5))
    assert attempts(tmp_path, str(other), [assemble.ProcessLost("before the first one"), {}]) == [5, 5]
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000005.aside", "step_00000008.aside"]
    with pytest.raises(DamagedCheckpoint):  # named by the user, so nothing else takes its place
        attempts(tmp_path, str(other), [DamagedCheckpoint("other")])


def test_a_failed_save_is_not_tried_again_by_a_restart(tmp_path):
    run_with(tmp_path)
    with pytest.raises(NotWritten):
        attempts(tmp_path, "auto", [NotWritten("full")])


def test_what_is_configured_otherwise_is_said(tmp_path):
    config = config_of(tmp_path)
    start = open_checkpoint(
        checkpoint(tmp_path / "c", state_of(3) | {"config": as_saved(config)}), Command.train
    )
    assert differences(start, config) == []
    config.optimizer.lr, config.data.train, config.run.resume = 0.5, ["a", "b"], "none"
    assert differences(start, config) == [
        f"data.train is ['a', 'b'], but was None in {tmp_path}/c",
        f"optimizer.lr is 0.5, but was {config_of(tmp_path).optimizer.lr} in {tmp_path}/c",
    ]


def test_a_changed_tokenizer_or_chat_template_is_named(tmp_path):
    config, template = config_of(tmp_path), tmp_path / "t.jinja"
    config.model.path, config.data.chat_template = str(tmp_path / "model"), str(template)
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "merges.txt", "config.json"):
        (tmp_path / "model" / name).write_text("1")
    template.write_text("a")
    saved = tokenizer_digests(config)
    assert saved.keys() == {"tokenizer.json", "merges.txt", "data.chat_template"}
    (tmp_path / "model" / "config.json").write_text("2")
    assert tokenizer_changes(saved, config) == tokenizer_changes(None, config) == ""
    template.write_text("b")
    (tmp_path / "model" / "merges.txt").unlink()
    (tmp_path / "model" / "tokenizer_config.json").write_text("1")
    changed = "data.chat_template, merges.txt, tokenizer_config.json"
    assert f"have changed since the checkpoint: {changed};" in tokenizer_changes(saved, config)


@pytest.mark.parametrize(
    ("result", "resume", "finished"),
    [
        ({"step": 100, "command": "train"}, "auto", True),
        ({"step": 100}, "auto", True),  # of an earlier version
        ({"step": 99}, "auto", False),
        ({"step": 100}, "none", False),
        ({}, "auto", False),
    ],
)
def test_a_finished_run_ends_at_once(result, resume, finished, tmp_path, capsys):
    folder = run_with(tmp_path)
    (folder / "result.json").write_text(json.dumps(result))
    config = config_of(tmp_path, resume)
    assert (finished_result(config, Command.train) == result) is finished
    assert ("is finished" in capsys.readouterr().out) is finished


def test_a_finished_run_of_another_command_is_not_this_one(tmp_path):
    (run_with(tmp_path) / "result.json").write_text(json.dumps({"step": 200, "command": "sft"}))
    with pytest.raises(
        UserError, match=r"is a finished run of `sft`, not of `train`; choose another run\.name"
    ):
        finished_result(config_of(tmp_path), Command.train)
    assert finished_result(config_of(tmp_path, "none"), Command.train) is None

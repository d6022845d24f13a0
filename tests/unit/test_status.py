"""status.json, and `grpo-megatron status` about runs that go on, have ended, or are gone."""

import errno
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from grpo_megatron.errors import UserError
from grpo_megatron.monitoring.status import STATUS, State, StatusFile, read_status
from tests.tools import wait_until


def test_a_run_that_goes_on(tmp_path, capsys):
    with StatusFile(str(tmp_path), "mine", total_steps=40) as status:
        metrics = {"time/step": 2.0, "throughput/tokens_per_second": 100.0, "reward/mean": 0.25}
        status.note(step=10, metrics=metrics, eta=3700.0, restarts=2)
        status.note(
            processes=[
                {
                    "name": "trainer rank 3",
                    "phase": "weight_sync",
                    "since": time.time() - 620,
                    "heard": time.time(),
                }
            ]
        )
        status.phase("generate")
        # The last change of several within a second is written too, although nothing follows it.
        wait_until(lambda: read_status(str(tmp_path))["phase"] == "generate")
        (tmp_path / "checkpoints" / "step_00000008").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step_00000010.partial").mkdir()
        assert main(["status", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
    for text in (
        "mine",
        "running",
        "10 of 40",
        "ETA 1:01:40",
        "generate",
        "100 tokens/s",
        "reward 0.25",
        "step_00000008",
    ):
        assert text in shown
    assert "restarts        2" in shown
    assert "trainer rank 3  weight_sync for 10:2" in shown
    assert "partial" not in shown


@pytest.mark.parametrize(
    ("error", "state", "exit_status"),
    [
        (None, "finished", 0),
        (UserError("there is no such model"), "failed", 1),
        (RuntimeError("out of luck"), "failed", 1),
        (KeyboardInterrupt(), "interrupted", 1),
    ],
)
def test_how_a_run_ended(error, state, exit_status, tmp_path, capsys):
    def end():
        with StatusFile(str(tmp_path), "mine", total_steps=4):
            if error is not None:
                raise error

    if error is None:
        end()
    else:
        with pytest.raises(type(error)):
            end()
    assert main(["status", str(tmp_path)]) == exit_status
    shown = capsys.readouterr().out
    assert state in shown
    assert str(error or "") in shown


def test_whoever_ends_the_process_has_the_last_word(tmp_path):
    """Later failures in the main thread, such as a call to a process that was just ended, do not change
    the status.
    """
    status = StatusFile(str(tmp_path), "mine", total_steps=4).__enter__()
    status.overrule(State.interrupted, "stopped on request")
    status.note(phase="restart")
    status.__exit__(UserError, UserError("rank 3 died"), None)
    found = read_status(str(tmp_path))
    assert (found["state"], found["error"]) == ("interrupted", "stopped on request")


KILLED = """
import os, signal, sys
from grpo_megatron.monitoring.status import StatusFile
with StatusFile(sys.argv[1], "mine", 4) as status:
    status.phase("train")
    status._write()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_was_killed_is_gone(tmp_path, capsys):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)])
    assert main(["status", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "gone" in shown
    assert "train, for" in shown


def recorded(tmp_path, **changes):
    with StatusFile(str(tmp_path), "mine", total_steps=4):
        pass
    values = json.loads((tmp_path / STATUS).read_text()) | {"state": "running"} | changes
    (tmp_path / STATUS).write_text(json.dumps(values))
    return read_status(str(tmp_path))["state"]


def test_another_process_of_the_same_number_is_not_the_run(tmp_path):
    assert recorded(tmp_path) == "running"
    assert recorded(tmp_path, pid_started="another-boot:1") == "gone"
    assert recorded(tmp_path, pid_started=1.0) == "gone"


def test_on_another_machine_the_age_of_the_file_tells(tmp_path):
    assert recorded(tmp_path, host="elsewhere", pid=2**22 + 1) == "running"
    assert recorded(tmp_path, host="elsewhere", written=time.time() - 120) == "gone"


def test_in_another_pid_namespace_the_age_of_the_file_tells(tmp_path):
    """A container may have its machine's name. A live run was reported as gone there."""
    elsewhere = {"pid_namespace": "pid:[1]", "pid_started": "another-boot:1"}
    assert recorded(tmp_path, **elsewhere) == "running"
    assert recorded(tmp_path, **elsewhere, written=time.time() - 120) == "gone"


def test_the_file_stays_young_where_nothing_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("grpo_megatron.monitoring.status._UNCHANGED", 0.0)
    with StatusFile(str(tmp_path), "mine", total_steps=4):
        first = read_status(str(tmp_path))["written"]
        wait_until(lambda: read_status(str(tmp_path))["written"] > first)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not valid JSON"),
        ('{"state": "runn', "is not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "does not contain the status of a run"),
        ('{"state": "well"}', "does not contain the status of a run"),
        ('{"state": ["running"]}', "does not contain the status of a run"),
    ],
)
def test_a_damaged_file_is_one_message(text, said, tmp_path, capsys):
    (tmp_path / STATUS).write_text(text)
    assert main(["status", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert said in message
    assert STATUS in message
    assert message.count("\n") == 1


def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    """A file server forgets the file that was opened.

    The message was a traceback, and the status that of a lost run.
    """
    read, failures = Path.read_bytes, [OSError(errno.ESTALE, "Stale file handle")]

    def stale(path):
        if failures:
            raise failures.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", stale)
    assert recorded(tmp_path) == "running"
    assert failures == []


def test_a_file_that_stays_unreadable_is_one_message(tmp_path, monkeypatch, capsys):
    def fail(path):
        raise OSError(errno.EIO, "Input/output error")

    recorded(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert main(["status", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / STATUS} cannot be read" in message
    assert message.count("\n") == 1


def test_a_checkpoint_that_went_since_it_was_listed(tmp_path, monkeypatch, capsys):
    """The next one may have just taken its place with checkpoint.keep=1."""
    recorded(tmp_path)
    monkeypatch.setattr(
        "grpo_megatron.commands.status.newest_folder", lambda folder: tmp_path / "step_00000008"
    )
    assert main(["status", str(tmp_path)]) == 0
    assert "step_00000008, of unknown age (No such file or directory)" in capsys.readouterr().out


def test_folders_without_a_run(tmp_path, capsys):
    for folder, said in (
        (tmp_path, "so it is not the folder of a run"),
        (tmp_path / "none", "does not exist"),
    ):
        assert main(["status", str(folder)]) == 2
        assert said in capsys.readouterr().err


def test_for_programs(tmp_path, capsys):
    with StatusFile(str(tmp_path), "mine", total_steps=4) as status:
        status.note(step=3, metrics={"time/step": 1.0, "reward/mean": 0.5})
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["step"], found["metrics"]["reward/mean"]) == ("finished", 3, 0.5)
    assert found["pid"] == os.getpid()


def test_a_users_own_loop_logs_what_it_likes(tmp_path, capsys):
    """The command ended with a traceback if the seconds of a step were missing."""
    with StatusFile(str(tmp_path), "mine", total_steps=4) as status:
        status.note(step=3, metrics={"time/train": 1.0, "my/loss": 0.5})
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "3 of 4" in shown
    assert "speed" not in shown
    with StatusFile(str(tmp_path), "mine", total_steps=4) as status:
        status.note(metrics={"throughput/tokens_per_second": 100.0, "reward/mean": 0.25})
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "100 tokens/s\n" in shown
    assert "reward 0.25" in shown


def test_programs_get_no_number_that_is_none(tmp_path, capsys):
    with StatusFile(str(tmp_path), "mine", total_steps=4) as status:
        status.note(metrics={"time/step": 1.0, "actor/loss": math.nan, "actor/grad_norm": math.inf})
    assert main(["status", str(tmp_path), "--json"]) == 0

    def refuse(name: str):
        raise AssertionError(f"{name} is no JSON")

    metrics = json.loads(capsys.readouterr().out, parse_constant=refuse)["metrics"]
    assert metrics == {"time/step": 1.0, "actor/loss": None, "actor/grad_norm": None}
    json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert main(["status", str(tmp_path)]) == 0
    assert "nan" in capsys.readouterr().out


def test_what_an_error_quotes_cannot_steer_the_terminal(tmp_path, capsys):
    quoted = "reward of \x1b[2J\x9b1A\ud800\u202e\r: no number\n\tin line 3, größer als 語"
    with pytest.raises(UserError), StatusFile(str(tmp_path), "mine", total_steps=4):
        raise UserError(quoted)
    assert main(["status", str(tmp_path)]) == 1
    assert "reward of �[2J�1A���: no number\n\tin line 3, größer als 語\n" in capsys.readouterr().out

"""The keeper and its driver around commands that only start processes and wait: every kind of end, for
real.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_megatron.monitoring.status import read_status
from tests.tools import default_signals

NOTHING_YET = "the run has no checkpoint yet, so the same command starts it from the beginning"

# The driver runs this command. It starts a process that no parent watches, in a session of its own, and a
# child of that process.
PROGRAM = """
import json, os, socket, subprocess, sys, time
from pathlib import Path
from grpo_megatron.commands.driver import drive
from grpo_megatron.commands.keeper import keep
from grpo_megatron.errors import UserError
from grpo_megatron.errors import Stopped

folder, what = Path(sys.argv[1]), sys.argv[2]

class Saver:
    folder = folder / "checkpoints"
    def save(self, state): (self.folder / f"step_{state['step']:08d}").mkdir(parents=True)
    def finish(self): pass

from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run import stop
def stale(folder): raise OSError(116, "Stale file handle", folder)
if "disk is stale" in what: stop.newest_folder = stale

def command(guard):
    if what == "refuse": raise UserError("planted refusal")
    if what == "fail": {}["planted defect"]
    guard.entered(str(folder), 3.0, 600.0)
    guard.status = StatusFile(str(folder), "mine", 40).__enter__()
    daemon = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"], start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "sleep 1000 > /dev/null & echo $!"], stdout=subprocess.PIPE, \
text=True).stdout
    import psutil
    server = socket.create_server(("127.0.0.1", 0))
    if what.startswith("needs it"): guard.needs(lambda: [psutil.Process(daemon.pid)], server.getsockname()[1])
    if what == "needs later": \
guard.needs(lambda: [psutil.Process(daemon.pid)] if (folder / "up").exists() else [])
    if what == "needed no more": guard.needs(lambda: [psutil.Process(daemon.pid)]); guard.needs(None)
    while len(psutil.Process().children(recursive=True)) < 3: time.sleep(0.01)
    os.write(2, b"raw output of a library\\n")
    if "step" in what: guard.stop.step = 7
    (folder / "pids").write_text(json.dumps([os.getpid(), daemon.pid, int(orphan)]))
    (folder / "up").touch()
    if what == "needs its port": time.sleep(1); server.close()
    if what == "quit": os._exit(1)
    # As Ray's code does a moment after the guard has seen the end of Ray's daemons.
    if what == "needs it as a library does": guard._note_end = lambda *_: os._exit(1)
    if "defect" in what: guard._find = lambda: {}["planted"]
    if what == "done": return 0
    if what == "full":
        with open("/dev/full", "w") as file: file.write("x")
    if what == "fail later": raise RuntimeError("first line\\nsecond line")
    if what == "steps":
        for step in range(7, 10**6):
            guard.stop.step = step
            time.sleep(0.05)
            if guard.stop.is_made: guard.stop.leave(Saver(), lambda: {"step": step})
    while True: time.sleep(0.01)

sys.exit(keep(lambda connection: drive(command, connection)))
"""


class Kept:
    def __init__(self, folder: Path, what: str, **options):
        self.folder = folder
        self.keeper = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "KEPT": str(folder)},
            **{"preexec_fn": default_signals} | options,
        )

    def up(self) -> "Kept":
        deadline = time.monotonic() + 120
        while not (self.folder / "up").exists():
            assert self.keeper.poll() is None, self.keeper.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    @property
    def driver(self) -> int:
        return psutil.Process(self.keeper.pid).children()[0].pid

    def end(self) -> tuple[int, str]:
        """Return (exit status, stderr) when no process is left."""
        _, errors = self.keeper.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while (left := self.living()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        assert len(errors.splitlines()) <= 5
        return self.keeper.returncode, errors

    def living(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("KEPT") == str(self.folder)
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def kept(tmp_path):
    started = []

    def start(what: str, **options) -> Kept:
        started.append(Kept(tmp_path, what, **options))
        return started[-1]

    yield start
    for run in started:
        for process in run.living():
            process.kill()
        run.keeper.wait()


def test_a_run_that_is_done_leaves_nothing(kept):
    assert kept("done").end() == (0, "")


def test_a_refusal_is_its_message(kept):
    assert kept("refuse").end() == (2, "error: planted refusal\n")


@pytest.mark.slow
def test_a_defect_is_one_message_that_names_its_traceback(kept, tmp_path):
    status, errors = kept("fail later").end()
    assert (status, errors) == (
        1,
        f"error: unexpected RuntimeError: first line\nits traceback is in {tmp_path}/logs/driver.log\n",
    )
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert log.startswith("raw output of a library\nTraceback")
    assert log.endswith("RuntimeError: first line\nsecond line\n")


@pytest.mark.slow
def test_a_defect_before_there_is_a_folder_keeps_its_traceback_too(kept):
    status, errors = kept("fail").end()
    assert status == 1
    log = Path(re.search(r"its traceback is in (\S+)", errors)[1])
    assert "planted defect" in log.read_text()
    log.unlink()


def test_a_full_disk_is_one_message_wherever_it_is_met(kept, tmp_path):
    status, errors = kept("full").end()
    assert status == 2
    assert errors == (
        f"error: no space left on the disk of {tmp_path}, or of a temporary folder; free some space; "
        f"{NOTHING_YET}\n"
    )


@pytest.mark.slow_when(lambda who, by: (who, by) != ("driver", signal.SIGTERM))
@pytest.mark.parametrize("who", ["keeper", "driver"])
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_request_to_stop_is_answered_after_the_step(kept, tmp_path, who, by):
    run = kept("steps").up()
    os.kill(run.keeper.pid if who == "keeper" else run.driver, by)
    status, errors = run.end()
    assert status == 75
    said = (
        rf"{by.name}: the run stops after step (\d+) .*\nstopped on request \({by.name}\) after step \1; "
        rf"the run's newest checkpoint is .*\n"
    )
    assert re.fullmatch(said, errors)
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_not_waited_for(kept, tmp_path):
    (tmp_path / "checkpoints" / "step_00000006").mkdir(parents=True)
    run = kept("long step").up()
    start = time.monotonic()
    run.keeper.send_signal(signal.SIGUSR1)
    run.keeper.send_signal(signal.SIGTERM)  # leaves less time
    status, errors = run.end()
    assert status == 75
    assert 3 <= time.monotonic() - start < 30
    assert errors.endswith(
        f"newest checkpoint is {tmp_path}/checkpoints/step_00000006; the same command continues from it\n"
    )


@pytest.mark.slow
def test_before_the_first_step_nothing_is_waited_for(kept):
    run = kept("wait").up()
    run.keeper.send_signal(signal.SIGTERM)
    status, errors = run.end()
    assert (status, errors) == (
        75,
        f"stopped on request (SIGTERM) while no step was in progress; {NOTHING_YET}\n",
    )


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(kept):
    run = kept("long step").up()
    run.keeper.send_signal(signal.SIGINT)
    time.sleep(1)
    run.keeper.send_signal(signal.SIGINT)
    status, errors = run.end()
    assert status == 130
    assert errors.splitlines()[1:] == [f"interrupted; {NOTHING_YET}"]


@pytest.mark.parametrize(
    ("what", "by", "state", "said"),
    [
        ("wait", [signal.SIGTERM], "interrupted", "stopped on request (SIGTERM) while no step was "),
        pytest.param(
            "long step",
            [signal.SIGTERM],
            "interrupted",
            "stopped on request (SIGTERM) in step 7, ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "long step", [signal.SIGINT] * 2, "interrupted", "interrupted; ", marks=pytest.mark.slow
        ),
        pytest.param(
            "needs its port", [], "failed", "the run cannot continue, because", marks=pytest.mark.slow
        ),
    ],
)
def test_the_status_says_how_the_guard_has_ended_the_run(kept, tmp_path, what, by, state, said):
    """The status stayed `running`, and the run was shown as gone without a message, as if it had been
    killed.
    """
    run = kept(what).up()
    for number in by:
        run.keeper.send_signal(number)
        time.sleep(1)
    run.end()
    found = read_status(str(tmp_path))
    assert found["state"] == state
    assert found["error"].startswith(said)


@pytest.mark.slow
def test_a_disk_that_fails_keeps_nobody_from_leaving(kept, tmp_path):
    """The driver looks for the newest checkpoint before it exits.

    Its thread used to die of the error. From then on no signal ended the run.
    """
    run = kept("long step, disk is stale").up()
    run.keeper.send_signal(signal.SIGTERM)
    status, errors = run.end()
    assert status == 75
    assert re.search(
        f"in step 7, .*; {tmp_path} cannot be read .*Stale file handle.*, so its newest checkpoint is not "
        "known; the same command continues",
        errors,
    )


@pytest.mark.slow
def test_the_keeper_too_gives_the_status_where_the_disk_fails(kept):
    run = kept("wait, disk is stale").up()
    os.kill(run.driver, signal.SIGKILL)
    status, errors = run.end()
    assert status == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in errors


@pytest.mark.slow
def test_a_defect_of_the_guard_does_not_make_it_deaf(kept, tmp_path):
    """A child may, for example, vanish while its name is read."""
    run = kept("long step, defect").up()
    run.keeper.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75
    log = (tmp_path / "logs" / "driver.log").read_text()
    assert "in the guard:\nTraceback" in log
    assert "KeyError: 'planted'" in log


@pytest.mark.slow
def test_a_driver_that_does_not_react_is_ended_by_the_keeper(kept):
    run = kept("long step").up()
    driver = psutil.Process(run.driver)
    driver.suspend()
    while driver.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    for _ in range(2):
        run.keeper.send_signal(signal.SIGINT)
        time.sleep(1)
    assert run.end() == (130, f"interrupted; {NOTHING_YET}\n")


@pytest.mark.parametrize("by", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_driver_that_is_killed_has_its_end_told_by_the_keeper(kept, by):
    run = kept("wait").up()
    driver = run.driver
    os.kill(driver, by)
    status, errors = run.end()
    assert status == 128 + by
    assert re.fullmatch(
        rf"error: the driver \(process {driver}\) was killed by {by.name}.*; {NOTHING_YET}\n",
        errors,
    )


@pytest.mark.slow
def test_a_driver_that_a_library_ends_is_noticed(kept):
    status, errors = kept("quit").end()
    assert status == 3
    assert re.fullmatch(r"error: the driver \(process \d+\) ended with status 1 and no message; .*\n", errors)


def test_a_driver_whose_keeper_is_killed_ends_what_it_started(kept):
    run = kept("wait").up()
    run.keeper.kill()
    status, errors = run.end()
    assert status == -signal.SIGKILL
    assert errors == f"error: the process that started the driver was killed; {NOTHING_YET}\n"


@pytest.mark.parametrize(
    "what", ["needs it", "needs it as a library does", pytest.param("needs later", marks=pytest.mark.slow)]
)
def test_the_end_of_a_process_that_the_run_needs_is_told(kept, what):
    run = kept(what).up()
    time.sleep(1)  # for the thread to find it
    daemon = psutil.Process(run.driver).children()
    needed = next(process for process in daemon if process.name() == "sh")
    needed.kill()
    status, errors = run.end()
    assert status == 3
    assert re.fullmatch(
        rf"error: the run cannot continue, because sh \(process {needed.pid}\) was killed by SIGKILL; "
        rf"{NOTHING_YET}\n",
        errors,
    )


@pytest.mark.slow
def test_a_port_that_the_run_needs_is_missed(kept):
    """SIGTERM makes Ray's GCS close its port and stay alive.

    Ray used to end the driver a minute later, with status 1 and without a message.
    """
    status, errors = kept("needs its port").end()
    assert status == 3
    assert re.fullmatch(
        rf"error: the run cannot continue, because Ray's GCS closed its port \d+; {NOTHING_YET}\n", errors
    )


@pytest.mark.slow
def test_the_end_of_one_that_it_needs_no_more_is_its_own_affair(kept):
    run = kept("needed no more").up()
    for process in psutil.Process(run.driver).children():
        process.kill()
    time.sleep(1.5)
    assert run.keeper.poll() is None
    run.keeper.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75


@pytest.mark.slow
def test_what_is_ignored_stays_ignored(kept):
    """nohup starts a run with ignored signals."""
    run = kept("steps", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)).up()
    for process in (run.keeper.pid, run.driver):
        os.kill(process, signal.SIGHUP)
    time.sleep(1)
    assert run.keeper.poll() is None
    run.keeper.send_signal(signal.SIGTERM)
    assert run.end()[0] == 75

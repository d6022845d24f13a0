"""The keeper and its driver around commands that only start processes and wait: every kind of end, for
real.
"""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from grpo_megatron.monitoring.status import read_status
from tests.unit.keepers import NOTHING_YET, keepers


@pytest.fixture
def kept(tmp_path):
    with keepers(tmp_path) as start:
        yield start


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


@pytest.mark.slow
def test_a_quick_double_interrupt_is_one_request_to_stop(kept, tmp_path):
    """The keeper took it for the second interrupt, and ended the run before its checkpoint."""
    run = kept("slow steps").up()
    for _ in range(2):
        run.keeper.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert run.end()[0] == 75
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


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
        time.sleep(1.5)
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

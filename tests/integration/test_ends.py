"""Real runs that are ended from outside at random moments: a message, the documented status, and no process
left.

GRPO_MEGATRON_ENDS=20 tries every kind of end that often (by default, it tries some once).
GRPO_MEGATRON_ENDS_SEED chooses the moments. `pytest -m slow -n 3 --dist worksteal
tests/integration/test_ends.py` has three runs at a time on the machine, each of which waits more than it
computes. Tests that need no ranks and engines are in tests/unit/test_keeper.py.
"""

import os
import random
import re
import signal
import time

import pytest

from tests.integration.ends import ROLES, LiveRun, arguments

SEED = int(os.environ.get("GRPO_MEGATRON_ENDS_SEED", "0"))
REPEATS = int(os.environ.get("GRPO_MEGATRON_ENDS", "1"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
# Where each is tried once, only the driver gets every signal. The other processes are killed.
CASES = [
    (role, number)
    for role in ROLES
    for number in SIGNALS
    if role == "driver" or number == signal.SIGKILL or REPEATS > 1
]
SECONDS_UNTIL_GONE = 10.0


def check_gone(run: LiveRun) -> None:
    assert run.left_after(SECONDS_UNTIL_GONE) == []


def check_message(run: LiveRun, pattern: str) -> None:
    errors = run.errors()
    assert 1 <= len(errors.splitlines()) <= 5, errors
    assert re.search(pattern, errors), errors


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("repeat", range(REPEATS))
@pytest.mark.parametrize(
    ("role", "number"), CASES, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_a_signal_at_any_moment(arithmetic, tmp_path, role, number, repeat):
    moment = random.Random(f"{SEED} {role} {number} {repeat}")
    changes = ["run.max_restarts=0", "rollout.engine.patience=0", "checkpoint.every=5"]
    with LiveRun("train", arguments(arithmetic, tmp_path, *changes), tmp_path) as run:
        if moment.random() < 0.7:
            run.wait_for(run.steps)
        target = run.wait_for(lambda: run.role(role))
        time.sleep(moment.uniform(0, 5))
        if not target.is_running():
            pytest.skip(f"this {role} had ended when its moment came")
        target.send_signal(number)
        seen, deadline = run.steps(), time.monotonic() + 400  # it may be starting still
        while run.keeper.poll() is None and time.monotonic() < deadline and run.steps() < seen + 20:
            time.sleep(0.1)
        if run.keeper.poll() is None and run.steps() >= seen + 20:
            assert number != signal.SIGKILL or role == "reward worker"
            if number == signal.SIGKILL and seen:
                assert "its process (reward worker 0) died" in run.output()
            # The process does not react to this signal, or was replaced, and the run has gone on.
            run.keeper.terminate()
            role, number = "driver", signal.SIGTERM
        status = run.ended()
        if role != "driver":
            assert status == 3
            check_message(run, "error: ")
        elif number == signal.SIGKILL:
            assert status == 128 + signal.SIGKILL
            check_message(run, r"error: the driver \(process \d+\) was killed by SIGKILL")
        else:
            assert status == 75
            check_message(run, rf"stopped on request \({number.name}\)")
        check_gone(run)


@pytest.mark.slow
def test_a_request_reaches_a_driver_that_has_started_ray(arithmetic, tmp_path):
    """Ray takes over SIGTERM when it starts."""
    data = [
        f"data.train={arithmetic}/data/sft.jsonl",
        "rollout.max_response_length=32",
        "checkpoint.export_hf=false",
    ]
    with LiveRun("sft", arguments(arithmetic, tmp_path, *data), tmp_path) as run:
        run.wait_for(run.steps)
        run.role("driver").terminate()
        assert run.ended() == 75
        check_message(
            run,
            r"stopped on request \(SIGTERM\) after step \d+; the run's newest checkpoint is .*; "
            r"the same command continues from it$",
        )
        check_gone(run)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (checkpoint / "state.json").is_file()


@pytest.mark.slow
def test_when_nobody_is_left_to_end_it_all_a_run_ends_all_the_same(arithmetic, tmp_path):
    """Keeper and driver are killed at once.

    Ranks, engines, reward workers and Ray's processes then end by themselves.
    """
    with LiveRun("train", arguments(arithmetic, tmp_path), tmp_path) as run:
        run.wait_for(run.steps)
        driver = run.role("driver")
        run.keeper.kill()
        driver.kill()
        run.ended()
        check_gone(run)

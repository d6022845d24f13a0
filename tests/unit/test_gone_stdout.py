"""A stdout that is no longer read, as behind `| head`: runs end as they would, and commands that print end
like other tools.
"""

import os
import subprocess
import sys

import pytest

# grpo-megatron, with a run that shows a line, and then does what it is told.
PROGRAM = """
import sys
from types import SimpleNamespace
from grpo_megatron import cli
from grpo_megatron.errors import Stopped, UserError
from grpo_megatron.monitoring.terminal import say

ends = {"refuse": UserError("planted refusal"), "stop": Stopped("stopped on request")}

def run(config, guard):
    say("step 1/1")
    if sys.argv[2] in ends: raise ends[sys.argv[2]]
    return {"steps": 1}

verdict = SimpleNamespace(text=lambda: "they agree", passed=sys.argv[-1] != "fail")
selftest = SimpleNamespace(selftest=lambda config, guard: verdict, as_json=lambda verdict: {})
sys.modules["grpo_megatron.preflight.check"] = SimpleNamespace(load_config=lambda *given: None)
sys.modules["grpo_megatron.commands.train"] = SimpleNamespace(train=run)
sys.modules["grpo_megatron.commands.selftest"] = selftest
sys.modules["grpo_megatron.commands.doctor"] = \
SimpleNamespace(doctor=lambda: print("x" * int(sys.argv[2])) or 0)
if sys.argv[1] == "doctor": sys.exit(cli.main(["doctor"]))
sys.exit(cli.main())
"""


def ended(stdout: str, *words: str) -> tuple[int, str]:
    """Return (exit status, stderr).

    stdout: "gone" (a pipe without a reader) or "full" (a full disk).
    """
    if stdout == "gone":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", PROGRAM, *words]
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=buffered, text=True, timeout=120
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


NO_RESULT = {
    "gone": "stdout takes no result (Broken pipe), which is in the run's folder\n",
    "full": "stdout takes no result (No space left on device), which is in the run's folder\n",
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    ("stdout", "words", "status"),
    [("gone", "train done", 0), ("full", "train done", 0), ("gone", "selftest fail", 1)],
)
def test_a_run_that_is_done_is_done(stdout, words, status):
    """It used to be an unexpected error of a run whose result was complete."""
    assert ended(stdout, *words.split()) == (status, NO_RESULT[stdout])


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_run_without_stdout_is_done(closed):
    """It used to end with an AttributeError."""
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", PROGRAM, "train", "done"]
    assert subprocess.run(shell, timeout=120).returncode == 0


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    ("what", "status", "said"),
    [("refuse", 2, "error: planted refusal\n"), ("stop", 75, "stopped on request\n")],
)
def test_a_run_that_ends_otherwise_has_its_own_status(what, status, said):
    """The status used to be 120, from the interpreter's last flush, although a job that starts it again
    looks for 75.
    """
    assert ended("gone", "train", what) == (status, said)


FULL = "error: no space left on the disk of what stdout goes to; make room\n"


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    ("characters", "stdout", "status", "said"),
    [(9, "gone", 141, ""), (99999, "gone", 141, ""), (9, "full", 2, FULL)],
)
def test_a_command_that_prints_ends_as_other_tools_do(characters, stdout, status, said):
    """The cases are output that waits for the last flush, and more output than the buffer holds."""
    assert ended(stdout, "doctor", f"{characters}") == (status, said)

"""`config check` refuses settings of the reward `code` with which no program could pass."""

import json
import re

import pytest

from grpo_megatron.preflight.check import check

# Each of these passed `config check`, and every response of the run got reward 0.
REFUSED = [
    ("import (", "SyntaxError: invalid syntax"),
    ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ("def helper(x):", "IndentationError: expected an indented block"),
    ('"""', "SyntaxError: unterminated triple-quoted string literal"),
    ("import math \\", "SyntaxError"),
    (
        r"import math\nimport sys",
        "SyntaxError: unexpected character after line continuation character",
    ),  # as quoted for a shell
    ("exit()", "it printed '' instead of '42"),
    ("print('loaded')", r"it printed 'loaded\\n42\\n' instead of '42"),
    ("n = input()", "EOFError"),
    ("print = None", "TypeError: 'NoneType' object is not callable"),
    ("import os; os.fork()", "PermissionError"),
    ("raise RuntimeError('\033[31mred')", "RuntimeError: \N{REPLACEMENT CHARACTER}\\[31mred"),
    ("x = bytes(2**30)", "it exceeds reward.code.limits.memory_mib=1024"),
]


def violations(*overrides: str) -> list[str]:
    return check(None, ["model.path=m", "data.train=d.jsonl", *overrides]).violations


@pytest.mark.parametrize(("preamble", "says"), REFUSED)
def test_a_preamble_that_would_fail_every_program_is_refused(preamble, says):
    (sentence,) = violations("reward.function=code", f"reward.code.preamble={json.dumps(preamble)}")
    assert re.search(
        f"reward.code.preamble makes a correct program fail, so every response would fail: .*{says}",
        sentence,
    ), sentence


@pytest.mark.parametrize(
    ("preamble", "limit"),
    [
        ("import time; time.sleep(9)", "seconds=1"),
        pytest.param("while True: pass", "cpu_seconds=1", marks=pytest.mark.slow),
    ],
)
def test_a_limit_that_would_fail_every_program_is_refused(preamble, limit):
    (sentence,) = violations(
        "reward.function=code", f"reward.code.preamble={json.dumps(preamble)}", f"reward.code.limits.{limit}"
    )
    assert sentence.endswith(f"it exceeds reward.code.limits.{limit}; raise this limit")
    assert ("reward.code.preamble makes" in sentence) == bool(preamble)


@pytest.mark.parametrize(
    "preamble",
    [
        "",
        "import math, sys",
        "from typing import *\n\n",
        "def helper(x):\n    return x",
        "# a comment",
        "sys = 1;",
        "import numpy as np",
    ],
)
def test_what_a_right_program_passes_with_is_taken(preamble):
    assert violations("reward.function=code", f"reward.code.preamble={json.dumps(preamble)}") == []


def test_a_term_is_looked_at_too():
    broken = "reward.code.preamble=import ("
    assert len(violations("reward.terms={right: {function: code}}", broken)) == 1
    assert violations(broken) == []  # nothing runs programs
    assert (
        violations("rollout.environment=tools", "rollout.tools=[python]", broken) == []
    )  # the tool has no preamble


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward.memory_gib=1e-9", "reward.memory_gib must be at least 0.0625, but is 1e-9"),
        ("reward.memory_gib=0.001", "reward.memory_gib must be at least 0.0625"),
        ("reward.file_mib=1e-9", "reward.file_mib must be at least 1,"),
        ("reward.file_mib=0.001", "reward.file_mib must be at least 1,"),
        ("reward.timeout=1e-300", "reward.timeout must be at least 0.001,"),
    ],
)
def test_limits_with_which_no_worker_could_start_are_refused(override, says):
    """The run used to end after a minute: `unexpected RuntimeError: unable to start watchdog thread`."""
    (sentence,) = violations(override)
    assert says in sentence

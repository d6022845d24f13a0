"""The reward `code`: programs that are right or wrong, and how it reads tests and compares results.

test_code_reward_cheating.py has programs that only pretend to be right.
"""

import json
import time
from dataclasses import replace

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.sandbox import CodeConfig, CodeScore, SandboxLimits
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.rewards.code import read_tests, same_output, same_value
from grpo_megatron.rewards.scoring import RewardTask, Scored, Scorer
from tests.unit.code_rewards import ASSERTS, CALLS, CHECK, LIMITS, SUMS, config, score

RIGHT = "def add(a, b):\n    return a + b\n"


def test_streams():
    assert score("a, b = map(int, input().split())\nprint(a + b)", SUMS) == {
        "reward": 1.0,
        "passed": 1.0,
        "timed_out": 0.0,
        "no_code": 0.0,
    }
    first_two = "a, b = map(int, input().split())\nprint(a + b if a < 5 else 0)"
    assert score(first_two, SUMS)["reward"] == 0.0
    assert score(first_two, SUMS, score=CodeScore.share)["reward"] == pytest.approx(2 / 3)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    ("answer", "record"),
    [(CALLS, {}), (ASSERTS, {}), (json.dumps(ASSERTS), {}), (CHECK, {"entry_point": "add"})],
    ids=["calls", "asserts", "asserts as JSON", "check"],
)
def test_functions(answer, record):
    assert score(RIGHT, answer, record)["reward"] == 1.0
    half = score("def add(a, b):\n    return 3", answer, record, score=CodeScore.share)
    assert half["reward"] == (0.5 if "check" not in answer else 0.0)
    assert score("def subtract(a, b):\n    return a - b", answer, record)["reward"] == 0.0
    assert score("this is no program", answer, record)["reward"] == 0.0


def test_a_name_with_an_underscore():
    """The tests used to say that the program has no such function."""
    record = {"entry_point": "_add"}
    assert score("def _add(a, b):\n    return a + b", CHECK, record)["reward"] == 1.0
    assert score("def _add(a, b):\n    return a - b", CHECK, record)["reward"] == 0.0


def test_a_method_of_a_solution():
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS)["reward"] == 1.0


def test_an_import_that_tests_need_may_be_a_single_text():
    """Each of its letters used to be a line, so that every response failed."""
    (test,) = read_tests("assert math.sqrt(4) == f(2)", {"test_imports": "import math"})
    assert test.statements == "import math\nassert math.sqrt(4) == f(2)"


@pytest.mark.slow
def test_tests_bring_what_they_need():
    record = {"test_imports": ["import math"], "test_setup_code": "expected = 2.0"}
    program = (
        "import math\nclass isclose: pass\nmath.isclose = lambda *a: True\ndef root(x):\n    return x ** 0.5"
    )
    assert score(program, ["assert math.isclose(root(4), expected)"], record)["reward"] == 1.0
    assert score(program, ["assert math.isclose(root(9), expected)"], record)["reward"] == 0.0
    # Also where they take a module for granted that the program imports.
    assert score(program, ["assert math.isclose(root(9), 2)"])["reward"] == 0.0


def test_objects_of_the_program_stay_there_and_can_be_used():
    program = """
class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right
    def swapped(self):
        return Pair(self.right, self.left)
def first(pairs):
    return [pair.left for pair in pairs]
"""
    tests = ["assert first([Pair(1, 2), Pair(3, 4).swapped()]) == [1, 4]", "assert Pair(1, 2).left == 1"]
    assert score(program, tests)["reward"] == 1.0


def test_errors_that_tests_expect():
    tests = [
        (
            "try:\n    root(-1)\nexcept ValueError as error:\n"
            "    assert 'negative' in str(error)\nelse:\n    assert False"
        )
    ]
    assert score("def root(x):\n    raise ValueError('negative')", tests)["reward"] == 1.0
    assert score("def root(x):\n    raise TypeError('negative')", tests)["reward"] == 0.0


def test_results_of_all_plain_kinds():
    program = (
        "def f(x):\n    return {1: (1, 2.5, None), 'a': [True, {3}, b'x', 1j, float('inf'), frozenset([1])]}"
    )
    tests = ["assert f(0) == {1: (1, 2.5, None), 'a': [True, {3}, b'x', 1j, float('inf'), frozenset([1])]}"]
    assert score(program, tests)["reward"] == 1.0


@pytest.mark.parametrize(
    ("program", "answer", "passed"),
    [
        ("import time\ntime.sleep(5)\nprint(1)", {"inputs": ["", ""], "outputs": ["1", "1"]}, 0.5),
        ("import time\ndef f(x):\n    time.sleep(60)", ["assert f(1) is None"], 0.0),
    ],
    ids=["together", "alone"],
)
def test_all_tests_of_a_program_end_before_the_reward_has_used_its_time(program, answer, passed):
    """Otherwise a slow program would be a failed reward, which ends the run, and not a response that
    failed its tests.
    """
    answer = json.dumps(answer)
    scorer = Scorer(
        replace(config(score=CodeScore.share), timeout=8.0), lambda ids: f"```python\n{program}\n```"
    )
    for _ in range(3):  # the tenth of the time that is left can be too short on a busy machine
        (found,) = scorer.work([RewardTask(7, "p", [], answer, {})], 100.0)
        if isinstance(found, Scored):
            break
    assert isinstance(found, Scored), found
    assert found.components == {"reward": passed, "passed": passed, "timed_out": 1.0, "no_code": 0.0}


def test_a_program_that_hangs():
    options = {"limits": SandboxLimits(seconds=1.0)}
    reward = resolve_reward(RewardConfig(function="code", code=CodeConfig(**options)))
    program = "```python\nimport time\ntime.sleep(60)\n```"
    assert reward(prompt="", response=program, answer=SUMS, record={})["timed_out"] == 1.0


def test_all_tests_together_stay_within_the_time_of_a_reward():
    reward = resolve_reward(
        RewardConfig(function="code", timeout=2.0, code=CodeConfig(limits=LIMITS, score=CodeScore.share))
    )
    program = "```python\nimport time\ntime.sleep(60)\n```"
    start = time.monotonic()
    found = reward(prompt="", response=program, answer=SUMS, record={})
    assert found == {"reward": 0.0, "passed": 0.0, "timed_out": 1.0, "no_code": 0.0}
    assert time.monotonic() - start < LIMITS.seconds


@pytest.mark.slow
def test_the_preamble():
    program = "def f(x: List[int]) -> int:\n    return sum(x)"
    assert score(program, ["assert f([1, 2]) == 3"])["reward"] == 0.0
    assert score(program, ["assert f([1, 2]) == 3"], preamble="from typing import *")["reward"] == 1.0


def test_a_response_without_a_program():
    reward = resolve_reward(config())
    assert reward(prompt="", response="no", answer=SUMS, record={}) == {
        "reward": 0.0,
        "passed": 0.0,
        "timed_out": 0.0,
        "no_code": 1.0,
    }


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n3\n", "1  2 \n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.3333333", "0.33333331", True),
        ("0.334", "0.33333331", False),
        ("1000000007", "1000000008", False),
        ("2", "2.0", True),
        ("yes", "YES", False),
        ("nan", "1.0", False),
        ("", "0", False),
    ],
)
def test_comparing_outputs(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1, {"a": 2.0000000001}], [1, {"a": 2}], True),
        (True, 1, False),
        (10**400, 1.5, False),
        ([1], [1, 2], False),
        ("1", 1, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_comparing_results(found, expected, same):
    assert same_value(found, expected) is same


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ("", "no tests"),
        ([], "no tests"),
        ("[]", "no tests"),
        ("so it is 5", "neither Python code nor JSON with inputs and outputs: 'so it is 5'"),
        ('{"inputs": ["1"], "outputs": []}', "as many inputs as outputs"),
        ('{"inputs": [5], "outputs": ["5"]}', "must be text or a list of lines, not 5"),
        ('{"tests": ["1"]}', "as many inputs as outputs.*keys tests"),
        ("{'inputs': ['1'], 'outputs': ['1']}", "asserts nothing: \"{'inputs'.*lists of tests, as JSON"),
        ("['assert f() == 1']", "asserts nothing"),
        (["assert f() == 1", "f == 1"], "asserts nothing: 'f == 1'"),
        ('{"fn_name": "f", "inputs": [5], "outputs": [5]}', "list of its arguments, not '5'"),
    ],
)
def test_tests_that_cannot_be_read(answer, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_tests(answer, {})


def test_arguments_as_text():
    tests = read_tests(json.dumps({"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": [3]}), {})
    assert tests[0].arguments == [[1, 2], "a"]


def test_unknown_places_are_refused():
    with pytest.raises(UserError, match="unknown"):
        resolve_reward(RewardConfig(function="codes"))

"""The reward `code`: programs that are right, wrong, or pretend to be right."""

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

LIMITS = SandboxLimits(seconds=20)
SUMS = json.dumps({"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7\n", "11\n"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]})
ASSERTS = ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]
# As HumanEval has them.
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(3, 4) == 7\n"
RIGHT = "def add(a, b):\n    return a + b\n"


def config(**options) -> RewardConfig:
    return RewardConfig(function="code", code=CodeConfig(limits=LIMITS, **options))


def score(program: str, answer, record=None, **options) -> dict[str, float]:
    reward = resolve_reward(config(**options))
    return reward(
        prompt="", response=f"Like this:\n```python\n{program}\n```\n", answer=answer, record=record or {}
    )


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


def test_a_method_of_a_solution():
    assert score("class Solution:\n    def add(self, a, b):\n        return a + b", CALLS)["reward"] == 1.0


ALWAYS_EQUAL = """
class Equal:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __bool__ = lambda self: True
    __abs__ = __sub__ = __rsub__ = lambda self, *other: 0
    __lt__ = __le__ = lambda self, other: True
    __hash__ = lambda self: 0
def add(a, b):
    return Equal()
"""
PATCHES = """
import builtins, sys, os, unittest
builtins.AssertionError = builtins.all = builtins.print
class Sys: pass
def abs(*a): return 0
def check(candidate): pass
__builtins__ = {}
sys.excepthook = lambda *a: None
def add(a, b):
    sys.exit = os._exit = lambda *a: None
    return 0
"""
# What the helper's tests would write when they are done.
CHANNEL = """
import os, socket
for number in (1, 2, 3):
    try:
        os.write(number, b'{"ok": true}\\n["dict", []]\\nnull\\n0\\n')
    except OSError:
        pass
os._exit(0)
"""
NAMES = """
import os
os.write(3, b'["dict", [["__builtins__", ["dict", []]], ["AssertionError", 0], \
["add", 0], ["check", 0]]]\\\\n')
os.write(3, b'3\\\\n7\\\\n' * 0)
os._exit(0)
"""


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    "answer", [SUMS, CALLS, ASSERTS, CHECK], ids=["streams", "calls", "asserts", "check"]
)
@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "exit()",
        "import os\nos._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)\nraise SystemExit(0)",
        "import os\ndef add(a, b):\n    os._exit(0)",
        "print('passed')\ndef add(a, b):\n    return None",
        (
            "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\n"
            "def add(a, b):\n    while True: pass"
        ),
        ALWAYS_EQUAL,
        PATCHES,
        CHANNEL,
        NAMES,
    ],
    ids=[
        "exit",
        "quit",
        "_exit",
        "raise",
        "late",
        "marker",
        "thread",
        "equal",
        "patches",
        "channel",
        "names",
    ],
)
def test_what_only_pretends(program, answer):
    assert score(program, answer, {"entry_point": "add"}, score=CodeScore.share)["passed"] == 0.0


# Finds a number of this kind wherever it is in reach, and claims to have computed it.
SEEKS = """
import gc, re, sys
def seek():
    frame, seen = sys._getframe(2), []
    while frame:
        seen.append(repr(frame.f_locals) + repr(frame.f_globals) + repr(frame.f_code.co_consts))
        frame = frame.f_back
    seen += [repr(thing) for thing in gc.get_objects() if isinstance(thing, (list, dict, tuple))]
    found = re.search('8675' + '30[0-9]', ' '.join(seen))
    return int(found[0]) if found else 0
def add(a, b):
    return seek()
"""


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "answer",
    [
        '{"fn_name": "add", "inputs": [[1, 2], [1, 2]], "outputs": [8675309, 8675309]}',
        ["assert add(1, 2) == 8675309", "assert add(3, 4) == 8675309"],
        "EXPECTED = 8675309\ndef check(candidate):\n    assert candidate(1, 2) == EXPECTED",
    ],
)
def test_a_program_cannot_find_what_is_expected(answer):
    assert score(SEEKS, answer, {"entry_point": "add"}, score=CodeScore.share)["passed"] == 0.0
    # It would have found it.
    assert score(SEEKS + "hidden = [int('8675300') + 9]", answer, {"entry_point": "add"})["passed"] == 1.0


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


def test_tests_trust_in_functions_of_python_not_in_those_of_the_program():
    program = """
def abs(x): return 0
def all(items): return True
class math:
    isclose = lambda *a: True
def add(a, b): return 99
"""
    for statement in ("abs(add(1, 2) - 3) < 1", "all([add(1, 2) == 3])", "math.isclose(add(1, 2), 3)"):
        assert score(program, [f"assert {statement}"])["reward"] == 0.0
    # But for the one under test, if the record names it.
    assert (
        score("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"], {"entry_point": "sum"})["reward"]
        == 1.0
    )
    assert score("def sum(a, b): return a + b", ["assert sum(1, 2) == 3"])["reward"] == 0.0


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


OBJECT = """
class Anything:
    __bool__ = __eq__ = __contains__ = lambda self, *other: True
    __len__ = lambda self: 1
    __lt__ = __gt__ = __ne__ = lambda self, other: True
    __iter__ = lambda self: iter([3])
    __hash__ = lambda self: hash(3)
    __float__ = __int__ = __index__ = lambda self: 3
    __str__ = __repr__ = lambda self: '3'
def f(x):
    return Anything()
"""


# With what f returns where it is right.
CONDITIONS = {
    "f(1)": 3,
    "not f(1)": 0,
    "f(1) or False": 3,
    "f(1) and True": 3,
    "all([f(1)])": 3,
    "any([f(1), 0])": 3,
    "f(1) == f(1)": 3,
    "f(1) != 4": 3,
    "3 == f(1)": 3,
    "f(1) in [3]": 3,
    "f(1) in {3}": 3,
    "3 in f(1)": [3],
    "f(1) > 2": 3,
    "len(f(1)) == 1": [3],
    "list(f(1)) == [3]": [3],
    "int(f(1)) == 3": 3,
    "str(f(1)) == '3'": 3,
}


def test_an_object_of_the_programs_own_class_is_neither_true_nor_equal_to_anything():
    """A program could otherwise return an object that is true, and equal to whatever a test compares it
    with.
    """
    assert all(
        eval(condition, {"f": lambda _, found=found: found}) for condition, found in CONDITIONS.items()
    )
    statements = [f"assert {condition}" for condition in CONDITIONS]
    assert score(OBJECT, statements, score=CodeScore.share)["passed"] == 0.0


def test_errors_that_tests_expect():
    tests = [
        (
            "try:\n    root(-1)\nexcept ValueError as error:\n"
            "    assert 'negative' in str(error)\nelse:\n    assert False"
        )
    ]
    assert score("def root(x):\n    raise ValueError('negative')", tests)["reward"] == 1.0
    assert score("def root(x):\n    raise TypeError('negative')", tests)["reward"] == 0.0


@pytest.mark.slow
def test_an_end_of_iteration_ends_no_loop_of_the_tests():
    tests = [
        "for found, right in zip(map(f, [1, 2]), [1, 2]):\n    assert found == right",
        "assert all(map(f, [1]))",
    ]
    for error in ("StopIteration", "StopAsyncIteration"):
        assert score(f"def f(x):\n    raise {error}", tests, score=CodeScore.share)["passed"] == 0.0


def test_results_of_all_plain_kinds():
    program = (
        "def f(x):\n    return {1: (1, 2.5, None), 'a': [True, {3}, b'x', 1j, float('inf'), frozenset([1])]}"
    )
    tests = ["assert f(0) == {1: (1, 2.5, None), 'a': [True, {3}, b'x', 1j, float('inf'), frozenset([1])]}"]
    assert score(program, tests)["reward"] == 1.0


@pytest.mark.parametrize(
    ("program", "answer", "passed"),
    [
        ("import time\ntime.sleep(2)\nprint(1)", {"inputs": ["", ""], "outputs": ["1", "1"]}, 0.5),
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
        replace(config(score=CodeScore.share), timeout=3.0), lambda ids: f"```python\n{program}\n```"
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
        ("so it is 5", "neither Python nor inputs and outputs: 'so it is 5'"),
        ('{"inputs": ["1"], "outputs": []}', "as many inputs as outputs"),
        ('{"tests": ["1"]}', "as many inputs as outputs.*keys tests"),
        ("{'inputs': ['1'], 'outputs': ['1']}", "asserts nothing: \"{'inputs'.*are written as JSON"),
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

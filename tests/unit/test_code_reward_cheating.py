"""Programs that only pretend to be right get no reward from `code`."""

import pytest

from grpo_megatron.config.sandbox import CodeScore
from tests.unit.code_rewards import ASSERTS, CALLS, CHECK, SUMS, score

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


@pytest.mark.slow
def test_an_end_of_iteration_ends_no_loop_of_the_tests():
    tests = [
        "for found, right in zip(map(f, [1, 2]), [1, 2]):\n    assert found == right",
        "assert all(map(f, [1]))",
    ]
    for error in ("StopIteration", "StopAsyncIteration"):
        assert score(f"def f(x):\n    raise {error}", tests, score=CodeScore.share)["passed"] == 0.0

"""The reward `code`, which runs the program in a response against the tests of its record.

The program never sees the expected results. Outputs and results are compared in this process, and assert
statements run in a separate process (sandbox.run.Program.tests). So exiting early, printing anything, or
changing Python's functions does not pass a test.
"""

import ast
import json
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config.sandbox import CodeScore
from grpo_megatron.rewards.fences import find_program
from grpo_megatron.rewards.terms import Setup
from grpo_megatron.sandbox.program import Ended, Outcome, Program
from grpo_megatron.sandbox.run import Sandbox, required_containment

# Share of reward.timeout after which unfinished tests count as failed. At the full timeout, the reward itself
# would fail.
_SHARE_OF_TIMEOUT = 0.9


def code(setup: Setup) -> Callable[..., dict[str, float]]:
    """Make the reward function `code`: 1.0 if the program in the response passes all tests, else 0.0.

    The record's reference answer contains the tests. With reward.code.score=share, the reward is the
    component `passed` instead. Components of the result:

    - `passed`: number of passed tests divided by the number of all tests. With score=all, no test is run
      after the first failure, and the tests that are not run count as failed.
    - `timed_out`: 1 if a test was ended because of its time limit, or if 90 % of reward.timeout passed before
      all tests had run.
    - `no_code`: 1 if the response contains no program.

    The reward function raises ValueError if the record's tests cannot be read. Raises UserError if this
    machine cannot isolate programs as reward.code.isolation requires.
    """
    options, timeout = setup.config.code, setup.config.timeout
    required_containment(options.isolation)

    def reward(prompt: str, response: str, answer: str | list[str], record: dict) -> dict[str, float]:
        tests = read_tests(answer, record)
        program = find_program(response, options.find)
        if program is None:
            return {"reward": 0.0, "passed": 0.0, "timed_out": 0.0, "no_code": 1.0}
        deadline = time.monotonic() + _SHARE_OF_TIMEOUT * timeout
        passed, timed_out = 0, False
        with Sandbox(options.limits, options.isolation) as sandbox:
            for test in tests:
                left = deadline - time.monotonic()
                if left <= 0:
                    timed_out = True
                    break
                outcome = sandbox.run(
                    test.program(f"{options.preamble}\n{program}" if options.preamble else program), left
                )
                timed_out = timed_out or outcome.ended in (Ended.time, Ended.cpu)
                right = test.passed_by(outcome)
                passed += right
                if not right and options.score == CodeScore.all:
                    break
        share = passed / len(tests)
        total = share if options.score == CodeScore.share else float(passed == len(tests))
        return {"reward": total, "passed": share, "timed_out": float(timed_out), "no_code": 0.0}

    reward.check_record = read_tests
    return reward


# -- tests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamTest:
    """A test that gives a program a text on stdin, and compares its stdout with the expected text."""

    stdin: str
    expected: str

    def program(self, source: str) -> Program:
        return Program(source, stdin=self.stdin)

    def passed_by(self, outcome: Outcome) -> bool:
        return outcome.succeeded and same_output(outcome.stdout, self.expected)


@dataclass(frozen=True)
class CallTest:
    """A test that calls a function of the program, and compares its return value with the expected value.

    If the expected value is a list of one element, as in APPS, this element alone is accepted too.
    """

    function: str
    arguments: list
    expected: Any

    def program(self, source: str) -> Program:
        return Program(source, function=self.function, arguments=self.arguments)

    def passed_by(self, outcome: Outcome) -> bool:
        if not outcome.succeeded or not outcome.has_result:
            return False
        try:
            found = as_json(outcome.result)
            # APPS wraps results in a list of one element.
            wrapped = (
                isinstance(self.expected, list)
                and len(self.expected) == 1
                and same_value(found, self.expected[0])
            )
            return wrapped or same_value(found, self.expected)
        except RecursionError:
            return False


@dataclass(frozen=True)
class StatementTest:
    """A test made of Python statements, such as asserts, which raise an error if the program is wrong."""

    statements: str
    function: str | None
    """Name of the program's function that is passed to check(candidate) in the statements, or None."""

    def program(self, source: str) -> Program:
        return Program(source, function=self.function, tests=self.statements)

    def passed_by(self, outcome: Outcome) -> bool:
        return outcome.succeeded


Test = StreamTest | CallTest | StatementTest
# A test must contain at least one of these nodes, or it cannot fail.
_CAN_FAIL = (ast.Assert, ast.Call, ast.Raise)


def read_tests(answer: str | list[str], record: dict) -> list[Test]:
    """Return the tests that a record's reference answer describes.

    The answer has one of these forms:

    - {"inputs": [...], "outputs": [...]} as JSON text, as in APPS and TACO. Each input is the stdin of the
      program, and each output its stdout. With the key "fn_name", they are the arguments and results of the
      function of this name.
    - A list of assert statements, as in MBPP, possibly as JSON text. The fields test_imports and
      test_setup_code of the record are put before each statement.
    - A test program, as in HumanEval. Its function check(candidate) is called with the program's function
      that the record's field entry_point names.

    answer: the record's reference answer.
    record: the other fields of the record.

    Raises ValueError for any other answer, and for tests that no program can fail.
    """
    if isinstance(answer, str):
        answer = _parsed(answer)
    if isinstance(answer, dict):
        return _pairs(answer)
    function = record.get("entry_point")
    statements = [answer] if isinstance(answer, str) else answer
    imports = record.get("test_imports") or []
    imports = [imports] if isinstance(imports, str) else imports
    setup = "\n".join([*imports, record.get("test_setup_code") or ""]).strip()
    tests = [StatementTest(f"{setup}\n{text}" if setup else text, function) for text in statements]
    for test in tests:
        try:
            with warnings.catch_warnings(
                action="ignore", category=SyntaxWarning
            ):  # there may be one for each record
                tree = ast.parse(test.statements, "tests")
                compile(tree, "tests", "exec")
        except SyntaxError as error:
            raise ValueError(
                "the tests are neither Python code nor JSON with inputs and outputs: "
                f"{test.statements[:80]!r} ({error})"
            ) from error
        # A list or dictionary in Python syntax instead of JSON is also a program, and every response would
        # pass it.
        if tree.body and not any(isinstance(node, _CAN_FAIL) for node in ast.walk(tree)):
            asserts = f"the test asserts nothing: {test.statements[:80]!r}"
            raise ValueError(f"{asserts}; write inputs and outputs, and lists of tests, as JSON")
    if not any(test.statements.strip() for test in tests):
        raise ValueError("the reference answer contains no tests")
    return tests


def _parsed(answer: str) -> Any:
    """Return `answer` parsed from JSON if that gives a dict or a list of strings, else `answer` itself."""
    try:
        found = json.loads(answer)
    except ValueError:
        return answer
    is_list = isinstance(found, list) and all(isinstance(item, str) for item in found)
    return found if is_list or isinstance(found, dict) else answer


def _pairs(tests: dict) -> list[Test]:
    """Return one test for each pair of an input and its expected output.

    tests: dict with the lists "inputs" and "outputs". If it has the key "fn_name", the tests call this
        function. Otherwise, they use stdin and stdout.

    Raises ValueError if the two lists are missing, empty or of different lengths, or if an input of
    `fn_name` cannot be read as a list of arguments.
    """
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise ValueError(
            "the tests must have as many inputs as outputs, and at least one of each; the reference answer "
            f"has the keys {', '.join(tests)}"
        )
    pairs = zip(inputs, outputs, strict=True)
    if function is None:
        return [StreamTest(_lines(given), _lines(expected)) for given, expected in pairs]
    return [CallTest(function, _arguments(given), expected) for given, expected in pairs]


def _lines(text: Any) -> str:
    """Return the text of standard input or output. A list has one line in each item.

    Raises ValueError for a value that is neither text nor a list.
    """
    if isinstance(text, list):
        return "\n".join(map(str, text))
    if not isinstance(text, str):
        raise ValueError(f"what a program reads and prints must be text or a list of lines, not {text!r:.80}")
    return text


def _arguments(given: Any) -> list:
    """Return the arguments of a function call as a list.

    given: the list of arguments, or a text with one argument per line as JSON, as in LiveCodeBench.

    Raises ValueError for anything else.
    """
    if isinstance(given, str):
        return [json.loads(line) for line in given.splitlines() if line.strip()]
    if not isinstance(given, list):
        raise ValueError(
            f"the input of a function must be the list of its arguments, not {str(given)[:80]!r}"
        )
    return given


def same_output(found: str, expected: str) -> bool:
    """Return True if two texts that programs printed have the same words in each line.

    Two numbers may differ by 1e-6, relative or absolute, if one of them has a decimal point or an exponent.
    Two whole numbers must be equal. White space around the texts, and its amount between words, does not
    matter.
    """
    found_lines, expected_lines = (
        [line.split() for line in text.strip().splitlines()] for text in (found, expected)
    )
    return len(found_lines) == len(expected_lines) and all(
        len(left) == len(right) and all(map(_same_word, left, right))
        for left, right in zip(found_lines, expected_lines, strict=True)
    )


_DECIMAL = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?")


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    # Whole numbers must be equal: with a tolerance, large ones would equal their neighbours.
    either = _DECIMAL.fullmatch(found) or _DECIMAL.fullmatch(expected)
    try:
        return bool(either) and math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-6)
    except ValueError:
        return False


def as_json(value: Any) -> Any:
    """Return the value with tuples turned into lists, and with the keys of dicts turned into strings.

    JSON makes the same changes. So the result of a program can be compared with an expected value that was
    read from JSON.
    """
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    return value


def same_value(found: Any, expected: Any) -> bool:
    """Return True if two JSON values are equal. Floats may differ by 1e-6, relative or absolute.

    Unlike in Python, 1 and True are not equal.
    """
    if isinstance(found, bool) or isinstance(expected, bool):
        return found is expected
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same_value, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in found)
    numbers = isinstance(found, (int, float)) and isinstance(expected, (int, float))
    if numbers and (isinstance(found, float) or isinstance(expected, float)):
        try:
            return math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)
        except OverflowError:  # an int larger than any float
            return False
    return found == expected

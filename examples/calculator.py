"""A tool for rollout.environment=tools: `rollout.tools=[examples.calculator:calculator]`.

It needs the package simpleeval. The size of expressions and results is limited, so that no expression can
block the process.
"""

import ast
import math
import operator
from collections.abc import Callable

from simpleeval import InvalidExpression, SimpleEval

# Size limit of a result in bits. It is large enough for any answer and too small to block a worker.
_BITS = 4096
_LONGEST = 1000  # maximal number of characters of an expression


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, brackets, abs, round, min, max, sqrt, pi and e.
    """
    return str(calculate(expression))


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Raises ValueError if the text is not arithmetic, divides by zero, or is too large to compute. The message,
    which the model reads, says which of these it is.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    evaluator = SimpleEval(_OPERATORS, _FUNCTIONS, {"pi": math.pi, "e": math.e})
    # simpleeval also knows texts, comparisons, attributes and keyword arguments.
    evaluator.nodes = {kind: _bounded(evaluator.nodes[kind]) for kind in _ARITHMETIC}
    try:
        return evaluator.eval(expression, ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("this is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ValueError("the expression is too large") from error
    except (TypeError, InvalidExpression) as error:
        raise ValueError(str(error)) from error


def _bounded(compute: Callable) -> Callable:
    """Return `compute` with a check that its result is a real number of limited size."""

    def checked(node: ast.expr) -> int | float:
        number = compute(node)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{number!r} is not a real number")
        if number.bit_length() > _BITS if isinstance(number, int) else not math.isfinite(number):
            raise ValueError("the result is too large")
        return number

    return checked


def _power(base: int | float, exponent: int | float) -> int | float:
    # Checked first, because computing the power itself could take hours.
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > _BITS:
        raise ValueError("the power is too large")
    return base**exponent


def _round(number: int | float, digits: int | None = None) -> int | float:
    # Checked first: for -n digits, Python computes 10**n, which no time limit can interrupt.
    if digits is not None and abs(digits) > _BITS:
        raise ValueError("round has too many digits")
    return round(number, digits)


_ARITHMETIC = (ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.Call)
_FUNCTIONS = {"abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

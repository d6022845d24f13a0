"""A calculator for arithmetic that a model writes: numbers, + - * / // % **, brackets, a few functions.

The size of expressions and results is limited, so that no expression can block the process.
"""

import ast
import math
import operator
from collections.abc import Callable

# Size limit of a result in bits. It is large enough for any answer and too small to block a worker.
_BITS = 4096
_LONGEST = 1000  # maximal number of characters of an expression

_BINARY: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _round(number: int | float, *digits: int) -> int | float:
    # Checked first: for -n digits, Python computes 10**n, which no time limit can interrupt.
    if any(isinstance(count, int) and abs(count) > _BITS for count in digits):
        raise ValueError("round has too many digits")
    return round(number, *digits)


_FUNCTIONS: dict[str, Callable] = {"abs": abs, "round": _round, "min": min, "max": max, "sqrt": math.sqrt}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Raises ValueError if the text is not arithmetic, divides by zero, or is too large to compute. The message,
    which the model reads, says which of these it is.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("this is not an arithmetic expression") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ValueError("the expression is too large") from error
    except TypeError as error:
        raise ValueError(str(error)) from error


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)[:80]} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    # Checked first, because computing the power itself could take hours.
    if isinstance(base, int) and isinstance(exponent, int) and abs(base).bit_length() * abs(exponent) > _BITS:
        raise ValueError("the power is too large")
    return base**exponent


def _bounded(number: int | float) -> int | float:
    if isinstance(number, int):
        if number.bit_length() > _BITS:
            raise ValueError("the result is too large")
    elif isinstance(number, complex) or not math.isfinite(number):
        raise ValueError("the result is not a finite real number")
    return number

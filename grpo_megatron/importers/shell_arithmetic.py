"""Bash's integer arithmetic, $((...)), with the operators of C."""

import operator
import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:(),])"
)
_LIMIT = 2**63


class Unknown(Exception):
    """The expression has an unknown part, or a form that this module does not support."""


def _divide(a: int, b: int) -> int:
    """Divide and round towards zero, as C does."""
    if b == 0:
        raise Unknown
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _power(a: int, b: int) -> int:
    if not 0 <= b <= 64:
        raise Unknown
    return a**b


def _shift(direction: Callable[[int, int], int]) -> Callable[[int, int], int]:
    def shifted(a: int, b: int) -> int:
        if not 0 <= b <= 64:
            raise Unknown
        return direction(a, b)

    return shifted


# (precedence, operation); a larger number binds tighter
_BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (2, lambda a, b: int(bool(a or b))),
    "&&": (3, lambda a, b: int(bool(a and b))),
    "|": (4, operator.or_),
    "^": (5, operator.xor),
    "&": (6, operator.and_),
    "==": (7, lambda a, b: int(a == b)),
    "!=": (7, lambda a, b: int(a != b)),
    "<": (8, lambda a, b: int(a < b)),
    ">": (8, lambda a, b: int(a > b)),
    "<=": (8, lambda a, b: int(a <= b)),
    ">=": (8, lambda a, b: int(a >= b)),
    "<<": (9, _shift(operator.lshift)),
    ">>": (9, _shift(operator.rshift)),
    "+": (10, operator.add),
    "-": (10, operator.sub),
    "*": (11, operator.mul),
    "/": (11, _divide),
    "%": (11, lambda a, b: a - b * _divide(a, b)),
    "**": (12, _power),
}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": lambda a: int(not a),
    "~": operator.invert,
}


def evaluate(expression: str, value_of: Callable[[str], str | None]) -> int | None:
    """Return the expression's value, or None if it is unknown.

    value_of: returns the text of a variable, which is an expression itself; None if it is unknown.
    """
    try:
        return _Expression(expression, value_of, 0).value()
    except (Unknown, RecursionError):
        return None


class _Expression:
    def __init__(self, text: str, value_of: Callable[[str], str | None], depth: int):
        if depth > 20:
            raise Unknown
        self._tokens: list[str] = []
        self._at, self._value_of, self._depth = 0, value_of, depth
        at = 0
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise Unknown
            self._tokens.append(match[1])
            at = match.end()

    def value(self) -> int:
        found = self._ternary()
        if self._ahead():
            raise Unknown
        return found

    def _ahead(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._ahead()
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise Unknown

    def _ternary(self) -> int:
        condition = self._binary(0)
        if self._ahead() != "?":
            return condition
        self._next()
        first = self._ternary()
        self._expect(":")
        second = self._ternary()
        return first if condition else second

    def _binary(self, least: int) -> int:
        left = self._unary()
        while self._ahead() in _BINARY and _BINARY[self._ahead()][0] > least:
            precedence, operation = _BINARY[self._next()]
            # Only the power groups from the right.
            right = self._binary(precedence - (operation is _power))
            left = operation(left, right)
            if abs(left) >= _LIMIT:
                raise Unknown
        return left

    def _unary(self) -> int:
        token = self._next()
        if token in _UNARY:
            return _UNARY[token](self._unary())
        if token == "(":
            found = self._ternary()
            self._expect(")")
            return found
        if token[:1].isdigit():
            return _number(token)
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise Unknown
        held = self._value_of(token)
        if held is None:
            raise Unknown
        return _Expression(held, self._value_of, self._depth + 1).value() if held.strip() else 0


def _number(token: str) -> int:
    if token[:2].lower() == "0x":
        return int(token, 16)
    if token.startswith("0") and not re.fullmatch("0[0-7]*", token):
        raise Unknown
    return int(token, 8) if token.startswith("0") else int(token)

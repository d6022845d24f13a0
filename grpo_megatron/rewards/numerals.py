"""Normalisation of numbers in text: thousands separators, minus signs and exponents in one spelling."""

import re
from dataclasses import dataclass, field
from decimal import Decimal

_SEPARATOR = r"(?:\\!)?(?:,|\{,\}|\\,|[\u2009\u202f])(?:\\!)?"
# 1,234  12{,}345.6  $1,000,000; but not 0,234, 1,23 or 1.234,567, which are European decimals or lists. A
# number has one kind of separator: 1{,}234,5{,}678 are two numbers. No number begins after a separator other
# than a comma, so that each is read once.
_GROUPED = re.compile(
    r"(?P<currency>[$€£¥])?(?<![\d.])(?<!\d\{,\})(?<!\d\\,)(?<!\\!)(?<!\d[\u2009\u202f])"
    rf"(?P<groups>[1-9]\d{{0,2}}(?P<separator>{_SEPARATOR})\d{{3}}(?:(?P=separator)\d{{3}})*)"
    r"(?!\d|(?:\{,\}|,?\\!|\\,|[\u2009\u202f])[,\d\\])"
)

_SIZE = r"(?:\\(?:left|right|[bB]igg?[lr]?)\s*)?"
_TOKEN = re.compile(
    rf"""
    (?P<space>[\s~&]+ | \\[\ ,;:] | \\q?quad\b | \\\\)
    | (?P<opens>{_SIZE}(?:[(\[⟨] | \\\{{ | \\lbrace\b | \\langle\b))
    | (?P<closes>{_SIZE}(?:[)\]⟩] | \\\}} | \\rbrace\b | \\rangle\b))
    | (?P<left_brace>\{{)
    | (?P<right_brace>\}})
    | (?P<comma>,(?=[\w({{\[$€£¥+\-\u2212.√∞] | \\(?![\s,;:!]|q?quad\b)))  # an item follows without a space
    | (?P<takes_argument>\\[A-Za-z]+ | [\^_])
    | \\.
    """,
    re.VERBOSE | re.DOTALL,
)

# U+2212 minus sign, and its small and full-width forms.
_MINUS = re.compile("[\u2212\ufe63\uff0d]")
# Lookbehind before a sign. After an operand, the sign is a subtraction, a range or a hyphen: x-5, (2)-5, 3–5,
# 50%-5.
NO_OPERAND_BEFORE = r"(?<![\w)\]}%!])"
_DASH = re.compile(NO_OPERAND_BEFORE + r"[\u2010-\u2013](?=[$\d.\\])")

_SCIENTIFIC = re.compile(r"(?<![\w.])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?!\w|\.\d)")
# 2e-1 may also mean 2e - 1, with the number e.
_AMBIGUOUS = re.compile(r"(?!1e)\d+e[+-][1-9]")


def plain_numbers(text: str) -> str:
    """Return the text with its numbers in one spelling, such as -1234.5, to compare numbers as text.

    Thousands separators are removed, minus signs become ASCII hyphens, and numbers with exponents are written
    out. Expressions of the form `2e-1` stay unchanged, because the e may be Euler's number.
    """
    pieces, position = [], 0
    for start, end in thousands_separators(text):
        pieces.append(text[position:start])
        position = end
    text = plain_minus("".join(pieces) + text[position:])
    return _SCIENTIFIC.sub(
        lambda found: found[0] if _AMBIGUOUS.fullmatch(found[0]) else digits(found[0]), text
    )


def plain_minus(text: str) -> str:
    """Return the text with typographic minus signs replaced by the ASCII hyphen."""
    return text if text.isascii() else _DASH.sub("-", _MINUS.sub("-", text))


def with_exponents(text: str) -> str:
    """Return the text with all numbers in scientific notation written out: `2e-1` becomes `0.2`.

    An e between digits never counts as Euler's number here, unlike in `plain_numbers`.
    """
    return _SCIENTIFIC.sub(lambda found: digits(found[0]), text)


def digits(number: str) -> str:
    """Return a number as text without an exponent: 1.5e3 -> 1500, 1e-07 -> 0.0000001."""
    return format(Decimal(number), "f")


def thousands_separators(text: str) -> list[tuple[int, int]]:
    r"""Return the positions (start, end) of all thousands separators in a text, in order.

    The end is exclusive. A thousands separator stands before three digits. It is a comma, `{,}`, `,\!`, `\,`
    or a thin space. A plain comma can also separate the items of a list. Such a comma before three digits
    separates

    - items, if another comma in the same run of text without spaces is not followed by three digits, as in
      `1,234,5`.
    - items, if it stands in brackets that contain no space, as in `(1,234)` and `\{100,200\}`, which
      math-verify reads as lists too. `(10,000)` and `($1,234)` are exceptions, because items do not begin
      with 0 or with a currency sign.
    - thousands everywhere else, as in `1,234`, `x=1,234` or `(1,234, 5,678)`.
    """
    found, commas = [], {}
    for number in _GROUPED.finditer(text):
        is_certain = number["currency"] is not None or ",0" in number["groups"]
        for separator in re.finditer(re.escape(number["separator"]), number["groups"]):
            start, end = (number.start("groups") + offset for offset in separator.span())
            if number["separator"] == ",":
                commas[start] = is_certain
            else:
                found.append((start, end))
    if commas:
        found += [(comma, comma + 1) for comma in _thousands_commas(text, commas)]
    return sorted(found)


@dataclass(slots=True)
class _Level:
    """State of the search for commas in one pair of brackets, or in the text outside all brackets.

    All positions are offsets in the text.
    """

    start: int = 0
    """Position after the opening bracket; 0 outside all brackets."""
    is_list: bool = False
    """True if the brackets may hold a list. False for braces of a LaTeX argument, and outside brackets."""
    num_spaces: int = 0
    """Number of spaces found within the brackets. Spaces right after the opening bracket do not count."""
    last_space_end: int = -1
    """Position after the last space; -1 if there was no space."""
    run: list[int] = field(default_factory=list)
    """Positions of the commas since the last space that may separate thousands."""
    run_has_items: bool = False
    """True if a comma since the last space certainly separates items of a list."""
    undecided: list[int] = field(default_factory=list)
    """Positions of the commas before the last space that may still separate thousands."""

    def end_run(self) -> None:
        if not self.run_has_items:
            self.undecided += self.run
        self.run, self.run_has_items = [], False


def _thousands_commas(text: str, commas: dict[int, bool]) -> list[int]:
    """Return the positions of the commas that separate thousands, by the rules of `thousands_separators`.

    commas: the commas to decide about, {position of a comma before three digits: True if the number with this
        comma cannot be a list of two items such as `(1,234)`}.
    """
    levels, found, argument_start = [_Level()], [], -1

    def close(end: int) -> None:
        level = levels.pop()
        level.end_run()
        num_spaces = level.num_spaces - (level.last_space_end == end)
        found.extend(comma for comma in level.undecided if commas[comma] or num_spaces or not level.is_list)

    for token in _TOKEN.finditer(text):
        level, kind = levels[-1], token.lastgroup
        takes_argument = token.start() == argument_start
        if kind == "space":
            level.end_run()
            if token.start() not in (level.start, level.last_space_end):
                level.num_spaces += 1
            level.last_space_end = token.end()
        elif kind == "comma":
            level.run_has_items |= token.start() not in commas
            level.run += [token.start()] * (token.start() in commas)
        elif kind in ("opens", "left_brace"):
            levels.append(_Level(token.end(), is_list=kind == "opens" or not takes_argument))
        elif kind in ("closes", "right_brace") and len(levels) > 1:
            close(token.start())
        # In `\frac 1{2}`, what follows a command or an earlier argument is an argument.
        if kind in ("takes_argument", "right_brace") or (kind == "space" and takes_argument):
            argument_start = token.end()
    while len(levels) > 1:
        levels[-1].is_list = False  # the bracket is never closed, such as that of a smiley
        close(len(text))
    levels[-1].end_run()
    return found + levels[-1].undecided

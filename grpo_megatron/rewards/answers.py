r"""Extraction of the final answer from a text: after ####, in \boxed{}, the last number, or a choice.

Every finder takes time linear in the length of the text, because a model that repeats itself must not block a
reward worker.
"""

import re
from collections.abc import Callable
from functools import partial

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rewards.numerals import NO_OPERAND_BEFORE, plain_minus, plain_numbers, thousands_separators
from grpo_megatron.rewards.terms import terms_of

# 1234  -5  3.50  .5  $12  1.5e3, where \0 stands for thousands separators. The full stop that ends a sentence
# is not part of the number.
_NUMBER = re.compile(
    rf"(?:{NO_OPERAND_BEFORE}[-\u2212\ufe63\uff0d\u2010-\u2013])?\$?(?:\d[\d\0]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+(?!\w))?"
)

_BOXES = r"(?:boxed|fbox|framebox)"
_BOX_TOKEN = re.compile(
    rf"""
    (?P<box>\\{_BOXES}\s*\{{)
    | \\{_BOXES}\s*(?P<bare>-?\d(?:[\d.,]*\d)?)  # \boxed 7
    | (?P<opens>\{{)
    | (?P<closes>\}})
    | \\(?!\\{_BOXES}).                          # an escaped character; in \\boxed{{7}} it is the next backslash that counts
    """,  # noqa: E501 - a comment within the expression
    re.VERBOSE | re.DOTALL,
)


def hashes(text: str) -> str | None:
    """Return the text after the last `####`, up to the end of the line, or None if there is no `####`.

    A `####` with nothing after it on its line is ignored. GSM8K writes `####` before its answers.
    """
    found = re.findall(r"####[ \t]*(\S[^\n]*)", text)
    return found[-1].strip() if found else None


def boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}` that is not empty, or None if there is none.

    `\fbox{...}`, `\framebox{...}` and `\boxed 7` without braces count too. The result is also None if another
    box begins later in the text but is never closed, because the response was then probably cut off within
    its answer.
    """
    boxes, open_braces = [], []  # an open brace: the position after it for a box, else -1
    for token in _BOX_TOKEN.finditer(text):
        kind = token.lastgroup
        if kind in ("box", "opens"):
            open_braces.append(token.end() if kind == "box" else -1)
        elif kind == "bare":
            boxes.append(token.span("bare"))
        elif kind == "closes" and open_braces and (start := open_braces.pop()) >= 0:
            boxes.append((start, token.start()))
    last_unclosed = max(open_braces, default=-1)
    for start, end in sorted(boxes, reverse=True):
        if start < last_unclosed:
            break
        if contents := text[start:end].strip():
            return contents
    return None


def last_number(text: str) -> str | None:
    """Return the last number in a text, or None if there is none.

    The number is returned as it is written in the text, such as `$1,234`, except that a minus sign becomes an
    ASCII hyphen. In `3-5`, the last number is `5`, because the hyphen is not a minus sign.
    """
    characters = list(text)
    for start, end in thousands_separators(text):
        characters[start:end] = "\0" * (end - start)
    spans = [found.span() for found in _NUMBER.finditer("".join(characters))]
    return plain_minus(text[slice(*spans[-1])]) if spans else None


def whole(text: str) -> str | None:
    """Return the text itself without surrounding white space, or None if the text is blank."""
    return text.strip() or None


FINDERS: dict[str, Callable[[str], str | None]] = {
    "hashes": hashes,
    "boxed": boxed,
    "last_number": last_number,
    "whole": whole,
}


def find_answer(text: str, finders: list[str]) -> str | None:
    """Return the answer that the first successful finder finds in a text, or None if every finder fails.

    finders: names of finders (keys of FINDERS) in the order in which they are tried, such as ["boxed",
        "last_number"]. This is the value of reward.answer_from or reward.response_from.
    """
    for name in finders:
        answer = FINDERS[name](text)
        if answer is not None:
            return answer
    return None


def normalise_answer(text: str) -> str:
    r"""Return a mathematical answer in one spelling, so that answers can be compared as text.

    The result is one line without dollar signs and without a full stop at the end. Numbers have no thousands
    separators: `\$1,234.` becomes `1234`, but the list `(3,4)` stays `(3,4)`.
    """
    text = " ".join(plain_numbers(text).replace("\\$", "").replace("$", "").split())
    return text.rstrip(" \\").removesuffix(".").rstrip(" \\")


_LATEX_SPACE = re.compile(r"\\(?:[,;: ]|q?quad\b)|~")
_SPACE_WITHOUT_MEANING = re.compile(r" (?=\W)|(?<=\W) ")


def answer_key(text: str) -> str:
    r"""Return a mathematical answer in the form in which it is compared with other answers as text.

    Answers that differ only in spaces or in the spelling of numbers have the same form, such as `(3,\, 4)`
    and `(3,4)`, or `(1,234, 5)` and `(1234,5)`.
    """
    text = _LATEX_SPACE.sub(" ", normalise_answer(text).replace("\\!", ""))
    return _SPACE_WITHOUT_MEANING.sub("", " ".join(text.split()))


# Default letters of the choices. The option `letters` of the reward choice overrides them.
LETTERS = "ABCDEFGHIJ"

# Commands and tags that change how a letter looks. Their braces remain and are skipped like all punctuation.
_MARKUP = re.compile(
    r"\\(?:text|math)[a-z]*|\\(?:[mhf]box|emph|boldsymbol|bm|bf|rm|it|sf|tt|left|right|displaystyle|q?quad)(?![A-Za-z])"
    r"|</?(?:b|i|u|em|strong)>"
)
_PUNCTUATION = r"[\W_]"
_NAME = rf"(?:(?i:answer|option|choice)\b(?i:\sis\b)?{_PUNCTUATION}{{0,20}})?"
_INTRODUCTION = r"(?<!/)(?i:answer|(?:correct|right|best)\s(?:option|choice))"


def find_letter(text: str, letters: str, is_answer: bool = False) -> str | None:
    r"""Return the letter with which a text answers a multiple-choice question, or None if there is none.

    text: a response, or only the answer in a response.
    letters: the letters of the choices, such as `ABCD`.
    is_answer: True if `text` is only the answer.

    These places are searched in this order until a letter is found:

    1. the beginning of the text, if `is_answer` is True
    2. the beginning of the content of the last `<answer>` tag
    3. the beginning of the content of the last `\boxed{}`
    4. the place after the last `answer is`, `answer:` or a similar phrase
    5. the last line that contains only the letter of a choice

    Punctuation, font commands and the words "option" and "choice" may come before the letter. The word "I" in
    `the answer I get` is not taken for the choice I.
    """
    pronoun = r"I(?:['\u2019]|\s[a-z])"
    letter = rf"(?!{pronoun})([{re.escape(letters)}])(?![^\W_]|_[^\W_]|[.,]\d)"
    tag = text.rpartition("<answer>")[2].partition("</answer>")[0] if "<answer>" in text else ""
    first = rf"\A{_PUNCTUATION}*{_NAME}{letter}"
    for pattern, where in (
        (first, text if is_answer else ""),
        (first, tag),
        (first, boxed(text) or ""),
        (rf"{_INTRODUCTION}(?:[^\n.]{{0,60}}?(?i:\bis\b|:|=))??{_PUNCTUATION}{{0,20}}{_NAME}{letter}", text),
        (rf"(?m)^(?:[^\w\n]|_)*{letter}(?:[^\w\n]|_)*$", text),
    ):
        found = re.findall(pattern, _MARKUP.sub(" ", where))
        if found:
            return found[-1]
    return None


def text_finder(config: RewardConfig) -> Callable[[str], str | None] | None:
    """Return a function that takes a response and returns its answer as it is written there.

    The function returns None if the response has no answer. It finds the answer in one of two ways:

    - reward.extract: the answer is the last match of this regular expression.
    - reward.response_from: the answer is what the first successful finder in this list finds (see
      find_answer).

    Returns None instead of a function if neither of the two is set. Raises UserError if reward.extract is not
    a valid regular expression.
    """
    if config.extract:
        try:
            pattern = re.compile(config.extract)
        except re.error as error:
            raise UserError(
                f"reward.extract={config.extract!r} is not a valid regular expression: {error}; correct it"
            ) from error
        return partial(_last_match, pattern)
    if not config.response_from:
        return None
    return partial(find_answer, finders=config.response_from)


def answer_finder(config: RewardConfig) -> Callable[[str], str | None] | None:
    """Return a function that takes a response and returns its answer in a form for comparing answers as text.

    The metric maj@n counts two answers as equal if the function returns equal texts for them. The function
    returns None if the response has no answer.

    An answer that reward.extract finds is returned as it is written. An answer that reward.response_from
    finds is converted if the run has one of two rewards: with `math` to its `answer_key`, in which equal
    numbers have one spelling; with `choice` to the chosen letter, or None if there is no letter.

    Returns None instead of a function if neither reward.extract nor reward.response_from is set. Raises
    UserError if reward.extract is not a valid regular expression.
    """
    find_text = text_finder(config)
    if find_text is None or config.extract:
        return find_text
    options = {term.function: term.args for term in terms_of(config)}
    compared: Callable[[str], str | None] = str
    if "math" in options:
        compared = answer_key
    elif "choice" in options:
        compared = partial(find_letter, letters=options["choice"].get("letters", LETTERS), is_answer=True)

    def find(response: str) -> str | None:
        found = find_text(response)
        return None if found is None else compared(found)

    return find


def _last_match(pattern: re.Pattern, text: str) -> str | None:
    """Return the last match of a pattern in a text, or None if there is no match.

    If the pattern has groups, the result is group 1 of the match, or None if this group matched nothing.
    White space around the result is removed.
    """
    matches = list(pattern.finditer(text))
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    return None if found is None else found.strip()

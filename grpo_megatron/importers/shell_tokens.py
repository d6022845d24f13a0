"""Tokeniser of bash scripts: it splits the text into words, operators and here-documents.

Words are kept as they are written. Quotes, continued lines, comments and arrays are recognised.
"""

import re
from dataclasses import dataclass

_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\Z")
_OPERATOR = re.compile(r"\d*(?:&>>?|<<<|<<-?|>>|>&|<&|<>|>\||<|>)|;;&|;;|;&|&&|\|\||\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"\d*(?:&>>?|<<<|<<-?|>>|>&|<&|<>|>\||<|>)\Z")
_CLOSERS = {"{": "}", "(": ")"}


class ShellSyntaxError(Exception):
    """The text is not a bash script. The message names the line."""


@dataclass(frozen=True)
class Token:
    """One token. kind: "word", "operator", or "script" (the text of a here-document)."""

    kind: str
    text: str
    line: int


def is_redirection(token: Token) -> bool:
    return token.kind == "operator" and _REDIRECTION.match(token.text) is not None


def end_of_word(text: str, start: int) -> int:
    """Return the position after the word that begins at `start`.

    Raises ShellSyntaxError if a quote or bracket is never closed.
    """
    at = start
    while at < len(text):
        char = text[at]
        if char == "(" and _ARRAY.fullmatch(text[start:at]):
            at = end_of_bracket(text, at)
        elif char in " \t\r\n;&|()<>":
            break
        else:
            at = _end_of_piece(text, at)
    return at


def _end_of_piece(text: str, at: int) -> int:
    """Return the position after one character, or one quoted or substituted part, of a word."""
    if text[at] == "\\":
        return at + 2
    if text[at] == "'":
        return _closing(text, at, text.find("'", at + 1))
    if text.startswith("$'", at):
        return end_of_ansi(text, at)
    if text[at] in '"`':
        return end_of_quote(text, at)
    if text[at] == "$" and text[at + 1 : at + 2] in _CLOSERS:
        return end_of_bracket(text, at + 1)
    return at + 1


def end_of_quote(text: str, start: int) -> int:
    """Return the position after the double quote or backtick that closes the one at `start`."""
    at = start + 1
    while at < len(text) and text[at] != text[start]:
        if text[at] == "\\":
            at += 2
        elif text[at] == "$" and text[at + 1 : at + 2] in _CLOSERS:
            at = end_of_bracket(text, at + 1)
        else:
            at += 1
    return _closing(text, start, at if at < len(text) else -1)


def end_of_ansi(text: str, start: int) -> int:
    """Return the position after the quote that closes $'...'."""
    match = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL).match(text, start)
    return _closing(text, start, match.end() - 1 if match else -1)


def end_of_bracket(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`.

    Quoted text and nested brackets between the two are skipped.
    """
    opener, closer = text[start], _CLOSERS[text[start]]
    at = start + 1
    while at < len(text) and text[at] != closer:
        if text[at] == opener and opener == "(":
            at = end_of_bracket(text, at)
        elif text[at] == "#" and opener == "(" and text[at - 1] in " \t\n":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        else:
            at = _end_of_piece(text, at)
    return _closing(text, start, at if at < len(text) else -1)


def _closing(text: str, start: int, found: int) -> int:
    if found < 0:
        raise ShellSyntaxError(f"line {text.count(chr(10), 0, start) + 1}: {text[start]} is never closed")
    return found + 1


def tokens(text: str) -> list[Token]:
    """Return the tokens of a script. A newline is an operator.

    The text of a here-document replaces the delimiter after `<<`. Raises ShellSyntaxError.
    """
    found: list[Token] = []
    pending: list[int] = []  # here-documents whose text comes after this line
    at = 0
    line = 1
    while at < len(text):
        start = at
        if text[at] in " \t\r":
            at += 1
        elif text.startswith("\\\n", at) or text.startswith("\\\r\n", at):
            at = text.index("\n", at) + 1
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif text.startswith("((", at) and _starts_command(found):
            at = end_of_bracket(text, at)
            found.append(Token("word", text[start:at], line))
        elif match := _OPERATOR.match(text, at):
            at = match.end()
            found.append(Token("operator", match[0], line))
            if match[0].lstrip("0123456789") in ("<<", "<<-"):
                pending.append(len(found))
            elif match[0] == "\n":
                at = _read_documents(text, at, found, pending)
        else:
            at = end_of_word(text, at)
            found.append(Token("word", text[start:at], line))
        line += text.count("\n", start, at)
    return found


def _starts_command(found: list[Token]) -> bool:
    return (
        not found
        or found[-1].text in ("\n", ";", "&&", "||", "|", "&", "(")
        or found[-1].text in ("if", "then", "else", "elif", "while", "until", "do", "for", "!")
    )


def _read_documents(text: str, at: int, found: list[Token], pending: list[int]) -> int:
    """Read the here-documents that begin at `at`, and put each into `found` in place of its delimiter.

    pending: indices of the delimiters in `found`. Returns the position after the here-documents.
    """
    for place in pending:
        if place >= len(found) or found[place].kind != "word":
            raise ShellSyntaxError(f"line {found[place - 1].line}: << without a word")
        delimiter = re.sub(r"['\"\\]", "", found[place].text)
        quoted = delimiter != found[place].text
        lines = []
        while True:
            if at >= len(text):
                raise ShellSyntaxError(f"line {found[place].line}: the here-document {delimiter} never ends")
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            one, at = text[at:end].rstrip("\r"), end + 1
            if found[place - 1].text.endswith("-"):
                one = one.lstrip("\t")
            if one == delimiter:
                break
            lines.append(one)
        body = "\n".join(lines)
        # The text of a quoted document is taken as it is; a literal $ in it must then not be expanded.
        found[place] = Token("script", body.replace("$", "\\$") if quoted else body, found[place].line)
    pending.clear()
    return min(at, len(text))

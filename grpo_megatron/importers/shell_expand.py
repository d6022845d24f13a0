"""Expansion of a bash script's words with the values that the script itself sets.

A value that the script does not determine ($HOME, $(nproc), a variable set in an undecided branch) becomes a
placeholder: an opaque piece of text that no operation looks into. `Variables.shown` turns it back into
readable text.
"""

import fnmatch
import re
from dataclasses import dataclass

from grpo_megatron.importers.shell_arithmetic import evaluate
from grpo_megatron.importers.shell_tokens import end_of_ansi, end_of_bracket, end_of_quote, tokens

PLACEHOLDER = re.compile("\x02(\\d+)\x03")
_PARAMETER = re.compile(r"(!?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)\Z", re.DOTALL)
_PLAIN = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}

# Spaces between quotes inside an unquoted ${A:-"x y"}, which do not split it.
_KEEP = str.maketrans(" \t\n", "\x04\x05\x06")
_KEPT = str.maketrans("\x04\x05\x06", " \t\n")

Value = str | list[str]


@dataclass(frozen=True)
class Perhaps:
    """A word that a command gets only if `condition` holds, which is not known here."""

    word: str
    condition: str


class Variables:
    """The variables set so far, and the arguments of the function that is being followed.

    Outside a function `arguments` is None: the script's own arguments are unknown, unless `set --` sets them.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self.values: dict[str, Value] = dict(environment or {})
        self.arguments: list[str] | None = None
        self._held: list[str] = []
        self._perhaps: dict[str, Perhaps] = {}

    def hold(self, text: str) -> str:
        """Return a placeholder for an unknown value. text: what `shown` replaces it by."""
        self._held.append(self.shown(text))
        return f"\x02{len(self._held) - 1}\x03"

    def hold_perhaps(self, word: str, condition: str) -> str:
        """Return a placeholder for a word that a command gets only if `condition` holds.

        A word that already is such a placeholder is returned unchanged.
        """
        if word in self._perhaps:
            return word
        perhaps = Perhaps(word, condition)
        known = next((placeholder for placeholder, one in self._perhaps.items() if one == perhaps), None)
        placeholder = known or self.hold(f"$<{word}>")
        self._perhaps[placeholder] = perhaps
        return placeholder

    def perhaps(self, word: str) -> Perhaps | None:
        """Return the word and condition behind a placeholder of `hold_perhaps`; None for any other word."""
        return self._perhaps.get(word)

    def shown(self, text: str) -> str:
        return PLACEHOLDER.sub(lambda match: self._held[int(match[1])], text)

    def get(self, name: str) -> Value | None:
        """Return the value of a variable, or of an argument such as "1"; None if it is not set.

        The script's own arguments are unknown, so they count as not set.
        """
        if name.isdigit():
            within = self.arguments is not None and 0 < int(name) <= len(self.arguments)
            return self.arguments[int(name) - 1] if within else None
        if name in ("@", "*"):
            return self.arguments
        return self.values.get(name)

    def number(self, expression: str) -> int | None:
        return evaluate(self.string(expression, quoted=True), self._first)

    def _first(self, name: str) -> str | None:
        value = self.get(name)
        return (value[0] if value else "") if isinstance(value, list) else value

    def fields(self, raw: str) -> list[str]:
        """Expand one word, as written, to the words that it becomes: none, one, or several."""
        return _Word(self, raw).fields()

    def string(self, raw: str, quoted: bool = False, keep: bool = False) -> str:
        """Expand one word without splitting it, as in an assignment.

        quoted: treat single quotes as ordinary characters, as inside double quotes.
        keep: mark the spaces that stood between quotes, so that the caller does not split the result there.
        """
        return _Word(self, raw, quoted, keep).string()

    def array(self, raw: str) -> Value:
        """Expand the ( ... ) of an array assignment. Return a placeholder if it uses [index]=."""
        words = [token.text for token in tokens(raw[1:-1]) if token.kind == "word"]
        if any(re.match(r"\[[^\]]*\]\+?=", word) for word in words):
            return self.hold("$<array>")
        return [part for word in words for part in self.fields(word)]


class _Word:
    """The expansion of one word. quoted: expand it as inside double quotes."""

    def __init__(self, variables: Variables, raw: str, quoted: bool = False, keep: bool = False):
        self._variables = variables
        self._done: list[str] = []
        self._open: str | None = None  # the field that is being put together
        self._joins = False  # a string is wanted, not fields
        self._raw, self._quoted, self._keep = raw, quoted, keep

    def fields(self) -> list[str]:
        self._read(self._raw, self._quoted)
        done = self._done + ([] if self._open is None else [self._open])
        return done if self._keep else [field.translate(_KEPT) for field in done]

    def string(self) -> str:
        self._joins = True
        return "".join(self.fields())

    def _add(self, text: str, quoted: bool = False) -> None:
        self._open = (self._open or "") + (text.translate(_KEEP) if quoted and self._keep else text)

    def _end_field(self) -> None:
        if self._open is not None:
            self._done.append(self._open)
            self._open = None

    def _read(self, text: str, quoted: bool) -> None:
        at = 0
        while at < len(text):
            char = text[at]
            if char == "\\":
                at = self._escape(text, at, quoted)
            elif char == "'" and not quoted:
                end = text.index("'", at + 1)
                self._add(text[at + 1 : end], True)
                at = end + 1
            elif text.startswith("$'", at) and not quoted:
                end = end_of_ansi(text, at)
                self._add(
                    re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[0]), text[at + 2 : end - 1])
                )
                at = end
            elif char == '"':
                # Within a default such as "${A:-"x"}", the inner quotes only disappear.
                end = end_of_quote(text, at)
                self._add("")
                self._read(text[at + 1 : end - 1], True)
                at = end
            elif char == "`":
                end = end_of_quote(text, at)
                self._add(self._variables.hold(f"$({text[at + 1 : end - 1]})"))
                at = end
            elif char == "$":
                at = self._dollar(text, at, quoted)
            else:
                self._add(char, quoted)
                at += 1

    def _escape(self, text: str, at: int, quoted: bool) -> int:
        after = text[at + 1 : at + 2]
        if after == "\n":
            pass
        elif quoted and after not in ("$", "`", '"', "\\"):
            self._add("\\" + after)
        else:
            self._add(after)
        return at + 2

    def _dollar(self, text: str, at: int, quoted: bool) -> int:
        hold = self._variables.hold
        if text.startswith("$((", at) and (end := end_of_bracket(text, at + 1)) and text[end - 2] == ")":
            inner = text[at + 3 : end - 2]
            number = self._variables.number(inner)
            self._add(hold(f"$(({''.join(inner.split())}))") if number is None else str(number))
            return end
        if text.startswith("$(", at):
            end = end_of_bracket(text, at + 1)
            self._add(hold(" ".join(text[at:end].split())))
            return end
        if text.startswith("${", at):
            end = end_of_bracket(text, at + 1)
            self._substitute(text[at + 2 : end - 1], quoted)
            return end
        match = _PLAIN.match(text, at + 1)
        if match is None:
            self._add("$")
            return at + 1
        self._substitute(match[0], quoted)
        return match.end()

    def _substitute(self, body: str, quoted: bool) -> None:
        value = parameter(self._variables, body, quoted)
        if isinstance(value, list):
            if self._joins or (quoted and (body == "*" or "[*]" in body)):
                self._add(" ".join(value))
                return
            for number, one in enumerate(value):
                if number:
                    self._end_field()
                self._put(one, quoted)
        else:
            self._put(value, quoted)

    def _put(self, value: str, quoted: bool) -> None:
        if quoted or self._joins:
            self._add(value, quoted)
            return
        # An unquoted variable is split at its spaces, and is no word at all if it is empty.
        for number, part in enumerate(re.split(r"[ \t\n]+", value)):
            if number:
                self._end_field()
            if part:
                self._add(part)


def parameter(variables: Variables, body: str, quoted: bool) -> Value:
    """Return the value of ${body}, or a placeholder if the script does not determine it."""
    unknown = variables.hold(f"${body}" if _PLAIN.fullmatch(body) else f"$<{body}>")
    if body.startswith("#") and len(body) > 1:
        value = (
            _selected(variables, *_PARAMETER.match(body[1:]).groups()[:3])
            if _PARAMETER.match(body[1:])
            else None
        )
        return (
            unknown
            if value is None or (isinstance(value, str) and PLACEHOLDER.search(value))
            else str(len(value))
        )
    match = _PARAMETER.match(body)
    if match is None:
        return unknown
    indirect, name, index, operation = match.groups()
    value = _selected(variables, indirect, name, index)
    if not operation:
        return unknown if value is None else value
    plain = variables.hold(f"${name}")
    if alternative := re.match(r"(:?)([-=?+])(.*)\Z", operation, re.DOTALL):
        return _alternative(variables, name, value, alternative, plain, quoted)
    if value is None:
        return unknown
    changed = _changed(variables, value, operation)
    return unknown if changed is None else changed


def home_written_out(word: str) -> str:
    """Replace a ~ at the beginning of an unquoted word by $HOME."""
    return re.sub(r"\A~(?=/|\Z)", "$HOME", word)


def _selected(variables: Variables, indirect: str, name: str, index: str | None) -> Value | None:
    value = variables.get(name)
    if indirect:
        value = variables.get(value) if isinstance(value, str) else None
    if index in ("@", "*"):
        return [value] if isinstance(value, str) else value
    if not isinstance(value, list) or name in ("@", "*"):
        return value
    number = variables.number(index) if index else 0
    if number is None or not -len(value) <= number < len(value):
        return "" if number is not None else None
    return value[number]


def _alternative(
    variables: Variables, name: str, value: Value | None, match: re.Match, plain: str, quoted: bool
) -> Value:
    """Return the value of ${A:-word}, ${A:=word}, ${A:?word} or ${A:+word}, with or without the colon.

    A variable that the script does not set counts as unset, although the user's environment could set it.
    """
    colon, kind, word = match.groups()
    word = word if quoted else home_written_out(word)
    is_set = value is not None and not (colon and not value)
    if kind == "+":
        return variables.string(word, quoted, keep=not quoted) if is_set else ""
    if is_set:
        return value
    if kind == "?":
        return plain
    if kind == "=":
        variables.values[name] = variables.string(word, quoted)
        return variables.values[name]
    return variables.string(word, quoted, keep=not quoted)


def _changed(variables: Variables, value: Value, operation: str) -> Value | None:
    """Return the value shortened, replaced or recased; None if the result depends on something unknown."""
    if isinstance(value, list):
        if section := re.fullmatch(r":\s*(\d+)(?::\s*(\d+))?", operation):
            start = int(section[1])
            return value[start : start + int(section[2])] if section[2] else value[start:]
        parts = [_changed(variables, one, operation) for one in value]
        return None if None in parts else parts
    if shortened := re.match(r"(##?|%%?)(.*)\Z", operation, re.DOTALL):
        return _shortened(value, shortened[1], variables.string(shortened[2]))
    if PLACEHOLDER.search(value):
        return None
    if replaced := re.match(r"/([/#%]?)((?:\\.|[^/])*)(?:/(.*))?\Z", operation, re.DOTALL):
        kind, pattern, new = replaced.groups()
        expression = _regular(variables.string(pattern.replace("\\/", "/")))
        expression = {"#": rf"\A(?:{expression})", "%": rf"(?:{expression})\Z"}.get(kind, expression)
        text = variables.string(new or "")
        return (
            re.sub(expression, lambda match: text, value, count=0 if kind == "/" else 1) if pattern else value
        )
    if cut := re.match(r":([^:]*)(?::(.*))?\Z", operation, re.DOTALL):
        start, length = variables.number(cut[1]), variables.number(cut[2]) if cut[2] else None
        if start is None or (cut[2] and length is None):
            return None
        rest = value[start:] if start >= 0 or -start <= len(value) else ""
        return rest if length is None else rest[:length]
    recased = {"^^": str.upper, ",,": str.lower, "^": lambda text: text[:1].upper() + text[1:]}
    recased[","] = lambda text: text[:1].lower() + text[1:]
    return recased[operation](value) if operation in recased else None


def _shortened(value: str, operator: str, pattern: str) -> str | None:
    """Return ${A#p}, ${A##p}, ${A%p} or ${A%%p}; None if the result depends on something unknown."""
    ends = range(len(value) + 1)
    if operator in ("##", "%"):
        ends = reversed(ends)
    matches = re.compile(_regular(pattern) + r"\Z", re.DOTALL)
    for end in ends:
        removed, rest = (value[:end], value[end:]) if operator[0] == "#" else (value[end:], value[:end])
        if not matches.match(removed):
            continue
        # Exact where a placeholder cannot have decided how much goes.
        decided = rest if len(operator) == 2 else removed
        return None if PLACEHOLDER.search(decided) else rest
    return None if PLACEHOLDER.search(value) else value


def _regular(pattern: str) -> str:
    """Return a shell pattern as a regular expression."""
    return "(?s:" + fnmatch.translate(pattern)[4:-3] + ")"

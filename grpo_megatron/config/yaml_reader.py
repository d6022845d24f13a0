"""YAML reader for configuration files and arguments. It returns plain values and the line of each key.

It refuses some legal YAML that could silently change a run, such as a key that is set twice. It also limits
size and depth, because nested aliases can stand for billions of values in a few lines.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_megatron.errors import UserError, shortened

MAX_CHARACTERS = 64 * 2**10
MAX_VALUES = 2_000  # an alias counts each time it is used
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 loader that keeps some values as text which YAML 1.1 would convert.

    These are dates, 1:30 (90 seconds), 007 (octal) and `=`. It reads everything else as yaml.safe_dump
    expects. 1e-6 is text in YAML 1.1 too, and becomes a number if the schema asks for one. The number and
    depth of the values are limited while they are read.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.depth = self.count = 0

    def compose_node(self, parent, index):
        self.depth, self.count = self.depth + 1, self.count + 1
        _limit(self.count, self.depth, self.peek_event().start_mark.line + 1)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in resolvers if tag.removeprefix(_TAG) in ("null", "bool", "merge")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", _INTEGER, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


class _Refused(Exception):
    """Error in a YAML text. `read_yaml` turns it into a UserError that names the source.

    line: line of the error, from 1.
    """

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


def _limit(values: int, depth: int, line: int, characters: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise _Refused(line, f"nested more than {MAX_DEPTH} deep")
    if values > MAX_VALUES:
        raise _Refused(line, f"more than {MAX_VALUES} values, aliases counted as often as they are used")
    if characters > MAX_CHARACTERS:
        raise _Refused(
            line, f"more than {MAX_CHARACTERS} characters, aliases counted as often as they are used"
        )


@dataclass
class YamlText:
    """The value of a YAML text, and the lines of its keys for error messages.

    value: plain value; None for an empty text.
    lines: {dotted key: line of the key, from 1}; empty if the value is no mapping.
    """

    value: Any
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(text: str, where: str, key: str = "") -> YamlText:
    """Read a YAML text into plain values: None, bool, int, float, str, list, and dict with str keys.

    where: the file or argument, for messages.
    key: dotted key that the text is the value of, for messages about an argument. Empty for a file, in which
        messages name the line.

    Raises UserError for invalid YAML, a key that is set twice, a tag, an integer beyond 64 bits, or
    characters that cannot be written. Raises UserError also for a text that is too large or too deep, or an
    alias that contains itself.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{where}: more than {MAX_CHARACTERS} characters, this is no configuration")
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return YamlText(None)
        _Inspection(loader).visit(node, key)
        value = loader.construct_document(node)
        _note_lines(node, "", lines)
    except _Refused as refused:
        raise UserError(f"{where}{_place(refused.line, key)}: {refused}") from refused
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        place = _place(mark.line + 1, key) if mark else ""
        raise UserError(f"{where}{place}: not valid YAML: {_problem(error)}") from error
    return YamlText(value, lines)


def _place(line: int, key: str) -> str:
    """Return `:line` for a message about a file; empty for an argument, which has only one line."""
    return "" if key else f":{line}"


def _about(key: str, problem: str) -> str:
    return f"{shortened(key)}: {problem}" if key else problem


def _problem(error: yaml.YAMLError) -> str:
    """Return the YAML parser's message on one line, without its excerpt of the text."""
    parts = [getattr(error, "context", None), getattr(error, "problem", None)]
    said = ", ".join(part for part in parts if part) or str(error)
    return shortened(" ".join(said.split()), 200)


class _Inspection:
    """Check of parsed YAML for legal content that no configuration can have.

    Examples are tags, keys that are set twice, and aliases that contain themselves. Each node is visited
    once, however often aliases refer to it, so that the check is quick.
    """

    def __init__(self, loader: _Loader):
        self._loader = loader
        self._seen: dict[int, tuple[int, int, int] | None] = {}

    def visit(self, node: yaml.Node, key: str) -> tuple[int, int, int]:
        """Check a node and all nodes within it, and return their size. Raises _Refused.

        Returns (values, depth, characters). An alias counts each time it is used.
        - values: number of values, including the node itself.
        - depth: levels of nesting, 1 for a single value.
        - characters: total length of the scalar values.

        key: dotted key of this value.
        """
        line = node.start_mark.line + 1
        if id(node) in self._seen:
            found = self._seen[id(node)]
            if found is None:
                raise _Refused(line, _about(key, "an alias within what it stands for has no end"))
            return found
        self._seen[id(node)] = None
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node, line, key)
            parts = []
        elif isinstance(node, yaml.SequenceNode):
            self._check_tag(node, f"{_TAG}seq", line)
            parts = [self.visit(item, key) for item in node.value]
        else:
            self._check_tag(node, f"{_TAG}map", line)
            self._name_keys(node, key)
            parts = [self.visit(value, f"{key}.{name.value}".lstrip(".")) for name, value in node.value]
        values, depth = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        own = len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        found = values, depth, own + sum(part[2] for part in parts)
        _limit(values, depth, line, found[2])
        self._seen[id(node)] = found
        return found

    def _check_tag(self, node: yaml.Node, expected: str, line: int) -> None:
        if node.tag != expected:
            raise _Refused(
                line,
                f"the tag {shortened(node.tag.replace(_TAG, '!!'))} means nothing here; write the value "
                "alone",
            )

    def _check_scalar(self, node: yaml.ScalarNode, line: int, key: str) -> None:
        if node.tag != f"{_TAG}str":
            plain = node.style is None
            self._check_tag(node, self._loader.resolve(yaml.ScalarNode, node.value, (plain, not plain)), line)
        if node.tag == f"{_TAG}int":
            digits = node.value.replace("_", "")
            try:
                fits = len(digits) <= 80 and abs(int(digits, 0)) < 2**63
            except ValueError:  # 0x_
                fits = False
            if not fits:
                raise _Refused(line, _about(key, f"{shortened(node.value)} is not an integer of 64 bits"))
        if _UNWRITABLE.search(node.value):
            raise _Refused(
                line,
                _about(
                    key, f"{shortened(node.value)!r} holds NUL or half of a surrogate pair, which no text has"
                ),
            )

    def _name_keys(self, node: yaml.MappingNode, prefix: str) -> None:
        """Make every key of a mapping a text, even if YAML would read it as another type.

        Raises _Refused for a key that occurs twice, because YAML parsers would silently keep the last one.

        prefix: dotted key of the mapping.
        """
        lines: dict[str, int] = {}
        for name, _ in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise _Refused(
                    line, f"a key of {shortened(prefix) or 'this file'} is a {name.id}, not a word"
                )
            if name.tag != f"{_TAG}merge":
                name.tag = f"{_TAG}str"
            self._check_scalar(name, line, prefix)
            if name.value in lines:
                key = shortened(f"{prefix}.{name.value}".lstrip("."))
                raise _Refused(line, f"{key} is already set in line {lines[name.value]}")
            lines[name.value] = line


def _note_lines(node: yaml.Node, prefix: str, lines: dict[str, int]) -> None:
    """Add {dotted key: line, from 1} of each key within a node to `lines`.

    It runs after the loader has constructed the value. By then the keys merged by << come before a mapping's
    own keys, so that the own keys' lines override theirs.
    """
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            lines[f"{prefix}{name.value}"] = name.start_mark.line + 1
            _note_lines(value, f"{prefix}{name.value}.", lines)

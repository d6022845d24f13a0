"""YAML reader for configuration files and arguments. It returns plain values and the line of each key."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver

from grpo_megatron.errors import UserError

_TAG = "tag:yaml.org,2002:"


# (type, pattern, possible first characters) of unquoted words. Dates, 1:30, 007 and 1e-6 stay text; on, off,
# yes and no are booleans.
_TYPES = (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no|on|off)$", "tTfFyYnNoO"),
    ("int", r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$", "-+0123456789"),
    (
        "float",
        r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("merge", r"<<$", "<"),
)


class _Resolver(VersionedResolver):
    """YAML resolver that decides which type an unquoted word has, such as bool for `off`.

    It replaces the resolver of ruamel.yaml, which follows YAML 1.2, where `off` is text.
    """

    versioned_resolver: ClassVar = {
        first: [(f"{_TAG}{name}", re.compile(pattern)) for name, pattern, firsts in _TYPES if first in firsts]
        for first in {first for _, _, firsts in _TYPES for first in firsts}
    }


@dataclass
class YamlText:
    """Value of a YAML text, with the line of each key for error messages.

    value: plain value; None for an empty text.
    lines: {dotted key: line of the key, from 1}; empty if the value is not a mapping.
    """

    value: Any
    lines: dict[str, int] = field(default_factory=dict)


def read_yaml(text: str, source: str) -> YamlText:
    """Read a YAML text into plain values: None, bool, int, float, str, list, and dict with str keys.

    Unquoted on, off, yes and no are read as bool. Unquoted dates, 1:30, 007 and 1e-6 are read as str.

    source: name of the file or argument, for messages.

    Raises UserError for invalid YAML, a key that is set twice, and an unknown tag.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _Resolver
    try:
        node = yaml.compose(text)
        if node is None:
            return YamlText(None)
        lines = dict(_key_lines(node))
        return YamlText(yaml.constructor.construct_document(node), lines)
    except (YAMLError, ValueError, KeyError) as error:  # ValueError and KeyError: such as 0x_ and !!bool x
        raise UserError(f"{source}: not valid YAML: {_problem(error)}") from error


def _key_lines(node: Node, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield (dotted key, line from 1) of each key within a YAML node, and mark every key in the node as text.

    The mark makes a key such as 1 or null a str. Keys that a mapping merges from another mapping (with `<<`)
    come first, because the mapping's own keys override them.

    prefix: dotted key of the node, with a dot at its end; empty for the whole text.

    Raises MarkedYAMLError if a key is not a single word.
    """
    if not isinstance(node, MappingNode):
        return
    for name, value in sorted(node.value, key=lambda pair: pair[0].tag != f"{_TAG}merge"):
        if name.tag == f"{_TAG}merge":
            for merged in value.value if isinstance(value, SequenceNode) else [value]:
                yield from _key_lines(merged, prefix)
            continue
        if not isinstance(name, ScalarNode):
            raise MarkedYAMLError(problem="a key must be a single word", problem_mark=name.start_mark)
        name.tag = f"{_TAG}str"  # a key such as 1 or null is read as it is written
        yield f"{prefix}{name.value}", name.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{name.value}.")


def _problem(error: Exception) -> str:
    """Return the message of a YAML error as one line, with the line number if it is known.

    The excerpt of the YAML text, which the parser adds to its message, is left out.
    """
    if not isinstance(error, MarkedYAMLError):
        return str(error).splitlines()[0]
    problem = error.problem
    if isinstance(error, DuplicateKeyError):
        problem = problem.partition(" with value")[0]  # the values can be long
    mark = error.problem_mark or error.context_mark
    return f"{', '.join(filter(None, (error.context, problem)))} (line {mark.line + 1})"

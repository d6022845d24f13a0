"""What a key interacts with, read off the rules and the help texts, so that it cannot become stale.

A rule says what is wrong in one sentence that names the keys. Those sentences are in the source of the
modules below; keys that one sentence names belong together. Limits and choices are found by asking the
rules about a value that cannot be right.
"""

import ast
import dataclasses
import re
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from grpo_megatron.config.load import known_keys
from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.rules import violations

_PACKAGE = Path(__file__).parents[1]
_IMPOSSIBLE = "no_such_choice"


def rule_modules() -> list[Path]:
    """The source files whose sentences say what is not legal."""
    return [
        *sorted(_PACKAGE.glob("preflight/*rules*.py")),
        _PACKAGE / "model/parallel_sizes.py",
        _PACKAGE / "preflight/model.py",
    ]


@cache
def rule_sentences() -> tuple[str, ...]:
    """The sentences that name at least one key; what is filled in at run time is `…`."""
    found = []
    for path in rule_modules():
        for text in _texts(ast.parse(path.read_text(encoding="utf-8"))):
            if " " in text and named_keys(text):
                found.append(" ".join(text.split()))
    return tuple(dict.fromkeys(found))


def _texts(node: ast.AST) -> list[str]:
    """Every string of a syntax tree but docstrings; an f-string is one string."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []
    if isinstance(node, ast.BinOp) and isinstance(node.left, (ast.Constant, ast.JoinedStr)):
        return ["".join(_texts(node.left) + _texts(node.right))]
    return [text for child in ast.iter_child_nodes(node) for text in _texts(child)]


def dotted_names(text: str) -> list[str]:
    """Everything in a text that is written like a key: a section's name, a dot, a name."""
    sections = "|".join(field.name for field in dataclasses.fields(Config))
    return re.findall(rf"(?<![\w./])(?:{sections})(?:\.[a-z]\w*)+", text)


@cache
def named_keys(text: str, section: str | None = None) -> tuple[str, ...]:
    """The keys a text names, in its order: with dots, or by the last name alone where the section is clear.

    section: of the key the text is about; else that of the dotted keys in it.
    """
    known = known_keys()
    dotted = [name for name in dotted_names(text) if name in known]
    sections = {name.rpartition(".")[0] for name in dotted} if section is None else {section}
    siblings = [
        f"{place}.{word}"
        for word in re.findall(r"(?<![\w.])[a-z]+(?:_[a-z0-9]+)+(?![\w.])", text)
        for place in sorted(sections)
    ]
    return tuple(dict.fromkeys([*dotted, *(name for name in siblings if name in known)]))


def rules_about(key: str) -> list[str]:
    return [sentence for sentence in rule_sentences() if key in named_keys(sentence)]


def interacting_keys(key: str) -> list[str]:
    """The keys that a rule or a help text names together with this one."""
    known = known_keys()
    found = [name for sentence in rules_about(key) for name in named_keys(sentence)]
    found += named_keys(known[key].metadata["help"], key.rpartition(".")[0])
    for other, field in known.items():
        if key in named_keys(field.metadata["help"], other.rpartition(".")[0]):
            found.append(other)
    return [name for name in dict.fromkeys(found) if name != key and not dataclasses.is_dataclass(known[name].type)]


def limits(key: str) -> list[str]:
    """What the rules say about a number that is too small, such as `must be greater than 0`."""
    kind = known_keys()[key].type
    if not {int, float} & {kind, *(get_args(kind) if isinstance(kind, UnionType) else ())}:
        return []
    said = []
    for value in (0, -1):
        pattern = re.compile(rf"{re.escape(key)} (must .*?)(?:, is .*)?$")
        said += [match[1] for rule in violations(_with(key, value)) if (match := pattern.match(rule))]
    return list(dict.fromkeys(said))


def choices(key: str) -> list[str]:
    """The values a key can have, where they are a fixed set."""
    kind = known_keys()[key].type
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind.__members__)
    if kind is str or kind == str | None:
        wrong: Any = _IMPOSSIBLE
    elif kind == list[str]:
        wrong = [_IMPOSSIBLE]
    else:
        return []
    pattern = re.compile(rf"{re.escape(key)}={_IMPOSSIBLE} .*?choose one of (.*)")
    for rule in violations(_with(key, wrong)):
        if match := pattern.match(rule):
            return match[1].split(", ")
    return []


def _with(key: str, value: Any) -> Config:
    """The default configuration with one value replaced, whatever its type."""
    config = Config()
    config.model.path, config.data.train = "model", "data.jsonl"
    *sections, last = key.split(".")
    place: Any = config
    for name in sections:
        place = getattr(place, name)
    setattr(place, last, value)
    return config

"""Generator of docs/config.md, the reference of all configuration keys."""

import re
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

from omegaconf import MISSING

from grpo_megatron.config.keys import (
    default_of,
    is_internal,
    is_section,
    known_keys,
    unit_of,
    value_text,
)
from grpo_megatron.config.options import FolderName, PathText, Pattern, Threads
from grpo_megatron.preflight.keys import choices

COMMAND = "grpo-megatron config docs > docs/config.md"

_HEAD = f"""# Configuration keys

[All pages](index.md)

Generated from grpo_megatron/config/schema.py by `{COMMAND}`; not edited by hand.

A key is set in a YAML file (`rollout: {{n: 8}}`) or as an argument (`rollout.n=8`), which wins.
`grpo-megatron config explain KEY` adds what a key interacts with and the rules about it.

Each key is shown with its default. Parentheses give its unit, limits and type, unless the default or the
description shows them. Numbers must be finite, and above 0 unless the entry says otherwise. They must be
integers if their default has no decimal point. A path cannot use `~` for the home folder.
`module:attribute` is [your own code](plugins.md).
"""

_TYPES = {int: "integer", float: "number", bool: "boolean", dict: "mapping"}

# Types of text, by the condition in their metadata.
_TEXTS = {
    get_args(kind)[-1]: name
    for kind, name in (
        (FolderName, "folder name"),
        (PathText, "path"),
        (Pattern, "regular expression"),
        (Threads, "`auto`, or 1 to 1024"),
    )
}

# Signs of pydantic's bounds.
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def markdown() -> str:
    """Return the text of docs/config.md: a list of all configuration keys except internal ones.

    The text has no newline at its end.
    """
    known = {key: field for key, field in known_keys().items() if not is_internal(field)}
    parts = [_HEAD]
    for section, field in known.items():
        if is_section(field):
            parts.append(f"## {section}\n\n{field.description}\n")
            parts += [
                _entry(key)
                for key in known
                if key.rpartition(".")[0] == section and not is_section(known[key])
            ]
            parts.append("")
    return "\n".join(parts).rstrip("\n")


def _entry(key: str) -> str:
    """Return the line of a key, such as ``- `rollout.temperature=1.0` (>= 0): Sampling temperature.``"""
    field = known_keys()[key]
    default, unit = default_of(field), unit_of(field)
    is_set = default != MISSING
    shown = f"{key}={value_text(default)}" if is_set else key
    notes = (
        "" if is_set else "must be set",
        "" if unit.lower() in f"{key} {field.description}".lower() else unit,
        _not_obvious(key),
    )
    about = ", ".join(filter(None, notes))
    return f"- `{shown}`{f' ({about})' if about else ''}: {field.description}"


def _not_obvious(key: str) -> str:
    """Return the limits and type of a key, without what its default and description and _HEAD say."""
    field = known_keys()[key]
    default, names = default_of(field), choices(key)
    if names and _are_named(names, f"{field.description} {value_text(default)}"):
        return "list" if isinstance(default, list) else ""
    kind = type_with_limits(key)
    kind = {"integer": "any integer", "number": "any number"}.get(kind, re.sub(r" > 0(?![.\d])", "", kind))
    if default is None:
        return kind.removesuffix(" or null")
    return re.sub(r"^(integer|number|boolean|mapping|text)\b,? ?", "", kind)


def _are_named(names: list[str], text: str) -> bool:
    """Return True if the text has each name as a whole word."""
    return all(re.search(rf"(?<![\w+]){re.escape(name)}(?![\w+])", text) for name in names)


def type_with_limits(key: str) -> str:
    """Return the type and the limits of a key's value, such as `integer > 0` or `path or null`."""
    field = known_keys()[key]
    return _short_type(field.annotation, field.metadata, choices(key))


def _short_type(kind: Any, metadata: list[Any], names: list[str]) -> str:
    """Return a type with its limits, such as `integer > 0`, `number, 0 to 1`, `path or null`.

    kind: the type of a key, or of the items of a list.
    metadata: pydantic's bounds and conditions for the value.
    names: legal values, see `choices`; empty if they cannot be listed.
    """
    parts = get_args(kind)
    if get_origin(kind) is Annotated:
        return _short_type(parts[0], [*metadata, *parts[1:]], names)
    if NoneType in parts:
        return f"{_short_type(parts[0], metadata, names)} or null"
    if get_origin(kind) is list:
        return f"list of {_short_type(parts[0], metadata, names)}"
    if names:
        return ", ".join(f"`{name}`" for name in names)
    if kind is str:
        return next((_TEXTS[one] for one in metadata if isinstance(one, str) and one in _TEXTS), "text")
    return _TYPES.get(get_origin(kind) or kind, "text, list or null") + _range(metadata)


def _range(metadata: list[Any]) -> str:
    """Return the bounds of a number, such as ` > 0` or `, 0 to 1`; empty if it has none.

    Bounds that only catch mistakes are left out.
    """
    found = {name: getattr(one, name) for one in metadata for name in _SIGNS if hasattr(one, name)}
    bounds = {name: bound for name, bound in found.items() if bound < 10**6}
    if bounds.keys() == {"ge", "le"}:
        return f", {bounds['ge']} to {bounds['le']}"
    return ",".join(f" {_SIGNS[name]} {bound}" for name, bound in bounds.items())

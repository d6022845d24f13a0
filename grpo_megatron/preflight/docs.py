"""Generator of docs/config.md, the reference of all configuration keys."""

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
`grpo-megatron config explain KEY` adds what a key interacts with and the rules about it. Numbers must be
finite. A path cannot use `~` for the home folder. `module:attribute` is [your own code](plugins.md).
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
    """Return the text of docs/config.md: a table of all configuration keys except internal ones.

    The text has no newline at its end.
    """
    known = {key: field for key, field in known_keys().items() if not is_internal(field)}
    parts = [_HEAD]
    for section, field in known.items():
        if is_section(field):
            parts.append(f"## {section}\n\n{field.description}\n")
            parts.append("| key | meaning | type | default |\n|---|---|---|---|")
            parts += [
                _row(key) for key in known if key.rpartition(".")[0] == section and not is_section(known[key])
            ]
            parts.append("")
    return "\n".join(parts).rstrip("\n")


def _row(key: str) -> str:
    field = known_keys()[key]
    kind = _short_type(field.annotation, field.metadata, choices(key))
    default = default_of(field)
    text = "must be set" if default == MISSING else f"`{value_text(default)}`"
    unit = f" {unit_of(field)}" if unit_of(field) else ""
    return f"| `{key}` | {_cell(field.description)} | {kind} | {_cell(text)}{unit} |"


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
    """Return the bounds of a number, such as ` > 0` or `, 0 to 1`; empty if it has none."""
    bounds = {name: getattr(one, name) for one in metadata for name in _SIGNS if hasattr(one, name)}
    if bounds.keys() == {"ge", "le"}:
        return f", {bounds['ge']} to {bounds['le']}"
    return ",".join(f" {_SIGNS[name]} {bound}" for name, bound in bounds.items())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

"""The keys of the schema, and texts about them, such as type and default, for help, errors and YAML files."""

import dataclasses
import difflib
import json
import re
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from omegaconf import MISSING
from pydantic.fields import FieldInfo

from grpo_megatron.config.earlier_versions import REMOVED_KEYS, RENAMED_KEYS
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import shortened

_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}


@cache
def known_keys(cls: type = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Return {dotted key: pydantic's FieldInfo} of all keys, in the schema's order.

    Sections such as `rollout` are included. The result is cached, so do not change it.

    cls: class of the schema, or of one of its sections.
    prefix: text to put before each key.
    """
    found = {}
    for name, field in cls.__pydantic_fields__.items():
        found[prefix + name] = field
        if is_section(field):
            found |= known_keys(field.annotation, f"{prefix}{name}.")
    return found


def is_section(field: FieldInfo) -> bool:
    """Return True if a field is a section, such as `rollout`, and not a key with a value."""
    return dataclasses.is_dataclass(field.annotation)


def short_key(field: FieldInfo) -> str | None:
    """Return the name of the key that a plain value of a section is for, such as function; None without one.

    For example, rollout.agent=module:function is short for rollout.agent.function=module:function.
    """
    return field.json_schema_extra["short"] if is_section(field) else None


def type_name(field: FieldInfo) -> str:
    """Return the type of a key in words, for help and error messages.

    Examples: `integer`, `number or null`, `one of recompute, rollout, current`.
    """
    return _type_name(field.annotation)


def _type_name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "section"
    if get_origin(kind) is Annotated:
        return _type_name(get_args(kind)[0])
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if type(None) in get_args(kind):
        return f"{_type_name(get_args(kind)[0])} or null"
    if names := choices_of(kind):
        return f"one of {', '.join(names)}"
    return _PLAIN.get(kind, "text, list or null")


def choices_of(kind: Any) -> list[str]:
    """Return the legal values of a type, or of the items of a list type; empty if they cannot be listed.

    kind: the type of a key, such as an Enum, a Literal, a list of one of these, or a union with None.
    """
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [member.value for member in kind]
    return next(filter(None, map(choices_of, get_args(kind))), [])


def value_problem(key: str, field: FieldInfo, error: dict[str, Any]) -> str:
    """Return a message that says what is wrong with the value of a key.

    key: the dotted key.
    field: the key's declaration in the schema.
    error: one of pydantic's errors about the value.
    """
    message, value = error["msg"], shortened(value_text(error["input"]))
    if error["type"] == "value_error" or any(word in message for word in ("greater", "less", "finite")):
        subject = f"each of {key}" if isinstance(error["loc"][-1], int) else key
        must = message.removeprefix("Value error, ").replace("Input should be", "must be")
        must = must.replace("greater than or equal to", "at least").replace(
            "less than or equal to", "at most"
        )
        return f"{subject} {must}, but is {value}"
    return f"{key}: expected {type_name(field)}, got {value}"


def default_of(field: FieldInfo) -> Any:
    """Return the default value of a key."""
    return field.get_default(call_default_factory=True)


def unit_of(field: FieldInfo) -> str:
    """Return the unit of a key's value, such as `seconds`; empty if it has none."""
    return field.json_schema_extra["unit"]


def is_internal(field: FieldInfo) -> bool:
    """Return True if a field's key is only for tests. docs/config.md and lists of keys leave it out."""
    return field.json_schema_extra["internal"]


def unknown_key_problem(key: str, name: str = "", value: Any = None) -> str:
    """Return an error message about an unknown key.

    The message says how the key is called now, what to do if the key was removed, or which known key is
    similar.

    key: the unknown dotted key.
    name: last part of the key as it is written in a file. It may contain dots by mistake.
    value: value of the key. It may be a nested mapping.
    """
    shown = shortened(repr(key))
    if key in RENAMED_KEYS:
        return f"{key} is now called {RENAMED_KEYS[key]}"
    if key in REMOVED_KEYS:
        return f"{key} no longer exists; {REMOVED_KEYS[key]}"
    if "." in name:
        nested = shortened(name.replace(".", ": {", 1))
        return f"{shown} is written with dots; in a file, nest it: {nested}: ...}}"
    nearest = nearest_key(key) or _buried_key(key, value)
    return f"unknown key {shown}; " + (
        f"did you mean {nearest!r}?" if nearest else "docs/config.md lists all keys"
    )


def _buried_key(key: str, value: Any) -> str | None:
    """Return the known key with which an unknown key ends, for a `did you mean` hint; None if there is none.

    For example, verl's actor_rollout_ref.rollout.n ends with the known key rollout.n.

    key: the unknown dotted key.
    value: value of the key. If it is a nested mapping, the first key at each level is appended to `key`
        before the search.
    """
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return next((known for known in known_keys() if key.endswith(f".{known}")), None)


def nearest_key(key: str) -> str | None:
    """Return the known key that is most similar to an unknown key, for a `did you mean` hint.

    Known keys with the same last part come before all others, even if they are in another section. Returns
    None if no key is similar enough.
    """
    known = list(known_keys())
    last = key.rsplit(".", 1)[-1]
    # Names with the same words in another order count as equal, such as grad_clip and clip_grad.
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last] or [
        candidate
        for candidate in known
        if sorted(candidate.rsplit(".", 1)[-1].split("_")) == sorted(last.split("_"))
    ]
    if same_name:
        return difflib.get_close_matches(key, same_name, 1, cutoff=0.0)[0]
    by_name = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    section = key.rpartition(".")[0]
    siblings = [c for c in known if c.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, siblings, 1, cutoff=0.75) or difflib.get_close_matches(
        key, known, 1, cutoff=0.75
    )
    if close:
        return close[0]
    close = difflib.get_close_matches(last, by_name, 1, cutoff=0.6)
    return by_name[close[0]] if close else None


def value_text(value: Any) -> str:
    """Return a value as one line of YAML that loads to the same value."""
    if isinstance(value, Enum):
        value = value.value
    if value == MISSING:
        return "'???'"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_item_text, value))}]"
    # safe_dump quotes a text that YAML would read as another type. Newlines need double quotes.
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(
        value, default_flow_style=True, width=float("inf"), allow_unicode=True, default_style=style
    )
    return text.removesuffix("\n").removesuffix("\n...")


def _item_text(value: Any) -> str:
    # Quoted, because in a list YAML reads more characters as its own: a comma or a bracket ends an item, and
    # ? begins a mapping.
    is_special = isinstance(value, str) and not _PLAIN_ITEM.fullmatch(value)
    return json.dumps(value) if is_special else value_text(value)


# Texts that need no quotes as items of a list, such as module:function and hf:openai/gsm8k.
_PLAIN_ITEM = re.compile(r"[\w./+@]([\w./+@:-]*[\w./+@-])?")


def nested_yaml(values: dict[str, Any], comments: dict[str, str]) -> str:
    """Return settings as the text of a YAML file with nested sections, in the given order.

    values: {dotted key: value}.
    comments: {dotted key: comment to put at the end of its line}. Keys without a comment may be missing.
    """
    lines: list[str] = []
    above: list[str] = []
    for key, value in values.items():
        *sections, name = key.split(".")
        shared = 0
        while shared < min(len(sections), len(above)) and sections[shared] == above[shared]:
            shared += 1
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        above = sections
        comment = f"  # {comments[key]}" if comments.get(key) else ""
        lines.append(f"{'  ' * len(sections)}{name}: {value_text(value)}{comment}")
    return "\n".join(lines)

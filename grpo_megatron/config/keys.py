"""Texts about a key of the schema, for help and YAML files: its type, its default, its value."""

import dataclasses
import json
import types
from enum import Enum
from typing import Any, get_args, get_origin

import yaml
from omegaconf import MISSING

_PLAIN = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}


def type_name(field: dataclasses.Field) -> str:
    """Return the type of a key in words, for help and error messages.

    Examples: `integer`, `number or null`, `one of recompute, rollout, current`.
    """
    return _type_name(field.type)


def _type_name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "section"
    if isinstance(kind, types.UnionType):
        # null comes last, whatever the order in the annotation
        return " or ".join(
            _type_name(part) for part in sorted(get_args(kind), key=lambda part: part is type(None))
        )
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    return _PLAIN.get(kind, "text, list or null")


def default_of(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def value_text(value: Any) -> str:
    """Return a value as one line of YAML that loads to the same value."""
    if isinstance(value, Enum):
        value = value.name
    if value == MISSING:
        return "'???'"
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        # safe_dump quotes a text that YAML would read as another type. Newlines need double quotes.
        quoted = yaml.safe_dump(
            value, width=float("inf"), allow_unicode=True, default_style='"' if "\n" in value else None
        )
        return quoted.removesuffix("\n").removesuffix("\n...")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_item_text, value))}]"
    return (
        yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _item_text(value: Any) -> str:
    # Quoted, because a comma or a bracket would end the item of the list.
    return json.dumps(value) if isinstance(value, str) and set(value) & set(",[]{}") else value_text(value)


def _number(value: float) -> str:
    """Return a float as text that YAML 1.1 reads as a number.

    Python writes 1e-06, which YAML 1.1 reads as text. It reads 1.0e-06 as a number.
    """
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)


def nested_yaml(values: dict[str, Any], comments: dict[str, str]) -> str:
    """Return settings as the text of a YAML file with nested sections, in the given order.

    values: {dotted key: value}.
    comments: {dotted key: comment at the end of its line}, for any of the keys.
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

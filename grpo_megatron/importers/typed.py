"""Conversion of imported values to the types that grpo_megatron's keys have in the schema."""

import math
from typing import Annotated, Any, get_args, get_origin

from grpo_megatron.config.keys import choices_of, known_keys, type_name
from grpo_megatron.importers.converters import truth
from grpo_megatron.importers.hydra_values import as_words
from grpo_megatron.importers.mapping import CannotCarry, plain

_FIELDS = known_keys()


def typed(key: str, value: Any) -> Any:
    """Convert an imported value to the type of a key of grpo_megatron, such as "1" to 1 for an int.

    key: key of grpo_megatron.
    value: the value to convert, as verl or RLinf has it.

    Raises CannotCarry, with a message that names the type, if the value cannot be converted.
    """
    field = _FIELDS[key]
    try:
        return _as(field.annotation, value)
    except CannotCarry as error:
        raise CannotCarry(f"{key}: expected {type_name(field)}, but {error}") from None


def takes_text(key: str) -> bool:
    kind = _FIELDS[key].annotation
    return kind is Any or "text" in type_name(_FIELDS[key])


def _as(kind: Any, value: Any) -> Any:
    if type(None) in get_args(kind):
        if value is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if kind is Any:
        return _files(value)
    if value is None:
        raise CannotCarry("the value is null")
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise CannotCarry(f"the value is {value!r}")
        return as_words(value)
    if get_origin(kind) is list:
        if not isinstance(value, list):
            raise CannotCarry(f"the value is {value!r}")
        return [_as(get_args(kind)[0], one) for one in value]
    if choices := choices_of(kind):
        if str(value) not in choices:
            raise CannotCarry(f"the value is {value!r}")
        return str(value)
    if kind is bool:
        return truth(value)
    if kind is str:
        return _text(value)
    return _number(value, kind)


def _text(value: Any) -> str:
    if isinstance(value, (list, dict, bool)):
        raise CannotCarry(f"the value is {value!r}")
    text = as_words(str(value))
    if text == "???" or "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise CannotCarry(f"{value!r} cannot be a text in a configuration")
    return text


def _files(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(one) for one in value]
    return None if value is None else _text(value)


def _number(value: Any, kind: type) -> float | int:
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise CannotCarry(f"the value is {value!r}")
    if kind is int:
        if number != int(number):
            raise CannotCarry(f"the value is {value!r}")
        return int(number)
    return number

"""Values of records: conversion to plain Python, and lookup by key."""

import base64
import datetime
import decimal
import uuid
from typing import Any

from grpo_megatron.errors import UserError

# Far below the depth at which pickle and the JSON writer, which are recursive, reach Python's recursion
# limit.
DEEPEST = 64
_KEYS_SHOWN = 20


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a record's value to one that consists only of str, int, float, bool, None, list and dict.

    The result can be written as JSON. It can be sent to processes that do not import the library that read
    the record.

    Dates and times become ISO 8601 text, durations become seconds, and decimals become their digits. Bytes
    become text if they are UTF-8, else `{"base64": ...}`, which cannot be mistaken for text.

    depth: number of lists and dicts that contain the value.

    Raises ValueError for a value that is nested too deeply, for text that cannot be encoded as UTF-8, and for
    any other type. The error's text continues a message that begins with the name of the field, such as "is
    nested more than ...".
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _text(value)
    if depth == DEEPEST:
        raise ValueError(f"is nested more than {DEEPEST} levels deep; flatten or remove it")
    if isinstance(value, dict):
        return {_text(str(key)): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, depth + 1) for item in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode("ascii")}
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, uuid.UUID):
        return str(value)
    raise ValueError(f"has a value of type {type(value).__name__}, which is not supported")


def plain_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the record with all values converted by `plain`.

    where: place of the record, for error messages.

    Raises UserError, naming the field, if a value cannot be converted.
    """
    result = {}
    for key, value in record.items():
        try:
            result[_text(key)] = plain(value)
        except ValueError as error:
            raise UserError(f"{where}: field {shown(key)} {error}") from error
    return result


def _text(text: str) -> str:
    """Return the text unchanged. Raise ValueError if it cannot be encoded as UTF-8."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"contains half of a surrogate pair ({text[error.start]!r}), which is not valid text"
            ) from error
    return text


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, in dicts at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def lookup(record: dict[str, Any], key: str) -> Any:
    """Return the value of a field of a record, or None if the record does not have the field.

    key: name of the field, or a path: `a.b` means key b of the dict in field a, unless a field is called
        `a.b`.
    """
    if key in record or "." not in key:
        return record.get(key)
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def required(record: dict[str, Any], key: str, where: str) -> Any:
    """Return the value of a field that the record must have.

    key: name of the field, or a path: `a.b` means key b of the dict in field a, unless a field is called
        `a.b`.
    where: place of the record, for error messages.

    Raises UserError if the field is missing or null. The message lists the record's keys.
    """
    value = lookup(record, key)
    if value is None:
        has = ", ".join(map(shown, list(record)[:_KEYS_SHOWN])) + (
            ", ..." if len(record) > _KEYS_SHOWN else ""
        )
        fault = "null" if key in record else "missing"
        raise UserError(
            f"{where}: field {key!r} is {fault}; the record has {has or 'no fields'}; set the keys "
            "data.*_key to the names of your fields"
        )
    return value


def shown(value: Any) -> str:
    """Return a value's repr for error messages, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

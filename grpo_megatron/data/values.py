"""Values of records as plain Python, and finding them by their key."""

import base64
import datetime
import decimal
import uuid
from typing import Any

from grpo_megatron.errors import UserError

# Far from where pickle and the JSON writer, which are recursive, reach Python's limit.
DEEPEST = 64
_KEYS_SHOWN = 20


def plain(value: Any, depth: int = 0) -> Any:
    """The same value in str, int, float, bool, None, list and dict alone: it pickles, and can be written as JSON.

    Dates and times become ISO 8601 text, durations seconds, decimals their digits. Bytes become text if they are
    UTF-8, else `{"base64": ...}`, which nothing takes for text. Raises ValueError, whose message goes on after the
    name of the field, for what is nested too deeply, for text that is not Unicode, and for any other type.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return _text(value)
    if depth == DEEPEST:
        raise ValueError(f"is nested more than {DEEPEST} levels deep")
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
    raise ValueError(f"has a value of type {type(value).__name__}, which cannot be used here")


def plain_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """The record with plain values. where: the record's place, for the message of the UserError."""
    result = {}
    for key, value in record.items():
        try:
            result[_text(key)] = plain(value)
        except ValueError as error:
            raise UserError(f"{where}: field {shown(key)} {error}") from error
    return result


def _text(text: str) -> str:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"has half of a surrogate pair ({text[error.start]!r}), which is not a character"
            ) from error
    return text


def without_nulls(value: Any) -> Any:
    """Return the value without the keys of objects, at any depth, that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def lookup(record: dict[str, Any], key: str) -> Any:
    """record[key]; if there is no such key, `a.b` is b of the object a. None if that is missing too."""
    if key in record or "." not in key:
        return record.get(key)
    value: Any = record
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def required(record: dict[str, Any], key: str, where: str) -> Any:
    """What lookup finds. Raises UserError, naming the record's own keys, if it is missing or null."""
    value = lookup(record, key)
    if value is None:
        has = ", ".join(map(shown, list(record)[:_KEYS_SHOWN])) + (
            ", ..." if len(record) > _KEYS_SHOWN else ""
        )
        fault = "null" if key in record else "missing"
        raise UserError(
            f"{where}: field {key!r} is {fault}; the record has {has} (see data.prompt_key and its siblings)"
        )
    return value


def shown(value: Any) -> str:
    """The beginning of a value, for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."

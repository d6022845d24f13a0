"""Building blocks of the schema: the decorator of its classes, and functions that declare keys and sections.

pydantic checks bounds and types whenever an object of the schema is made, also by `dataclasses.replace`.
Defaults are checked too.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

# Largest legal time limit in seconds, about four months. Timers of the operating system and of libraries
# overflow at very large values.
LONGEST_WAIT = 10**7

# Decorator of the schema's classes. An unknown key, infinity and NaN are errors.
dataclass = partial(
    pydantic_dataclass,
    config=ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True),
)


def option(default: Any, help: str, unit: str = "", is_internal: bool = False, **bounds: Any) -> Any:
    """Return the pydantic field of one key of the schema.

    default: default value of the key. MISSING: the key must be set.
    help: meaning of the key, as docs/config.md and `grpo-megatron config` show it.
    unit: unit of the value, such as `seconds`.
    is_internal: True if the key is only for tests. docs/config.md and lists of keys leave out such keys.
    bounds: bounds of a number, named gt, ge, lt and le as in pydantic.
    """
    settings = {"description": help, "json_schema_extra": {"unit": unit, "internal": is_internal}, **bounds}
    if isinstance(default, (list, dict)):
        return Field(default_factory=lambda: type(default)(default), **settings)
    return Field(default, **settings)


def section(cls: type, help: str, short: str | None = None) -> Any:
    """Return the pydantic field of a section of the schema.

    cls: class of the section. Its fields are the section's keys.
    help: meaning of the section, as docs/config.md shows it.
    short: name of the key in it that a plain value of the section is for; None: a section takes no value.
    """
    extra = {"unit": "", "internal": False, "short": short}
    return Field(default_factory=cls, description=help, json_schema_extra=extra)


def _text(must: str, fits: Callable[[str], bool]) -> Any:
    """Return a type for fields of the schema: text that meets a condition, which pydantic checks.

    must: the condition in words, for error messages, such as `must not be empty`.
    fits: function that returns True for a text that meets the condition.
    """

    def check(value: str) -> str:
        if not fits(value):
            raise ValueError(must)
        return value

    return Annotated[str, AfterValidator(check), must]


def _is_path(value: str) -> bool:
    # A shell does not expand ~ within a word, so key=~/x would create a folder named ~.
    return value.strip() != "" and value.split("/")[0] != "~"


# Common file systems take names of up to 255 bytes. The names of the lock on a run's folder and of the weight
# sync's folder contain the run's name.
_MOST_NAME = 200


def _is_folder_name(value: str) -> bool:
    return value.strip() not in ("", ".", "..") and "/" not in value and len(value.encode()) <= _MOST_NAME


def _is_pattern(value: str) -> bool:
    try:
        re.compile(value)
    except re.error:
        return False
    return value != ""


def _is_threads(value: str) -> bool:
    return value == "auto" or (value.isascii() and value.isdecimal() and 1 <= int(value) <= 1024)


FilledText = _text("must not be empty", lambda value: value != "")
PathText = _text("must be a path without ~ for the home folder", _is_path)
FolderName = _text(f"must be a folder name without a slash, of at most {_MOST_NAME} bytes", _is_folder_name)
Pattern = _text("must be a regular expression", _is_pattern)
Threads = _text("must be auto, or a whole number from 1 to 1024", _is_threads)

"""Building blocks of the schema: pydantic dataclasses, and their keys and sections.

Bounds and types are checked whenever an object is made, also by `dataclasses.replace`. Defaults are checked
too.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

# In seconds (four months). Timers of the operating system and of libraries overflow at very large values.
LONGEST_WAIT = 10**7

# Decorator of the schema's classes. An unknown key, infinity and NaN are errors.
dataclass = partial(
    pydantic_dataclass,
    config=ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True, validate_default=True),
)


def option(default: Any, help: str, unit: str = "", is_internal: bool = False, **bounds: Any) -> Any:
    """Return the pydantic field of one key of the schema.

    help: what the key does, for the texts that `grpo-megatron config` prints.
    unit: unit of a quantity, such as `seconds`.
    is_internal: the key is for tests. docs/config.md and lists of keys leave it out.
    bounds: bounds of a number: gt, ge, lt, le, as in pydantic.
    """
    settings = {"description": help, "json_schema_extra": {"unit": unit, "internal": is_internal}, **bounds}
    if isinstance(default, (list, dict)):
        return Field(default_factory=lambda: type(default)(default), **settings)
    return Field(default, **settings)


def section(cls: type, help: str) -> Any:
    """Return the pydantic field of a section of the schema. The fields of `cls` are the section's keys."""
    return Field(default_factory=cls, description=help, json_schema_extra={"unit": "", "internal": False})


def _text(must: str, fits: Callable[[str], bool]) -> Any:
    """Return the type of texts for which `fits` returns True.

    must: the condition in words, for messages, such as `must not be empty`.
    """

    def check(value: str) -> str:
        if not fits(value):
            raise ValueError(must)
        return value

    return Annotated[str, AfterValidator(check), must]


def _is_path(value: str) -> bool:
    # A shell does not expand ~ within a word, so key=~/x would create a folder named ~.
    return value.strip() != "" and value.split("/")[0] != "~"


def _is_folder_name(value: str) -> bool:
    # Common file systems take names of up to 255 bytes.
    return value.strip() not in ("", ".", "..") and "/" not in value and len(value.encode()) <= 255


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
FolderName = _text("must be a folder name without a slash", _is_folder_name)
Pattern = _text("must be a regular expression", _is_pattern)
Threads = _text("must be auto, or a whole number from 1 to 1024", _is_threads)

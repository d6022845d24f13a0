"""Building blocks of the schema: keys and sections with their help and limits."""

from dataclasses import Field, field
from typing import Any

from grpo_megatron.config.limits import Limits


def option(default: Any, help: str, unit: str = "", **limits: Any) -> Any:
    """Return the dataclass field of one key of the schema, with its default, help and limits.

    help: one line, which `grpo-megatron config` prints.
    unit: unit of a quantity, such as `seconds`.
    limits: arguments of Limits, such as `above=0`.
    """
    metadata = {"help": help, "unit": unit, "limits": Limits(**limits)}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, help: str) -> Any:
    """Return the dataclass field of a section of the schema. The fields of `cls` are its keys."""
    return field(default_factory=cls, metadata={"help": help, "unit": "", "limits": Limits()})


def limits_of(key: Field) -> Limits:
    return key.metadata["limits"]

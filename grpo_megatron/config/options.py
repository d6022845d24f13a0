"""What a key of the schema is made of."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, unit: str = "") -> Any:
    """A field with its one-line help and, for quantities, its unit."""
    metadata = {"help": help, "unit": unit}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type, help: str) -> Any:
    return field(default_factory=cls, metadata={"help": help, "unit": ""})

"""Settings that an importer has read from another system's configuration."""

from dataclasses import dataclass, field
from typing import Any

ONLY_THESE = (
    "only configurations of verl and RLinf can be imported, see docs/recipes.md for configurations to start "
    "from"
)
"""End of the messages that refuse a file, for users who come from another system."""


@dataclass
class Settings:
    """Settings read from files of verl or RLinf, and the parts of the files that could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    """{dotted key: value}. A value that is not known is a text with a $, such as `$N` or `$<8 or 16>`."""
    undecided: dict[str, str] = field(default_factory=dict)
    """{key of `values` whose value is not certain: text that says what it depends on}."""
    unread: list[str] = field(default_factory=list)
    """Words of a launch script that may be settings or change settings, each with an explanation."""
    notes: list[str] = field(default_factory=list)
    """Inputs that the launch script takes from its caller or machine, such as "$@", one line of text each."""
    lost: list[str] = field(default_factory=list)
    """Settings that occur in the launch script but are passed to no command."""
    program: str | None = None
    """Python module, .py file or .sh file that is launched; None for YAML."""
    base: dict[str, str] = field(default_factory=dict)
    """Values of --config-name, --config-path and --config-dir, under the keys `name`, `path` and `dir`."""

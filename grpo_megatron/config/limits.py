"""Limits on the value of a single key. Rules between several keys are in preflight."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

# In seconds (four months). Timers of the operating system and of libraries overflow at very large values.
LONGEST_WAIT = 10**7
# Bounds well within the range of float32, so that a product or a quotient of two values is a normal number.
_SMALLEST, _LARGEST = 1e-18, 1e18


class Text(str, Enum):
    """Condition on the value of a text key. The enum's values are phrases of error messages.

    Unless the schema gives another condition, it is `filled`.
    """

    any = ""
    filled = "must not be empty"
    path = "must be a path, with no ~ for the home folder"
    folder_name = "must be the name of one folder, without a slash"
    pattern = "must be a regular expression"
    auto_or_threads = "must be auto, or a whole number from 1 to 1024"

    def fits(self, value: str) -> bool:
        if self is Text.any:
            return True
        if self is Text.filled:
            return value != ""
        if self is Text.auto_or_threads:
            return value == "auto" or (value.isascii() and value.isdecimal() and 1 <= int(value[:5]) <= 1024)
        if self is Text.pattern:
            return value != "" and _compiles(value)
        is_path = value.strip() != "" and "\0" not in value
        if self is Text.path:
            # A shell does not expand ~ within a word, so key=~/x would create a folder named ~.
            return is_path and value.split("/")[0] != "~"
        # Common file systems take names of up to 255 bytes.
        return is_path and "/" not in value and value not in (".", "..") and len(value.encode()) <= 255


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class Limits:
    """Legal values of one key: bounds of a number, or a condition on a text.

    In a list they apply to each item. null is always legal. Whatever its bounds, a float must be in the range
    of float32 and an integer must have at most 64 bits.
    """

    above: float | None = None
    """Exclusive lower bound."""
    at_least: float | None = None
    """Inclusive lower bound."""
    below: float | None = None
    """Exclusive upper bound."""
    at_most: float | None = None
    """Inclusive upper bound."""
    choices: tuple[str, ...] = ()
    """The only legal texts; empty: `text` decides."""
    text: Text = Text.filled
    """Condition on a text without `choices`."""

    def of_numbers(self) -> str:
        """Return the bounds in words, for help and error messages; empty if there are none.

        An example is `must be greater than 0`.
        """
        words = [f"greater than {self.above}"] if self.above is not None else []
        words += [f"at least {self.at_least}"] if self.at_least is not None else []
        words += [f"less than {self.below}"] if self.below is not None else []
        words += [f"at most {self.at_most}"] if self.at_most is not None else []
        if words == ["at least 0"]:
            return "must not be negative"
        return f"must be {' and '.join(words)}" if words else ""

    def problems(self, key: str, value: Any) -> Iterator[str]:
        """Yield one sentence for each violation of these limits by a value.

        key: dotted key of the value, with which the sentences begin.
        """
        if isinstance(value, list):
            for item in value:
                yield from self.problems(f"each of {key}", item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            problem = self._problem_of_number(value)
            if problem:
                yield f"{key} {problem}, is {value}"
        elif isinstance(value, str) and not isinstance(value, Enum):
            if self.choices and value not in self.choices:
                yield (
                    f"{key.removeprefix('each of ')}={value} is unknown; choose one of "
                    f"{', '.join(self.choices)}"
                )
            elif not self.choices and not self.text.fits(value):
                yield f"{key} {self.text.value}, is {value!r}"

    def _problem_of_number(self, value: float) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if isinstance(value, int) and abs(value) >= 2**63:
            return "must be an integer of 64 bits"
        inside = (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )
        if not inside:
            return self.of_numbers()
        if isinstance(value, float) and value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:
            # In a float32 tensor such a value becomes zero or infinity, or torch raises an error in a rank.
            return (
                f"must be between {_SMALLEST:g} and {_LARGEST:g} in magnitude, because training computes in "
                "float32"
            )
        return ""

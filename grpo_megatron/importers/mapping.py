"""What a mapping from another system's keys to ours is made of: one Entry per key of theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

UNSET: Any = object()


class CannotCarry(Exception):
    """A value that has no counterpart here; the message says why."""


class Source:
    """The values of the other system: as set, else as it has them by default."""

    def __init__(self, values: dict[str, Any], entries: tuple["Entry", ...]):
        self._values = values
        self._defaults = {entry.theirs: entry.default for entry in entries if entry.default is not UNSET}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        """None for a key that is neither set nor has a default. Raises CannotCarry for an unreplaced $VARIABLE."""
        value = self._values.get(key, self._defaults.get(key))
        if isinstance(value, str) and "$" in value:
            raise CannotCarry(f"{key}={value} is not known here")
        return value

    def number(self, key: str) -> float | int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            try:
                value = float(value)
            except (TypeError, ValueError):
                raise CannotCarry(f"{key}={value!r} is not a number") from None
        return int(value) if float(value).is_integer() else float(value)


# (value, all values) -> the value of Entry.ours, or {our key: value} if there are several.
Convert = Callable[[Any, Source], Any]


@dataclass(frozen=True)
class Entry:
    """One key of theirs, or a pattern with `*`.

    ours: the keys it becomes; none: it is not carried over, and note says why. note: what differs,
    for the documentation and the report. default: theirs, carried over when the key is not set, since
    ours may be another; UNSET where nothing would be carried. unit: `theirs -> ours` if it changes.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    note: str = ""
    convert: Convert | None = None
    default: Any = UNSET
    unit: str = ""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.theirs


@dataclass(frozen=True)
class System:
    """name: as people call it. entries: exact keys and patterns; the first exact one wins, then the first pattern."""

    name: str
    entries: tuple[Entry, ...]

    def entry_for(self, key: str) -> Entry | None:
        for entry in self.entries:
            if entry.theirs == key:
                return entry
        return next((entry for entry in self.entries if entry.is_pattern and fnmatchcase(key, entry.theirs)), None)

    def table(self) -> str:
        """The mapping as a Markdown table, which the documentation holds word for word."""
        lines = [f"| {self.name} | here | what to know |", "|---|---|---|"]
        for entry in self.entries:
            ours = ", ".join(f"`{key}`" for key in entry.ours) or "-"
            note = "; ".join(part for part in (f"unit: {entry.unit}" if entry.unit else "", entry.note) if part)
            lines.append(f"| `{entry.theirs}` | {ours} | {note.replace('|', chr(92) + '|')} |")
        return "\n".join(lines)


def same(theirs: str, ours: str, note: str = "", default: Any = UNSET, unit: str = "") -> Entry:
    """The same meaning under another name."""
    return Entry(theirs, (ours,), note, None, default, unit)


def becomes(
    theirs: str, ours: str | tuple[str, ...], convert: Convert, note: str = "", default: Any = UNSET, unit: str = ""
) -> Entry:
    """A value that has to be translated."""
    return Entry(theirs, (ours,) if isinstance(ours, str) else ours, note, convert, default, unit)


def dropped(theirs: str, why: str) -> Entry:
    """No counterpart."""
    return Entry(theirs, (), why)


def choice(names: dict[str, Any], why: str = "there is no such choice here") -> Convert:
    """A converter by a table of values; others cannot be carried."""

    def convert(value: Any, source: Source) -> Any:
        if str(value) not in names:
            raise CannotCarry(f"{value}: {why}")
        return names[str(value)]

    return convert


def truth(value: Any) -> bool:
    """Raises CannotCarry for what is neither true nor false."""
    if isinstance(value, bool):
        return value
    named = {"true": True, "false": False, "none": False, "null": False, "1": True, "0": False}
    if str(value).lower() not in named:
        raise CannotCarry(f"{value!r} is neither true nor false")
    return named[str(value).lower()]


def only(expected: tuple[Any, ...], why: str) -> Convert:
    """For keys whose other values mean something that is not here; carries nothing itself."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value not in expected:
            raise CannotCarry(f"{value}: {why}")
        return {}

    return convert


def elsewhere(value: Any, source: Source) -> dict[str, Any]:
    """For a key that the converter of another one reads."""
    return {}


def flag(value: Any, source: Source) -> bool:
    return truth(value)


def unless_null(ours: str) -> Convert:
    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {} if value is None else {ours: value}

    return convert


def every(ours: str) -> Convert:
    """For intervals in steps, where -1 is never; ours has 0 for that."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {ours: max(0, int(value))}

    return convert


def total_steps(value: Any, source: Source) -> dict[str, Any]:
    return {"run.total_steps": int(value)} if value is not None and value > 0 else {}

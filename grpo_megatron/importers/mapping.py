"""What a mapping from another system's keys to ours is made of: one Entry per key of theirs."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from grpo_megatron.config.schema import TrainConfig
from grpo_megatron.importers.sources import Settings

UNSET: Any = object()


class CannotCarry(Exception):
    """A value that has no counterpart here; the message says why."""


class NotKnown(CannotCarry):
    """A value that the other system's file leaves open, so that it has to be given by hand."""


_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def plain(value: Any) -> Any:
    """A number, truth value or null that is written as text ('1', "1e-6", None) as what it is; all else as it is."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.lower() in ("true", "false", "none", "null"):
        return {"true": True, "false": False}.get(text.lower())
    if not _NUMBER.fullmatch(text):
        return value
    digits = text.replace("_", "")
    return int(digits) if re.fullmatch(r"[+-]?\d+", digits) else float(digits)


class Source:
    """The values of the other system: as set, else as it has them by default."""

    def __init__(self, values: dict[str, Any], entries: tuple["Entry", ...]):
        self._values = values
        self._defaults = {entry.theirs: entry.default for entry in entries if entry.default is not UNSET}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        """Return None for a key without a value or default. Raises NotKnown for an unreplaced $VARIABLE."""
        value = self._values.get(key, self._defaults.get(key))
        if isinstance(value, str) and "$" in value:
            raise NotKnown(f"{key}={value} is not known here")
        return plain(value)

    def below(self, section: str) -> dict[str, Any]:
        """The values that are set in a section, by the rest of their keys."""
        return {
            key.removeprefix(f"{section}."): self[key]
            for key in self._values
            if key.startswith(f"{section}.")
        }

    def number(self, key: str) -> float | int:
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CannotCarry(f"{key}={value!r} is not a number")
        return int(value) if float(value).is_integer() else float(value)

    def count(self, key: str) -> int:
        """A whole number of at least 1."""
        value = self.number(key)
        if not isinstance(value, int) or value < 1:
            raise CannotCarry(f"{key}={value} is no number of at least 1")
        return value


# (value, all values) -> the value of Entry.ours, or {our key: value} if there are several.
Convert = Callable[[Any, Source], Any]


@dataclass(frozen=True)
class Entry:
    """One key of theirs, or a pattern with `*`.

    ours: the keys it becomes; none: it is not carried over, and note says why. note: what differs,
    for the documentation and the report. default: theirs, carried over when the key is not set, since
    ours may be another; UNSET where nothing would be carried. unit: `theirs -> ours` if it changes.
    changes_training: a value that cannot be carried over makes another run of it, which a person must accept, unless
    one of ours is given by hand.
    """

    theirs: str
    ours: tuple[str, ...] = ()
    note: str = ""
    convert: Convert | None = None
    default: Any = UNSET
    unit: str = ""
    changes_training: bool = False

    @property
    def is_pattern(self) -> bool:
        return "*" in self.theirs


@dataclass(frozen=True)
class Finding:
    """A sentence about what is trained that no single key says. settled_by: our keys of which one, given by hand, settles it."""

    text: str
    settled_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """name: as people call it. entries: exact keys and patterns; the first exact one wins, then the first pattern.

    findings: what changes what is trained, across keys. refusal: why these settings are no such run at all, or None.
    """

    name: str
    entries: tuple[Entry, ...]
    findings: Callable[[Source, Settings], list[Finding]]
    refusal: Callable[[Source, Settings], str | None]

    def entry_for(self, key: str) -> Entry | None:
        for entry in self.entries:
            if entry.theirs == key:
                return entry
        return next(
            (entry for entry in self.entries if entry.is_pattern and fnmatchcase(key, entry.theirs)), None
        )

    def table(self) -> str:
        """The mapping as a Markdown table, which the documentation holds word for word."""
        lines = [f"| {self.name} | here | what to know |", "|---|---|---|"]
        for entry in self.entries:
            ours = ", ".join(f"`{key}`" for key in entry.ours) or "-"
            note = "; ".join(
                part for part in (f"unit: {entry.unit}" if entry.unit else "", entry.note) if part
            )
            lines.append(f"| `{entry.theirs}` | {ours} | {note.replace('|', chr(92) + '|')} |")
        return "\n".join(lines)


def same(theirs: str, ours: str, note: str = "", default: Any = UNSET, unit: str = "") -> Entry:
    """The same meaning under another name."""
    return Entry(theirs, (ours,), note, None, default, unit)


def becomes(
    theirs: str,
    ours: str | tuple[str, ...],
    convert: Convert,
    note: str = "",
    default: Any = UNSET,
    unit: str = "",
) -> Entry:
    """A value that has to be translated."""
    return Entry(theirs, (ours,) if isinstance(ours, str) else ours, note, convert, default, unit)


def dropped(theirs: str, why: str) -> Entry:
    """No counterpart."""
    return Entry(theirs, (), why)


def trains(*entries: Entry) -> tuple[Entry, ...]:
    """Keys that decide what is trained."""
    return tuple(replace(entry, changes_training=True) for entry in entries)


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


def room_for(longest: Callable[[Source], int]) -> Convert:
    """For the switch of dynamic batches: a micro-batch here holds at least the longest sequence, whatever else says its size."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        tokens = longest(source)
        return (
            {"train.max_tokens_per_micro_batch": tokens}
            if tokens > TrainConfig().max_tokens_per_micro_batch
            else {}
        )

    return convert


def unless_null(ours: str) -> Convert:
    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {} if value is None else {ours: value}

    return convert


def every(ours: str) -> Convert:
    """For intervals in steps, where -1 is never; ours has 0 for that."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {ours: max(0, value) if isinstance(value, int) else value}

    return convert


def run_name(value: Any, source: Source) -> str:
    """Return a name that run.name takes: that of one folder."""
    name = str(value).strip().replace("/", "-")
    if "$" in name or value is None or name in ("", ".", "..", "???"):
        raise CannotCarry("no name that is known here; give run.name=NAME")
    return name


def total_steps(value: Any, source: Source) -> dict[str, Any]:
    return {"run.total_steps": value} if value is not None and value > 0 else {}


def epochs(steps: str) -> Convert:
    """For the number of epochs, which says how long a run is unless `steps`, a key of theirs, does."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        given = source[steps]
        if isinstance(given, int) and given > 0:
            return {}
        raise CannotCarry(
            "a run is measured in steps, and how many prompts the data has is not known here: give run.total_steps="
            "(this many epochs * prompts / data.train_batch_size)"
        )

    return convert

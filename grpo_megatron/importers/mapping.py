"""Building blocks for the mapping of another system's configuration keys to ours, those of grpo_megatron.

The mapping has one KeyMapping for each key, or pattern of keys, of the other system.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from grpo_megatron.config.schema import TrainConfig
from grpo_megatron.importers.settings import Settings

UNSET: Any = object()


class CannotCarry(Exception):
    """Raised for a value that has no counterpart here. The message says why."""


class NotKnown(CannotCarry):
    """Raised for a value that the other system's file leaves open, such as $N. A person has to give it."""


_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def plain(value: Any) -> Any:
    """Convert a number, truth value or null written as text ('1', "1e-6", None). Keep any other value."""
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
    """The settings of the other system, for the converters of the entries.

    values: dotted key -> value, for the keys that the imported run sets. Other keys have that system's
    default.
    entries: the mapping, which contains the defaults.
    """

    def __init__(self, values: dict[str, Any], entries: tuple["KeyMapping", ...]):
        self._values = values
        self._defaults = {entry.theirs: entry.default for entry in entries if entry.default is not UNSET}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, otherwise the other system's default, otherwise None.

        Raises NotKnown for a text with a $VARIABLE whose value is not known.
        """
        value = self._values.get(key, self._defaults.get(key))
        if isinstance(value, str) and "$" in value:
            raise NotKnown(f"{key}={value} is not known here")
        return plain(value)

    def below(self, section: str) -> dict[str, Any]:
        """Return the values that are set below a section. Their keys are relative to the section."""
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
        """Return the value of a key as a whole number of at least 1. Raises CannotCarry for anything else."""
        value = self.number(key)
        if not isinstance(value, int) or value < 1:
            raise CannotCarry(f"{key}={value} is no number of at least 1")
        return value


# convert(value, all settings) returns the value of the key KeyMapping.ours, or {our key: value} for several
# keys.
Convert = Callable[[Any, Source], Any]


@dataclass(frozen=True)
class KeyMapping:
    """The mapping of one key of the other system, or of all keys that match a pattern."""

    theirs: str
    """Key of the other system, such as `data.shuffle`; a pattern if it contains `*`."""
    ours: tuple[str, ...] = ()
    """Keys of ours that it becomes. Empty: no key of ours is set, and `note` says why."""
    note: str = ""
    """What differs between the two keys, for the documentation and the report."""
    convert: Convert | None = None
    """Function that turns the value into values of `ours`. None: the value stays as it is."""
    default: Any = UNSET
    """The other system's default. It is carried over if the key is not set. UNSET: nothing is."""
    unit: str = ""
    """Both units as `theirs -> ours`, such as `MiB -> bytes`; empty if the unit stays."""
    changes_training: bool = False
    """True if a value that cannot be carried over changes what is trained, which a person must accept."""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.theirs


@dataclass(frozen=True)
class Finding:
    """A difference between what the original and the imported run train. A person must accept it.

    settled_by: our keys. If a person gives one of them by hand, the finding no longer applies.
    """

    text: str
    settled_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """Another system and the mapping of its keys to ours.

    name: the system's usual name.
    entries: exact keys and patterns. The first exact key that matches wins, then the first pattern.
    findings: function that returns the differences in what is trained that no entry of a single key reports.
    refusal: function that returns the reason why these settings are not a run that can be imported, or None.
    """

    name: str
    entries: tuple[KeyMapping, ...]
    findings: Callable[[Source, Settings], list[Finding]]
    refusal: Callable[[Source, Settings], str | None]

    def entry_for(self, key: str) -> KeyMapping | None:
        for entry in self.entries:
            if entry.theirs == key:
                return entry
        return next(
            (entry for entry in self.entries if entry.is_pattern and fnmatchcase(key, entry.theirs)), None
        )

    def table(self) -> str:
        """Return the mapping in Markdown, with one table for each of three kinds of keys.

        The documentation contains this text word for word. Keys of the other system that have the same
        counterpart and note share a row. Patterns without a counterpart are left out: they are the sections
        and options that only exist there, and the report of an import names each such key.
        """
        rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for entry in self.entries:
            if entry.is_pattern and not entry.ours:
                continue
            unit = f"unit: {entry.unit}" if entry.unit else ""
            note = "; ".join(part for part in (unit, entry.note) if part)
            rows.setdefault((entry.ours, note), []).append(entry.theirs)
        cells = [(_code(theirs), _code(ours), note) for (ours, note), theirs in rows.items()]
        same_name = [theirs for theirs, ours, note in cells if theirs == ours and not note]
        renamed = [(theirs, ours) for theirs, ours, note in cells if ours not in ("", theirs) and not note]
        translated = [cell for cell in cells if cell[1] and cell[2]]
        without = [(theirs, note) for theirs, ours, note in cells if not ours]
        return "\n\n".join(
            (
                "### The same meaning",
                _markdown((self.name, "here"), [(", ".join(same_name), "the same names"), *renamed]),
                "### Another form or meaning",
                _markdown((self.name, "here", "what to know"), translated),
                "### No counterpart",
                _markdown((self.name, "what to know"), without),
            )
        )


def _code(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _markdown(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (head, *rows)]
    return "\n".join((lines[0], "|" + "---|" * len(head), *lines[1:]))


def same(theirs: str, ours: str, note: str = "", default: Any = UNSET, unit: str = "") -> KeyMapping:
    """Return the entry of a key that has the same meaning under another name here."""
    return KeyMapping(theirs, (ours,), note, None, default, unit)


def becomes(
    theirs: str,
    ours: str | tuple[str, ...],
    convert: Convert,
    note: str = "",
    default: Any = UNSET,
    unit: str = "",
) -> KeyMapping:
    """Return the entry of a key whose value has to be translated."""
    return KeyMapping(theirs, (ours,) if isinstance(ours, str) else ours, note, convert, default, unit)


def dropped(theirs: str, why: str) -> KeyMapping:
    """Return the entry of a key that has no counterpart here."""
    return KeyMapping(theirs, (), why)


def trains(*entries: KeyMapping) -> tuple[KeyMapping, ...]:
    """Return the entries with changes_training set, because these keys decide what is trained."""
    return tuple(replace(entry, changes_training=True) for entry in entries)


def choice(names: dict[str, Any], why: str = "there is no such choice here") -> Convert:
    """Return a converter that looks up the value in a table. For any other value it raises CannotCarry.

    names: the other system's value, as text -> our value, or {our key: value} for several keys.
    why: message for other values.
    """

    def convert(value: Any, source: Source) -> Any:
        if str(value) not in names:
            raise CannotCarry(f"{value}: {why}")
        return names[str(value)]

    return convert


def truth(value: Any) -> bool:
    """Return the value, which may be a text such as "true", as a bool.

    Raises CannotCarry for anything that is neither true nor false.
    """
    if isinstance(value, bool):
        return value
    named = {"true": True, "false": False, "none": False, "null": False, "1": True, "0": False}
    if str(value).lower() not in named:
        raise CannotCarry(f"{value!r} is neither true nor false")
    return named[str(value).lower()]


def only(expected: tuple[Any, ...], why: str) -> Convert:
    """Return a converter for a key that has no counterpart here. It sets no key of ours.

    It accepts the expected values, which ask for what is done here anyway. For any other value it raises
    CannotCarry with the message `why`.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value not in expected:
            raise CannotCarry(f"{value}: {why}")
        return {}

    return convert


def elsewhere(value: Any, source: Source) -> dict[str, Any]:
    """Set no key of ours: converter for a key that the converter of another key reads."""
    return {}


def flag(value: Any, source: Source) -> bool:
    return truth(value)


def room_for(longest: Callable[[Source], int]) -> Convert:
    """Return a converter for the other system's switch for dynamic batch sizes.

    Micro-batches are always packed by tokens here, whatever the switch says. The converter only raises
    train.max_tokens_per_micro_batch if our default is smaller than the longest sequence.

    longest: function that returns the longest sequence of the run, prompt and response, in tokens.
    """

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


def only_where(applies: Callable[[Source], bool], ours: str, names: dict[str, Any] | None = None) -> Convert:
    """Return a converter to `ours` for a key that has an effect only in some configurations.

    applies: whether the key has an effect in this one. Where it has none, and for null, nothing is written.
    names: {the other system's value: ours} where they differ.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {ours: (names or {}).get(value, value)} if value is not None and applies(source) else {}

    return convert


def every(ours: str) -> Convert:
    """Return a converter for an interval in steps. "Never" is -1 in the other system and 0 here.

    ours: our key for the interval.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {ours: max(0, value) if isinstance(value, int) else value}

    return convert


def run_name(value: Any, source: Source) -> str:
    """Return a run's name that can be the name of a single folder: slashes become dashes.

    Raises CannotCarry for an empty name, or one with a variable that is not known.
    """
    name = str(value).strip().replace("/", "-")
    if "$" in name or value is None or name in ("", ".", "..", "???"):
        raise CannotCarry("no name that is known here; give run.name=NAME")
    return name


def total_steps(value: Any, source: Source) -> dict[str, Any]:
    return {"run.total_steps": value} if value is not None and value > 0 else {}


def epochs(steps: str) -> Convert:
    """Return a converter for the number of epochs. It sets nothing, because a run is measured in steps here.

    It raises CannotCarry unless the settings also give the number of steps.

    steps: the other system's key for the number of steps.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        given = source[steps]
        if isinstance(given, int) and given > 0:
            return {}
        raise CannotCarry(
            "a run is measured in steps, and how many prompts the data has is not known here: give "
            "run.total_steps=(this many epochs * prompts / data.train_batch_size)"
        )

    return convert

"""Building blocks for the mapping of the keys of verl or RLinf to the keys of grpo_megatron.

"Ours" is grpo_megatron. "Theirs", or the other system, is verl or RLinf. The mapping has one KeyMapping for
each key, or pattern of keys, of the other system.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from grpo_megatron.importers.settings import Settings

UNSET: Any = object()


class CannotCarry(Exception):
    """Raised for a value that has no counterpart in grpo_megatron. The message says why."""


class NotKnown(CannotCarry):
    """Raised for a value that the imported file leaves open, such as $N. The user has to set it by hand."""


_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?")


def plain(value: Any) -> Any:
    """Return the number, bool or None that a text such as "1", "1e-6", "true" or "None" stands for.

    Any other value is returned unchanged.
    """
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
    """All settings of an imported run, for converters that need more than the value of their own key.

    values: {dotted key: value} of the keys that the imported run sets. Other keys have the defaults of verl
        or RLinf.
    entries: the mappings of the keys of verl or RLinf, which contain the defaults.
    """

    def __init__(self, values: dict[str, Any], entries: tuple["KeyMapping", ...]):
        self._values = values
        self._defaults = {entry.theirs: entry.default for entry in entries if entry.default is not UNSET}

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __getitem__(self, key: str) -> Any:
        """Return the value that the imported run sets for a key of verl or RLinf.

        If the run does not set the key, the result is the default of verl or RLinf; None if no default is
        known. A text such as "1" or "true" is returned as a number or bool. Raises NotKnown if the value is a
        text with a $VARIABLE.
        """
        value = self._values.get(key, self._defaults.get(key))
        if isinstance(value, str) and "$" in value:
            raise NotKnown(f"the value of {key}={value} is not known here")
        return plain(value)

    def below(self, section: str) -> dict[str, Any]:
        """Return {key without the section's name: value} of the keys that the run sets in a section."""
        return {
            key.removeprefix(f"{section}."): self[key]
            for key in self._values
            if key.startswith(f"{section}.")
        }

    def number(self, key: str) -> float | int:
        """Return the value of a key as a finite number. Raises CannotCarry for anything else."""
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise CannotCarry(f"{key}={value!r} is not a number")
        return int(value) if float(value).is_integer() else float(value)

    def count(self, key: str) -> int:
        """Return the value of a key as a whole number of at least 1. Raises CannotCarry for anything else."""
        value = self.number(key)
        if not isinstance(value, int) or value < 1:
            raise CannotCarry(f"{key} must be a whole number of at least 1, but is {value}")
        return value


# convert(value, all settings) returns the value of the key KeyMapping.ours, or {our key: value} for several
# keys.
Convert = Callable[[Any, Source], Any]


@dataclass(frozen=True)
class KeyMapping:
    """Mapping of one key of the other system (verl or RLinf), or of all keys that match a pattern."""

    theirs: str
    """Key of the other system, such as `data.shuffle`; a pattern if it contains `*`."""
    ours: tuple[str, ...] = ()
    """Keys of grpo_megatron that the key becomes. Empty: no key is set, and `note` says why."""
    note: str = ""
    """Difference between `theirs` and `ours` in words, for the documentation and the report."""
    convert: Convert | None = None
    """Function that turns the value of `theirs` into the values of `ours`. None: the value stays as it is."""
    default: Any = UNSET
    """The other system's default, carried over if the key is not set. UNSET: nothing is carried over."""
    unit: str = ""
    """The units of both values as `theirs -> ours`, such as `MiB -> bytes`; empty if the unit is the same."""
    changes_training: bool = False
    """True if a value that cannot be carried over changes what is trained, which the user must accept."""

    @property
    def is_pattern(self) -> bool:
        return "*" in self.theirs


@dataclass(frozen=True)
class Finding:
    """A difference between what the original run and the imported run train, which the user must accept.

    text: description of the difference, for the report.
    settled_by: keys of grpo_megatron. If the user sets one of these keys by hand, the finding is dropped.
    """

    text: str
    settled_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """A system from which settings can be imported, and the mapping of its keys to those of grpo_megatron.

    name: the system's usual name.
    entries: mappings of exact keys and of patterns such as `trainer.*`. An exact key takes precedence over
        patterns, and an earlier pattern over a later one.
    findings: function that returns further differences in what is trained, which `entries` do not report.
    refusal: function that returns why a run with these settings cannot be imported; None if it can.
    """

    name: str
    entries: tuple[KeyMapping, ...]
    findings: Callable[[Source, Settings], list[Finding]]
    refusal: Callable[[Source, Settings], str | None]

    def entry_for(self, key: str) -> KeyMapping | None:
        """Return the mapping of a key of this system; None if no exact key and no pattern matches the key."""
        for entry in self.entries:
            if entry.theirs == key:
                return entry
        return next(
            (entry for entry in self.entries if entry.is_pattern and fnmatchcase(key, entry.theirs)), None
        )

    def table(self) -> str:
        """Return the mappings as Markdown lists. docs/coming-from-*.md has the lists word for word.

        The lists have the keys with the same meaning in grpo_megatron, and the keys with another form or
        meaning. Keys with the same counterpart and note share a line. Keys that must have one value, such as
        `only false`, and keys without a counterpart are left out: the report of an import says why.
        """
        rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for entry in self.entries:
            unit = f"unit: {entry.unit}" if entry.unit else ""
            note = "; ".join(part for part in (unit, entry.note) if part)
            if entry.ours and not _ONE_VALUE.match(note):
                rows.setdefault((entry.ours, note), []).append(entry.theirs)
        equal = [(tuple(theirs), ours) for (ours, note), theirs in rows.items() if not note]
        translated = [
            f"{_code(theirs)} → {_code(ours)}: {note}" for (ours, note), theirs in rows.items() if note
        ]
        return "\n\n".join(
            (
                "### The same meaning",
                f"The same names: {_code([ours[0] for theirs, ours in equal if theirs == ours])}.",
                _markdown(_same_meaning([pair for pair in equal if pair[0] != pair[1]])),
                "### Another form or meaning",
                _markdown(translated),
            )
        )


# Beginning of the note of a key that must have one value.
_ONE_VALUE = re.compile(r"only ([\d.-]+|null|false|true|\S+$)")


def _same_meaning(pairs: list[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Return a line for each pair (keys of the other system, keys of grpo_megatron).

    Pairs of the same two sections share a line.
    """
    moved: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for theirs, ours in pairs:
        if len(theirs) == len(ours) == 1:
            (section, _, name), (our_section, _, our_name) = (
                theirs[0].rpartition("."),
                ours[0].rpartition("."),
            )
            moved.setdefault((section, our_section), []).append((name, our_name))
    moved = {sections: names for sections, names in moved.items() if len(names) > 1}
    together = {f"{section}.{name}" for (section, _), names in moved.items() for name, _ in names}
    lines = [
        f"`{theirs}.*` → `{ours}.*`: {', '.join(_renamed(*pair) for pair in names)}"
        for (theirs, ours), names in moved.items()
    ]
    return lines + [f"{_code(theirs)} → {_code(ours)}" for theirs, ours in pairs if theirs[0] not in together]


def _renamed(name: str, our_name: str) -> str:
    return f"`{name}`" if name == our_name else f"`{name}` → `{our_name}`"


def _code(keys: Sequence[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _markdown(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def same(theirs: str, ours: str, note: str = "", default: Any = UNSET) -> KeyMapping:
    """Return the mapping of a key that has the same meaning in grpo_megatron, under the name `ours`.

    theirs, ours: name of the key in verl or RLinf, and in grpo_megatron.
    note: difference between the two keys in words, for the documentation and the report.
    default: the default of verl or RLinf, carried over if the run does not set the key. UNSET: no default is
        carried over.
    """
    return KeyMapping(theirs, (ours,), note, None, default)


def becomes(
    theirs: str,
    ours: str | tuple[str, ...],
    convert: Convert,
    note: str = "",
    default: Any = UNSET,
    unit: str = "",
) -> KeyMapping:
    """Return the mapping of a key whose value the function `convert` translates.

    theirs: name of the key in verl or RLinf.
    ours: the key of grpo_megatron, or several keys.
    convert: function (value, all settings) that returns the value of `ours`, or {key: value} for several.
    note, default: as in `same`: description of the difference, and default of verl or RLinf.
    unit: the units of both values as `theirs -> ours`; empty if they are equal.
    """
    return KeyMapping(theirs, (ours,) if isinstance(ours, str) else ours, note, convert, default, unit)


def dropped(theirs: str, why: str) -> KeyMapping:
    """Return the mapping of a key of verl or RLinf without a counterpart in grpo_megatron.

    why: the reason, for the report.
    """
    return KeyMapping(theirs, (), why)


def trains(*entries: KeyMapping) -> tuple[KeyMapping, ...]:
    """Return copies of mappings whose keys decide what is trained, with changes_training=True.

    A value of such a key that cannot be carried over becomes a difference that the user must accept.
    """
    return tuple(replace(entry, changes_training=True) for entry in entries)

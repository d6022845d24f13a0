"""Another system's settings into ours, with an account of everything that happened to them."""

from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.keys import default_of, nested_yaml
from grpo_megatron.config.load import known_keys
from grpo_megatron.importers.mapping import UNSET, CannotCarry, Entry, Source, System
from grpo_megatron.importers.sources import Settings


@dataclass
class Import:
    """values by our dotted key, and for each where it comes from; then what a person must read.

    changed: carried over, but in another unit or definition. not_carried: known and without a
    counterpart, with the reason. absorbed: nothing had to be set for them, or another key decided.
    unknown: keys the mapping does not have. unread: other words. Every key of theirs is in one of these.
    """

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    not_carried: list[str] = field(default_factory=list)
    absorbed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def report(self) -> str:
        parts = [f"{len(self.values)} keys carried over from {self.system}"]
        for title, lines in (
            ("in another unit or definition", self.changed),
            ("could not be carried over", self.not_carried),
            ("nothing to set here", self.absorbed),
            ("unknown to this tool, not carried over", self.unknown),
            ("not read", self.unread),
        ):
            if lines:
                parts += ["", f"{title} ({len(lines)}):", *(f"  - {line}" for line in lines)]
        return "\n".join(parts)


def import_settings(system: System, settings: Settings) -> Import:
    """Everything of settings ends in one of the fields of the result; nothing is dropped."""
    result = Import(system.name, unread=list(settings.unread))
    source = Source(settings.values, system.entries)
    for entry in system.entries:
        if entry.default is not UNSET and entry.theirs not in settings.values:
            _carry_default(entry, source, result)
    order = {entry.theirs: number for number, entry in enumerate(system.entries)}
    known = []
    for key, value in settings.values.items():
        entry = system.entry_for(key)
        if entry is None:
            result.unknown.append(f"{key}={value}")
        else:
            known.append((order[entry.theirs], key, value, entry))
    # In the order of the table, so that a special key of theirs comes after the general one.
    for _, key, value, entry in sorted(known, key=lambda item: item[0]):
        _carry(key, value, entry, source, result)
    told = {
        line.partition("=")[0] for line in (*result.origins.values(), *result.changed, *result.not_carried, *result.absorbed)
    }
    result.absorbed += [f"{key}={value}: another key decides" for _, key, value, _ in known if key not in told]
    result.values = {key: result.values[key] for key in known_keys() if key in result.values}
    return result


def _carry(key: str, value: Any, entry: Entry, source: Source, result: Import) -> None:
    if not entry.ours and entry.convert is None:
        result.not_carried.append(f"{key}={value}: {entry.note}")
        return
    try:
        carried = _converted(key, value, entry, source)
    except CannotCarry as reason:
        result.not_carried.append(f"{key}={value}: {_without_key(str(reason), value)}")
        return
    for name, ours in carried.items():
        result.values[name] = ours
        result.origins[name] = f"{key}={value}"
    note = "; ".join(part for part in (entry.unit, entry.note) if part)
    names = ", ".join(f"{name}={ours}" for name, ours in carried.items())
    if note and carried:
        result.changed.append(f"{key}={value} -> {names}: {note}")
    elif not carried:
        result.absorbed.append(f"{key}={value}" + (f": {note}" if note else ""))
    result.changed += [f"{name}: replace the variable in {ours}" for name, ours in carried.items() if "$" in str(ours)]


def _without_key(reason: str, value: Any) -> str:
    return reason.removeprefix(f"{value}: ")


def _converted(key: str, value: Any, entry: Entry, source: Source) -> dict[str, Any]:
    if "$" in str(value) and not _is_text(entry):
        raise CannotCarry("not known here; set it by hand" + (f" ({', '.join(entry.ours)})" if entry.ours else ""))
    if entry.convert is None:
        return {entry.ours[0]: value}
    converted = entry.convert(value, source)
    return converted if isinstance(converted, dict) else {entry.ours[0]: converted}


def _is_text(entry: Entry) -> bool:
    return all(known_keys()[name].type in (str, str | None, Any) for name in entry.ours)


def _carry_default(entry: Entry, source: Source, result: Import) -> None:
    """Their default, where ours is another: the run that is imported used theirs."""
    try:
        carried = _converted(entry.theirs, entry.default, entry, source)
    except CannotCarry as reason:
        result.not_carried.append(f"{entry.theirs} (not set; {result.system}'s default is {entry.default}): {reason}")
        return
    for name, ours in carried.items():
        if ours != default_of(known_keys()[name]):
            result.values[name] = ours
            result.origins[name] = f"{result.system}'s default of {entry.theirs}"


def to_yaml(result: Import) -> str:
    """Our YAML, each value with its origin as a comment."""
    return nested_yaml(result.values, {key: " ".join(origin.split()) for key, origin in result.origins.items()}) + "\n"

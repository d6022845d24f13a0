"""Turn another system's settings into ours, with an account of everything that happened to them."""

from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.keys import default_of, nested_yaml
from grpo_megatron.config.load import known_keys
from grpo_megatron.errors import UserError
from grpo_megatron.importers.mapping import (
    UNSET,
    CannotCarry,
    Entry,
    Finding,
    NotKnown,
    Source,
    System,
    plain,
)
from grpo_megatron.importers.sources import Settings
from grpo_megatron.importers.typed import takes_text, typed


@dataclass
class Import:
    """Our values, and what became of every key of theirs."""

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    """By our dotted key."""
    origins: dict[str, str] = field(default_factory=dict)
    """Where each of `values` comes from."""
    given: dict[str, Any] = field(default_factory=dict)
    """Keys of ours that were set by hand."""
    findings: list[Finding] = field(default_factory=list)
    """What makes another run of it."""
    changed: list[str] = field(default_factory=list)
    """Carried over, but in another unit or definition."""
    not_carried: list[str] = field(default_factory=list)
    """Known and without a counterpart, with the reason."""
    absorbed: list[str] = field(default_factory=list)
    """Nothing had to be set for them, or another key decided."""
    unknown: list[str] = field(default_factory=list)
    """Keys that the mapping does not have."""
    unread: list[str] = field(default_factory=list)
    """Words of a script that may be settings or change them."""
    notes: list[str] = field(default_factory=list)
    """What a script takes from its caller."""

    @property
    def changes_training(self) -> list[str]:
        """What a person must accept; first what no key of ours could settle."""
        return [
            finding.text for finding in sorted(self.findings, key=lambda finding: bool(finding.settled_by))
        ]

    @property
    def needs_acceptance(self) -> bool:
        """Return whether the result may train something else: an unknown key or an unread word can mean anything."""
        return bool(self.changes_training or self.unknown or self.unread)

    def report(self) -> str:
        parts = []
        for title, lines in (
            ("changes what is trained, or is not known", self.changes_training),
            ("not read", self.unread),
            ("unknown to this tool, not carried over", self.unknown),
            ("in another unit or definition", self.changed),
            ("could not be carried over", self.not_carried),
            ("nothing to set here", self.absorbed),
            ("not part of the script", self.notes),
        ):
            if lines:
                parts += [f"{title} ({len(lines)}):", *(f"  - {line}" for line in lines), ""]
        return "\n".join([*parts, f"{len(self.values)} keys carried over from {self.system}"])


def import_settings(system: System, settings: Settings, given: dict[str, Any] | None = None) -> Import:
    """Everything of settings ends in one of the fields of the result; nothing is dropped.

    given: values of our keys, of their types, that a person sets; they win. Raises UserError for settings of another kind of run.
    """
    result = Import(system.name, given=given or {}, unread=list(settings.unread), notes=list(settings.notes))
    source = Source(settings.values, system.entries)
    known = sum(system.entry_for(key) is not None for key in settings.values)
    if not known:
        raise UserError(f"none of these keys is one of {system.name}'s")
    if known < len(settings.values) / 2:
        counted = f"only {known} of {len(settings.values)} keys are {system.name}'s"
        raise UserError(f"{counted}: this is a part of a configuration, or a file of something else")
    if refusal := system.refusal(source, settings):
        raise UserError(refusal)
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
        _carry(key, value, entry, source, result, settings.undecided.get(key))
    result.findings += [
        finding
        for finding in system.findings(source, settings)
        if not result.given.keys() & set(finding.settled_by)
    ]
    told = {
        line.partition("=")[0]
        for lines in (
            result.origins.values(),
            result.changes_training,
            result.changed,
            result.not_carried,
            result.absorbed,
        )
        for line in lines
    }
    result.absorbed += [
        f"{key}={value}: another key decides" for _, key, value, _ in known if key not in told
    ]
    result.values |= result.given
    result.origins |= dict.fromkeys(result.given, "given by hand")
    result.values = {key: result.values[key] for key in known_keys() if key in result.values}
    return result


def _carry(key: str, value: Any, entry: Entry, source: Source, result: Import, undecided: str | None) -> None:
    """Carry one of their keys over. undecided: between which values a script leaves it open, or None."""
    if not entry.ours and entry.convert is None:
        if value in (None, {}, []):
            result.absorbed.append(f"{key}={value}: nothing is set")
            return
        _leave(f"{key}={value}: {entry.note}", entry, result)
        return
    try:
        if undecided and entry.ours:
            raise NotKnown(f"{undecided}; set it by hand ({', '.join(entry.ours)})")
        carried = _converted(key, value, entry, source)
    except CannotCarry as reason:
        line = f"{key}={value}: {str(reason).removeprefix(f'{value}: ')}"
        _leave(line, entry, result, isinstance(reason, NotKnown))
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
    result.changed += [
        f"{name}: replace the variable in {ours}"
        for name, ours in carried.items()
        if "$" in str(ours) and name not in result.given
    ]


def _leave(line: str, entry: Entry, result: Import, not_known: bool = False) -> None:
    """Report what is not carried over, to be accepted if it decides what is trained or was not_known."""
    settled = [name for name in entry.ours if name in result.given]
    if settled:
        result.absorbed.append(f"{line} (settled: {settled[0]}={result.given[settled[0]]})")
    elif entry.changes_training or not_known:
        result.findings.append(Finding(line, entry.ours))
    else:
        result.not_carried.append(line)


def _converted(key: str, value: Any, entry: Entry, source: Source) -> dict[str, Any]:
    """Our keys with values of their types. Raises CannotCarry."""
    if "$" in str(value) and not all(map(takes_text, entry.ours)):
        raise NotKnown(f"not known here; set it by hand ({', '.join(entry.ours)})")
    if isinstance(value, dict):
        raise CannotCarry("a section, where one value is expected")
    if entry.convert is None:
        converted = value
    else:
        try:
            converted = entry.convert(plain(value), source)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # A converter computes with what the key is meant to hold; anything else ends here.
            raise CannotCarry(f"{value!r} is nothing this key takes") from error
    carried = converted if isinstance(converted, dict) else {entry.ours[0]: converted}
    if not carried.keys() <= known_keys().keys():
        raise CannotCarry(f"{value!r} is nothing this key takes")
    return {name: typed(name, ours) for name, ours in carried.items()}


def _carry_default(entry: Entry, source: Source, result: Import) -> None:
    """Their default, where ours is another: the run that is imported used theirs."""
    try:
        carried = _converted(entry.theirs, entry.default, entry, source)
    except CannotCarry as reason:
        _leave(
            f"{entry.theirs} (not set; {result.system}'s default is {entry.default}): {reason}", entry, result
        )
        return
    for name, ours in carried.items():
        if ours != default_of(known_keys()[name]):
            result.values[name] = ours
            result.origins[name] = f"{result.system}'s default of {entry.theirs}"


def to_yaml(result: Import) -> str:
    """Our YAML, each value with its origin as a comment."""
    return (
        nested_yaml(result.values, {key: " ".join(origin.split()) for key, origin in result.origins.items()})
        + "\n"
    )

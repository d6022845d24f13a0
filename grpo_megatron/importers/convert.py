"""Conversion of another system's settings into ours, with a report of what became of each setting.

"Ours" means the configuration of grpo_megatron, in this whole package.
"""

from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.keys import default_of, nested_yaml
from grpo_megatron.config.load import known_keys
from grpo_megatron.errors import UserError
from grpo_megatron.importers.mapping import (
    UNSET,
    CannotCarry,
    Finding,
    KeyMapping,
    NotKnown,
    Source,
    System,
    plain,
)
from grpo_megatron.importers.settings import Settings
from grpo_megatron.importers.typed import takes_text, typed


@dataclass
class Import:
    """Result of an import: the values of our keys, and a record of what became of each setting."""

    system: str
    """Name of the other system, such as "verl"."""
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key of ours -> value."""
    origins: dict[str, str] = field(default_factory=dict)
    """Key of `values` -> text that says where the value comes from."""
    given: dict[str, Any] = field(default_factory=dict)
    """Key of ours -> value that a person set by hand."""
    findings: list[Finding] = field(default_factory=list)
    """Differences that make the imported run train something else than the original one."""
    changed: list[str] = field(default_factory=list)
    """Settings that were carried over with another unit or definition, one line each."""
    not_carried: list[str] = field(default_factory=list)
    """Known settings that have no counterpart here, each with the reason."""
    absorbed: list[str] = field(default_factory=list)
    """Settings that need no key of ours, or that another setting decides, one line each."""
    unknown: list[str] = field(default_factory=list)
    """Settings whose keys the mapping does not contain."""
    unread: list[str] = field(default_factory=list)
    """Words of a launch script that could not be read. They may be settings, or change some."""
    notes: list[str] = field(default_factory=list)
    """Arguments that the launch script takes from its caller, such as "$@"."""

    @property
    def changes_training(self) -> list[str]:
        """Return the texts of the findings. Those that no key of ours could settle come first."""
        return [
            finding.text for finding in sorted(self.findings, key=lambda finding: bool(finding.settled_by))
        ]

    @property
    def needs_acceptance(self) -> bool:
        """Return True if a person must accept the result, because it may train something else.

        An unknown key or an unread word counts as well, because it can mean anything.
        """
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
    """Convert settings of another system into values of our keys.

    Each setting ends up in one field of the result, so that the report can account for all of them.

    given: values of our keys that a person sets, already in the types of those keys. They take precedence.

    Raises UserError if most of the settings are not those of this system, or not those of a GRPO run.
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
    order = {entry.theirs: index for index, entry in enumerate(system.entries)}
    known = []
    for key, value in settings.values.items():
        entry = system.entry_for(key)
        if entry is None:
            result.unknown.append(f"{key}={value}")
        else:
            known.append((order[entry.theirs], key, value, entry))
    # Carry keys over in the order of the table, so that a special key can overwrite what a general one set.
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


def _carry(
    key: str, value: Any, entry: KeyMapping, source: Source, result: Import, undecided: str | None
) -> None:
    """Convert one setting of the other system and record the outcome in `result`.

    undecided: text that lists the possible values, if the script leaves the key's value open; otherwise None.
    """
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


def _leave(line: str, entry: KeyMapping, result: Import, not_known: bool = False) -> None:
    """Record in `result` a setting that is not carried over.

    It becomes a finding, which a person must accept, if it decides what is trained or if its value is not
    known. It does not if a person has set one of the keys `entry.ours` by hand.

    line: text about the setting, for the report.
    not_known: True if the value of the setting is not known.
    """
    settled = [name for name in entry.ours if name in result.given]
    if settled:
        result.absorbed.append(f"{line} (settled: {settled[0]}={result.given[settled[0]]})")
    elif entry.changes_training or not_known:
        result.findings.append(Finding(line, entry.ours))
    else:
        result.not_carried.append(line)


def _converted(key: str, value: Any, entry: KeyMapping, source: Source) -> dict[str, Any]:
    """Return {our key: value} for a setting. The values have the types of our keys.

    Raises CannotCarry if the value has no counterpart here.
    """
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
            # A converter assumes a value of the right type, and fails like this for any other.
            raise CannotCarry(f"{value!r} is nothing this key takes") from error
    carried = converted if isinstance(converted, dict) else {entry.ours[0]: converted}
    if not carried.keys() <= known_keys().keys():
        raise CannotCarry(f"{value!r} is nothing this key takes")
    return {name: typed(name, ours) for name, ours in carried.items()}


def _carry_default(entry: KeyMapping, source: Source, result: Import) -> None:
    """Set our keys to the other system's default for a setting that the imported run left at its default.

    Keys of ours that have the same default are not set.
    """
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
    """Return the values as YAML of our configuration. A comment says which setting each value comes from."""
    return (
        nested_yaml(result.values, {key: " ".join(origin.split()) for key, origin in result.origins.items()})
        + "\n"
    )

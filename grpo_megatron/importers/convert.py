"""Conversion of the settings of verl or RLinf into a configuration of grpo_megatron.

The report says what became of each setting. In this package, "ours" is the configuration of grpo_megatron,
and "the other system" is verl or RLinf.
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
from grpo_megatron.importers.settings import ONLY_THESE, Settings
from grpo_megatron.importers.typed import takes_text, typed


@dataclass
class Import:
    """Result of converting settings of verl or RLinf: values of grpo_megatron's keys, and a report."""

    system: str
    """Name of the system that the settings come from, such as `verl`."""
    values: dict[str, Any] = field(default_factory=dict)
    """{dotted key of grpo_megatron: value}."""
    origins: dict[str, str] = field(default_factory=dict)
    """{key of `values`: text that says where its value comes from, such as `trainer.nnodes=2`}."""
    given: dict[str, Any] = field(default_factory=dict)
    """{key of grpo_megatron: value} of the values that the user set by hand."""
    findings: list[Finding] = field(default_factory=list)
    """Differences between what the original run trains and what the imported run trains."""
    changed: list[str] = field(default_factory=list)
    """Settings that were carried over with another unit or definition, as one line of text each."""
    not_carried: list[str] = field(default_factory=list)
    """Known settings that have no counterpart in grpo_megatron, each with the reason."""
    absorbed: list[str] = field(default_factory=list)
    """Settings that need no entry in `values`, or that another setting overrides, one line each."""
    unknown: list[str] = field(default_factory=list)
    """Settings whose keys the mapping does not contain, as `key=value`."""
    unread: list[str] = field(default_factory=list)
    """Words of a launch script that could not be read. They may be settings, or change settings."""
    notes: list[str] = field(default_factory=list)
    """Inputs that the launch script takes from its caller or machine, such as "$@", one line of text each."""

    @property
    def changes_training(self) -> list[str]:
        """Return one line of text for each difference between what the original and the imported run train.

        Differences that the user could settle by setting a key of grpo_megatron come last.
        """
        return [
            finding.text for finding in sorted(self.findings, key=lambda finding: bool(finding.settled_by))
        ]

    @property
    def needs_acceptance(self) -> bool:
        """Return True if the imported run may train something else than the original run.

        The reason may be a known difference, an unknown key, or an unread word of the launch script.
        tools/import_config.py then writes the imported configuration only if the user passes --accept.
        """
        return bool(self.changes_training or self.unknown or self.unread)

    def report(self) -> str:
        """Return the report of the import: a text that lists all settings not carried over unchanged."""
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
    """Convert the settings of verl or RLinf into values of grpo_megatron's keys.

    The result mentions every setting in one of its fields, unless a value in `given` has replaced it.

    system: verl or RLinf, with the mapping of its keys.
    settings: the settings, as read from a launch script or a YAML file.
    given: {key of grpo_megatron: value} that the user sets by hand, with values of the right type. They take
        precedence over the settings.

    Raises UserError if fewer than half of the keys belong to this system. Raises UserError also for a kind of
    run that cannot be imported, such as supervised fine-tuning.
    """
    result = Import(system.name, given=given or {}, unread=list(settings.unread), notes=list(settings.notes))
    source = Source(settings.values, system.entries)
    _check_keys(system, settings)
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
    reported = {
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
        f"{key}={value}: another key decides" for _, key, value, _ in known if key not in reported
    ]
    _give(result)
    result.values = {key: result.values[key] for key in known_keys() if key in result.values}
    return result


def _check_keys(system: System, settings: Settings) -> None:
    """Raise UserError if fewer than half of the keys of the settings belong to this system."""
    known = sum(system.entry_for(key) is not None for key in settings.values)
    if not known:
        raise UserError(
            f"none of these keys is a {system.name} key; check that this is the right file; {ONLY_THESE}"
        )
    if known < len(settings.values) / 2:
        counted = f"only {known} of {len(settings.values)} keys are {system.name} keys"
        raise UserError(f"{counted}; give a complete {system.name} configuration; {ONLY_THESE}")


def _give(result: Import) -> None:
    """Put the values that the user gave by hand in the place of imported ones, which are reported."""
    result.absorbed += [
        f"{result.origins[key]}: {key} is given by hand" for key in result.given if key in result.origins
    ]
    result.values |= result.given
    result.origins |= dict.fromkeys(result.given, "given by hand")


def _carry(
    key: str, value: Any, entry: KeyMapping, source: Source, result: Import, undecided: str | None
) -> None:
    """Convert one setting of verl or RLinf, and record in `result` what became of it.

    key, value: the setting.
    entry: the mapping of `key` to keys of grpo_megatron.
    source: all settings of the imported run.
    undecided: text that says what the value depends on, if the launch script leaves the value open; else
        None.
    """
    if not entry.ours and entry.convert is None:
        if value in (None, {}, []):
            result.absorbed.append(f"{key}={value}: nothing is set")
            return
        _record_not_carried(f"{key}={value}: {entry.note}", entry, result)
        return
    try:
        if undecided and entry.ours:
            raise NotKnown(f"{undecided}; set it by hand ({', '.join(entry.ours)})")
        carried = _converted(key, value, entry, source)
    except CannotCarry as reason:
        line = f"{key}={value}: {str(reason).removeprefix(f'{value}: ')}"
        _record_not_carried(line, entry, result, isinstance(reason, NotKnown))
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


def _record_not_carried(line: str, entry: KeyMapping, result: Import, not_known: bool = False) -> None:
    """Record in `result` a setting of verl or RLinf that is not carried over.

    The first of these cases that applies decides where the setting is recorded:
    - The user has set one of the corresponding keys of grpo_megatron by hand: result.absorbed.
    - The setting decides what is trained, or its value is not known: result.findings, the differences that
      the user must accept.
    - Otherwise: result.not_carried.

    line: text about the setting, for the report.
    entry: mapping of the setting's key. `entry.ours` are the corresponding keys.
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
    """Convert one setting of verl or RLinf into {key of grpo_megatron: value in the type of that key}.

    The result is empty if no key has to be set.

    key, value: the setting.
    entry: the mapping of `key` to keys of grpo_megatron.
    source: all settings of the imported run.

    Raises NotKnown if the value depends on a variable that is not known. Raises CannotCarry if the value is
    invalid or has no counterpart in grpo_megatron.
    """
    if "$" in str(value) and not all(map(takes_text, entry.ours)):
        raise NotKnown(f"not known here; set it by hand ({', '.join(entry.ours)})")
    if isinstance(value, dict):
        raise CannotCarry("this is a section, but a single value is expected")
    if entry.convert is None:
        converted = value
    else:
        try:
            converted = entry.convert(plain(value), source)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            # A converter assumes a value of the right type, and raises such an error for other types.
            raise CannotCarry(f"{value!r} is not a valid value for this key") from error
    carried = converted if isinstance(converted, dict) else {entry.ours[0]: converted}
    if not carried.keys() <= known_keys().keys():
        raise CannotCarry(f"{value!r} is not a valid value for this key")
    return {name: typed(name, ours) for name, ours in carried.items()}


def _carry_default(entry: KeyMapping, source: Source, result: Import) -> None:
    """Carry over the default of verl or RLinf for a key that the imported run does not set.

    The default is converted and written to `result.values`, unless grpo_megatron has the same default. A
    default that cannot be converted is recorded in `result` like a setting that is not carried over.

    entry: mapping of the key, with the default.
    source: all settings of the imported run.
    result: the import so far, which this function changes.
    """
    try:
        carried = _converted(entry.theirs, entry.default, entry, source)
    except CannotCarry as reason:
        _record_not_carried(
            f"{entry.theirs} (not set; {result.system}'s default is {entry.default}): {reason}", entry, result
        )
        return
    for name, ours in carried.items():
        if ours != default_of(known_keys()[name]):
            result.values[name] = ours
            result.origins[name] = f"{result.system}'s default of {entry.theirs}"


def to_yaml(result: Import) -> str:
    """Return the imported values as YAML. A comment after each value says which setting it comes from."""
    return (
        nested_yaml(result.values, {key: " ".join(origin.split()) for key, origin in result.origins.items()})
        + "\n"
    )

"""Loader that turns YAML files and `key=value` arguments into a typed Config."""

import dataclasses
from collections.abc import Iterator
from copy import deepcopy
from enum import Enum
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from grpo_megatron.config.command import Command
from grpo_megatron.config.earlier_versions import removed_value_problem
from grpo_megatron.config.keys import (
    choices_of,
    default_of,
    is_section,
    known_keys,
    type_name,
    unknown_key_problem,
    value_problem,
    value_text,
)
from grpo_megatron.config.schema import Config
from grpo_megatron.config.short import spell_out
from grpo_megatron.config.yaml_reader import read_yaml
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem

PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT = "default"
COMMAND_LINE = "command line"
# Keys beside model.path that commands require. `train` is not listed: it needs data.train only if it does not
# replay recorded samples, and a rule in preflight checks this.
_REQUIRED = {
    Command.sft: ["data.train"],
    Command.reward_model: ["data.train"],
    Command.eval: ["data.eval"],
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Settings from one source: a YAML file, a preset or a `key=value` argument.

    The layers override the schema's defaults, and later layers override earlier ones.

    source: path of the file, `preset NAME`, or `command line`. Error messages name it.
    values: nested plain values as they were written. ${references} to other keys are not resolved yet.
    lines: {dotted key: line in the file, from 1}. Empty for a preset or an argument.
    """

    source: str
    values: dict[str, Any]
    lines: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        spell_out(self.values, self.lines)


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with resolved ${references}, the origins of its values, and the refused settings."""

    config: Config
    """The typed configuration. Refused keys have their defaults, and required keys without a value `???`."""
    origins: dict[str, str]
    """{dotted key: `default`, `preset NAME`, `FILE:line` or `command line`} of all keys."""
    refused: dict[str, str]
    """{dotted key: error message} of each setting that the schema refuses. The message names the origin.

    Keys that the schema does not know are included.
    """

    @property
    def values(self) -> dict[str, Any]:
        """Return {dotted key: value} of all keys."""
        return flat(self.config)


def read_config(path: str | None, overrides: list[str], command: Command = Command.train) -> Config:
    """Load the typed configuration for a command from a file and arguments. All required keys must be set.

    Four sources are merged, each of which overrides the sources before it: the schema's defaults, the preset
    named by algorithm.preset, the YAML file, and the overrides. Rules between keys are not checked here;
    preflight.check.load_config checks them too.

    path: the YAML file. None: no file.
    overrides: arguments `key=value`.
    command: decides which keys are required.

    Raises UserError for a file or argument that cannot be read, an unknown preset, unknown keys, illegal
    values, and required keys without a value. The message lists all such keys.
    """
    settings = resolve(path, overrides)
    must_be_legal([*settings.refused.values(), *missing_values(settings.config, command)])
    return settings.config


def must_be_legal(problems: list[str]) -> None:
    """Raise UserError with all problems of a configuration, or do nothing if there are none.

    problems: one sentence for each problem.
    """
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UserError(problems[0] if len(problems) == 1 else f"the configuration is invalid:{listed}")


def resolve(path: str | None, overrides: list[str]) -> ResolvedConfig:
    """Load the typed configuration, the origins of its values, and all settings that the schema refuses.

    Four sources are merged: the schema's defaults, the preset named by algorithm.preset, the YAML file, and
    the overrides. Later sources override earlier ones. Rules between keys are not checked, nor whether
    required keys have a value.

    path: the YAML file. None: no file.
    overrides: arguments `key=value`.

    Raises UserError for a source that cannot be read, and for an unknown preset.
    """
    sources = read_sources(path, overrides)
    return merge([*read_preset(sources), *sources])


def read_sources(path: str | None, overrides: list[str]) -> list[Layer]:
    """Read the settings of the YAML file and of each argument, one Layer per source. No preset is read.

    path: the YAML file. None: no file.
    overrides: arguments `key=value`.

    Raises UserError for a file or an argument that cannot be read or parsed.
    """
    return [*_read_file(path), *map(_read_override, overrides)]


def read_preset(sources: list[Layer]) -> list[Layer]:
    """Read the preset that `algorithm.preset` names. Return a list with its Layer, or [] without a preset.

    A preset is a published recipe, a file in grpo_megatron/presets. If several sources name a preset, the
    last of them counts.

    sources: the settings of the YAML file and of the arguments.

    Raises UserError for an unknown preset.
    """
    sections = [layer.values.get("algorithm") for layer in sources]
    named = [section["preset"] for section in sections if isinstance(section, dict) and "preset" in section]
    if not named or named[-1] is None:
        return []
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if named[-1] not in known:
        raise UserError(
            f"algorithm.preset={shortened(named[-1])} is unknown; choose one of {', '.join(known)}"
        )
    return [
        Layer(f"preset {named[-1]}", layer.values) for layer in _read_file(str(PRESETS / f"{named[-1]}.yaml"))
    ]


def merge(settings: list[Layer]) -> ResolvedConfig:
    """Return the typed configuration: the schema's defaults, overridden by one layer after the other.

    Settings that the schema refuses, such as unknown keys, are left out, so that the defaults apply. They are
    listed in ResolvedConfig.refused.

    settings: the settings of each source. A later layer overrides an earlier one.
    """
    values, origins, refused = plain(Config()), dict.fromkeys(flat(Config()), DEFAULT), {}
    for layer in settings:
        _overlay(values, layer.values)
        for names, _ in leaves(layer.values):
            key = ".".join(names)
            origins[key] = f"{layer.source}:{layer.lines[key]}" if key in layer.lines else layer.source
    while True:
        config, problems = _validated(values)
        if config:
            return ResolvedConfig(config, {key: origins[key] for key in flat(config)}, refused)
        for names, problem in problems.items():
            key = ".".join(names)
            refused[key] = f"{_origin(key, origins)}: {problem}"
            # Remove the refused settings, so that the next round can check the rest.
            reduce(getitem, names[:-1], values).pop(names[-1])


def _overlay(values: dict[str, Any], layer: dict[str, Any]) -> None:
    """Write the settings of a layer into `values`. They override the values that are there.

    values, layer: nested mappings, such as Layer.values.
    """
    for name, value in layer.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _overlay(values[name], value)
        else:
            values[name] = deepcopy(value)


def _validated(values: dict[str, Any]) -> tuple[Config | None, dict[tuple[str, ...], str]]:
    """Check the values of a configuration against the schema.

    Returns (typed configuration, {}) if all values are legal, and else (None, {key: problem}). A key is a
    tuple of names, such as ("rollout", "n"). The problems may be incomplete: a caller that removes these keys
    and checks again may find more.

    values: nested mapping of settings. A value may be a ${reference} to another key. The mapping is changed
        where YAML has misread `off` as false: the value becomes the text "off".
    """
    problems = _misread(values)
    if problems:
        return None, problems
    try:
        resolved = _resolved(values)
    except OmegaConfBaseException as error:
        key = (error.full_key or "").partition("[")[0]
        if not key:
            raise UserError(str(error).splitlines()[0]) from error
        return None, {tuple(key.split(".")): f"{key}: {str(error).splitlines()[0]}"}
    try:
        return TypeAdapter(Config).validate_python(resolved), {}
    except ValidationError as error:
        return None, dict(map(_problem, error.errors()))


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with each ${reference} replaced by the value to which it refers.

    OmegaConf would take longer than all other steps of reading a configuration, so it is asked only if there
    are references.
    """
    if _has_no_references(values):
        return values
    return OmegaConf.to_container(OmegaConf.create(values), resolve=True)


def _has_no_references(value: Any) -> bool:
    """Return whether OmegaConf would return a value as it is: JSON without a ${reference}."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _has_no_references(each) for name, each in value.items())
    if isinstance(value, list):
        return all(map(_has_no_references, value))
    return "${" not in value if isinstance(value, str) else value is None or isinstance(value, int | float)


def _misread(values: dict[str, Any], parents: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Find values that OmegaConf or pydantic would misread, or refuse with an unclear message.

    An example is true for an integer, which pydantic would read as 1. The result is {key: error message}. A
    key is a tuple of names, such as ("rollout", "n").

    One kind of value is repaired instead, directly in `values`. YAML reads an unquoted `off` as false. If
    `off` is a legal choice of the key, false is changed back to the text "off".

    values: nested mapping of settings.
    parents: names of the sections around `values`; empty for the whole configuration.
    """
    problems = {}
    for name, value in values.items():
        names = (*parents, name)
        key = ".".join(names)
        field = known_keys().get(key)
        if field is None:
            continue
        if is_section(field) and isinstance(value, dict):
            problems |= _misread(value, names)
        elif is_section(field):
            first = next(iter(known_keys(field.annotation)))
            problems[names] = f"{key} is a section; set its keys, such as {key}.{first}"
        elif value == MISSING and default_of(field) != MISSING:
            problems[names] = f"{key} has no value yet (??? is a placeholder); set it"
        elif problem := removed_value_problem(key, value):
            problems[names] = problem
        elif value is False and "off" in choices_of(field.annotation):
            values[name] = "off"
        elif isinstance(value, bool) and type_name(field).startswith(("integer", "number")):
            problems[names] = f"{key}: expected {type_name(field)}, got {value_text(value)}"
    return problems


def _problem(error: dict[str, Any]) -> tuple[tuple[str, ...], str]:
    """Convert one of pydantic's errors to (names of the key, such as ("rollout", "n"), error message)."""
    names = tuple(part for part in error["loc"] if isinstance(part, str))
    key = ".".join(names)
    if error["type"] == "unexpected_keyword_argument":
        return names, unknown_key_problem(key, names[-1], error["input"])
    return names, value_problem(key, known_keys()[key], error)


def _origin(key: str, origins: dict[str, str]) -> str:
    """Return the origin (such as `FILE:line`) of the setting that gave a key its value.

    This may be a setting of the key itself, of a mapping that contains the key, or of a key inside of this
    key's mapping. The result is `default` if no source sets the key.

    origins: {dotted key: origin} of all keys, known and unknown.
    """
    return next(
        (
            origin
            for other, origin in reversed(origins.items())
            if (origin != DEFAULT and f"{key}.".startswith(f"{other}.")) or other.startswith(f"{key}.")
        ),
        DEFAULT,
    )


def plain(config: Config) -> dict[str, Any]:
    """Return the configuration as a nested dict of plain values, as a YAML file would contain them."""
    return dataclasses.asdict(
        config,
        dict_factory=lambda items: {
            name: value.value if isinstance(value, Enum) else value for name, value in items
        },
    )


def leaves(layer: dict, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names of the key, value) for each value that a layer sets, for known and unknown keys.

    The names are the parts of the dotted key, such as ("rollout", "n"). A section is not yielded, but each
    value in it. The same holds for a mapping under an unknown key. A known key that takes a mapping, such as
    reward.terms, is yielded with the whole mapping. An empty mapping is always yielded.

    layer: nested mapping of settings from one source.
    parents: names of the sections around `layer`; empty at the top level.
    """
    known = known_keys()
    for name, value in layer.items():
        names = (*parents, str(name))
        field = known.get(".".join(names))
        if isinstance(value, dict) and value and (field is None or is_section(field)):
            yield from leaves(value, names)
        else:
            yield names, value


def flat(config: Config) -> dict[str, Any]:
    """Return {dotted key: typed value} of all keys, in the order of the schema. Sections are left out."""
    return {
        key: reduce(getattr, key.split("."), config)
        for key, field in known_keys().items()
        if not is_section(field)
    }


def missing_values(config: Config, command: Command) -> list[str]:
    """Return a list with one error message if required keys of a command have no value, otherwise []."""
    required, values = ["model.path", *_REQUIRED.get(command, [])], flat(config)
    missing = [key for key in required if values[key] in (None, "", [], MISSING)]
    return [f"no value for {', '.join(missing)}; set it in the YAML file or as key=value"] if missing else []


def _read_file(path: str | None) -> list[Layer]:
    if path is None:
        return []
    problem = file_problem(path)
    if problem:
        raise UserError(f"--config {shortened(path, 300)} {problem}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    found = read_yaml(text, path)
    if found.value is None:
        return []
    if not isinstance(found.value, dict):
        raise UserError(f"{path}: expected sections at the top level, got {type(found.value).__name__}")
    return [Layer(path, found.value, found.lines)]


def _read_override(text: str) -> Layer:
    key, separator, value = text.partition("=")
    shown = shortened(repr(text))
    if not separator or not key:
        raise UserError(f"argument {shown} must have the form key=value")
    values: Any = read_yaml(value, f"argument {shown}").value
    for name in reversed(key.split(".")):
        values = {name: values}
    return Layer(COMMAND_LINE, values)

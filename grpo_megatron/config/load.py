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
from grpo_megatron.config.yaml_reader import read_yaml
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem

PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT = "default"
COMMAND_LINE = "command line"
# Keys beside model.path that commands require. `train` does not always need data.train, because a replayed
# run has no prompts; a rule in preflight checks it.
_REQUIRED = {
    Command.sft: ["data.train"],
    Command.reward_model: ["data.train"],
    Command.eval: ["data.eval"],
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """Settings from one source: a YAML file, a preset or a `key=value` argument.

    A configuration is merged from the schema's defaults and its layers.

    source: path of the file, `preset NAME`, or `command line`. Error messages name it.
    values: nested plain values as written. ${references} to other keys are not resolved yet.
    lines: {dotted key: line in the file, from 1}. Empty for a preset or an argument.
    """

    source: str
    values: dict[str, Any]
    lines: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with all ${references} resolved, and where its values come from."""

    config: Config
    """The typed configuration. Refused keys have their defaults, and required keys without a value `???`."""
    origins: dict[str, str]
    """{dotted key: `default`, `preset NAME`, `FILE:line` or `command line`} of all keys."""
    refused: dict[str, str]
    """{dotted key: error message} of each setting that the schema refuses, beginning with its origin."""

    @property
    def values(self) -> dict[str, Any]:
        """{dotted key: value} of all keys."""
        return flat(self.config)


def read_config(path: str | None, overrides: list[str], command: Command = Command.train) -> Config:
    """Return the typed configuration for a command, with all required keys set.

    It merges four sources. Each source overrides the sources before it: the schema's defaults, the preset
    named by algorithm.preset, the YAML file, and the `key=value` overrides. Rules between keys are not
    checked here; preflight.check.load_config checks them too.

    command: decides which keys are required.

    Raises UserError for an unreadable file. Raises UserError also with all unknown keys (the message names
    the nearest known key), illegal values, and required keys without a value.
    """
    settings = resolve(path, overrides)
    must_be_legal([*settings.refused.values(), *missing_values(settings.config, command)])
    return settings.config


def must_be_legal(problems: list[str]) -> None:
    """Raise UserError with all problems of a configuration. Does nothing if there are none."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UserError(problems[0] if len(problems) == 1 else f"the configuration is invalid:{listed}")


def resolve(path: str | None, overrides: list[str]) -> ResolvedConfig:
    """Return the typed configuration, where its values come from, and all settings that the schema refuses.

    This function checks neither that required keys have a value nor the rules between keys. Raises UserError
    for a source that cannot be read, and for an unknown preset.
    """
    return merge(layers(path, overrides))


def layers(path: str | None, overrides: list[str]) -> list[Layer]:
    """Return the layers of the configuration, of which later ones override earlier ones.

    They are the preset that the file or an override names, the YAML file `path`, and the `overrides`
    (key=value). Raises UserError for a source that cannot be read or parsed, and for an unknown preset. Keys
    and types are not checked here, but in `merge`.
    """
    sources = read_sources(path, overrides)
    return [*read_preset(sources), *sources]


def read_sources(path: str | None, overrides: list[str]) -> list[Layer]:
    """Return the layer of the YAML file and one layer for each argument, but not the layer of the preset.

    path: the YAML file; None: no file.

    Raises UserError for a file or an argument that cannot be read or parsed.
    """
    return [*_read_file(path), *map(_read_override, overrides)]


def read_preset(sources: list[Layer]) -> list[Layer]:
    """Return [layer of the preset that `algorithm.preset` names]; empty without a preset.

    A preset is a published recipe, a file in grpo_megatron/presets. If several sources name a preset, the
    last of them counts. Raises UserError for an unknown preset.

    sources: the layers of the YAML file and of the arguments.
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
    """Return the schema's defaults, overridden by the layers. A later layer overrides an earlier layer."""
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
            # Without the refused settings, the rest can be checked.
            reduce(getitem, names[:-1], values).pop(names[-1])


def _overlay(values: dict[str, Any], layer: dict[str, Any]) -> None:
    """Write the settings of a layer into `values`, over the values that are there.

    Both are nested values, such as Layer.values.
    """
    for name, value in layer.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _overlay(values[name], value)
        else:
            values[name] = deepcopy(value)


def _validated(values: dict[str, Any]) -> tuple[Config | None, dict[tuple[str, ...], str]]:
    """Return (typed configuration, {}), or (None, {names of the key: problem}) if some values are illegal.

    values: nested values. They may contain ${references} to each other. Not all problems are found at once.
    """
    problems = _misread(values)
    if problems:
        return None, problems
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        key = (error.full_key or "").partition("[")[0]
        if not key:
            raise UserError(str(error).splitlines()[0]) from error
        return None, {tuple(key.split(".")): f"{key}: {str(error).splitlines()[0]}"}
    try:
        return TypeAdapter(Config).validate_python(resolved), {}
    except ValidationError as error:
        return None, dict(map(_problem, error.errors()))


def _misread(values: dict[str, Any], parents: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Return {names of the key: problem} of values that OmegaConf or pydantic would take for something else.

    YAML reads a bare `off` as false. Where `off` is a choice of the key, this function changes the value back
    to the text "off".

    parents: names of the sections around `values`.
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
    """Return (names of the key, problem) for one of pydantic's errors."""
    names = tuple(part for part in error["loc"] if isinstance(part, str))
    key = ".".join(names)
    if error["type"] == "unexpected_keyword_argument":
        return names, unknown_key_problem(key, names[-1], error["input"])
    return names, value_problem(key, known_keys()[key], error)


def _origin(key: str, origins: dict[str, str]) -> str:
    """Return the origin (such as `FILE:line`) of the last setting of a key.

    A key within it, or the mapping around it, may have been set instead.

    origins: {dotted key: origin}.
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
            name: value.name if isinstance(value, Enum) else value for name, value in items
        },
    )


def leaves(layer: dict, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names, value) for each value that a layer sets, for known and unknown keys.

    names: parts of the dotted key, such as ("rollout", "n").
    value: the value as written. For a section, or a mapping under an unknown key, the values in it are
        yielded instead.

    layer: nested values, such as Layer.values.
    parents: names of the sections around `layer`.
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
    """Return {dotted key: value} of all keys, in the order of the schema. Sections are left out."""
    return {
        key: reduce(getattr, key.split("."), config)
        for key, field in known_keys().items()
        if not is_section(field)
    }


def missing_values(config: Config, command: Command) -> list[str]:
    """Return [a sentence] about the required keys of a command that have no value; empty if all have one."""
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

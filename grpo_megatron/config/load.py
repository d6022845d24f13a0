"""Loader that turns YAML files and `key=value` arguments into a typed Config."""

import copy
import dataclasses
import difflib
import math
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any, get_origin

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.config.command import Command
from grpo_megatron.config.keys import default_of, type_name
from grpo_megatron.config.schema import Config
from grpo_megatron.config.weight_sync import REMOVED_VALUES
from grpo_megatron.config.yaml_reader import read_yaml
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.paths import file_problem

PRESETS = Path(__file__).parent.parent / "presets"
# OmegaConf parses a text with references recursively, so its length must be bounded.
_LONGEST_REFERENCE = 1000
_LONGEST_KEY = 100  # comparing a longer key with all known keys takes seconds


@dataclasses.dataclass(frozen=True)
class Layer:
    """Settings from one source: a YAML file, a preset or a `key=value` argument.

    A configuration is merged from the schema's defaults and its layers.

    source: path of the file, `preset NAME`, or the argument itself. Error messages name it.
    values: nested plain values as written. ${references} to other keys are not resolved yet.
    lines: {dotted key: line in the file, from 1}. Empty for a preset or an argument.
    """

    source: str
    values: dict[str, Any]
    lines: dict[str, int] = dataclasses.field(default_factory=dict)


@cache
def known_keys(cls: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Return {dotted key: dataclass field} of the whole schema, in its order.

    It includes sections such as `rollout`. Callers leave out the parameters, which serve the recursion.
    """
    found = {}
    for field in dataclasses.fields(cls):
        found[prefix + field.name] = field
        if dataclasses.is_dataclass(field.type):
            found |= known_keys(field.type, f"{prefix}{field.name}.")
    return found


def read_config(path: str | None, overrides: list[str], command: Command = Command.train) -> Config:
    """Return the typed configuration for a command, with all required keys set.

    It merges four sources, each of which overrides those before it: the schema's defaults, the preset named
    by algorithm.preset, the YAML file, and the `key=value` overrides. Limits of values and rules between keys
    are not checked here; preflight.load.load_config checks them too.

    command: decides which keys are required.

    Raises UserError for an unreadable file, an unknown key (the message names the nearest known one), a value
    of the wrong type, or a required key without a value.
    """
    config = as_config(merge(layers(path, overrides)))
    missing = missing_keys(config, command)
    if missing:
        raise UserError(f"no value for {', '.join(missing)}; set it in the YAML file or as key=value")
    return config


def layers(path: str | None, overrides: list[str]) -> list[Layer]:
    """Return the layers of preset, YAML file and arguments, in the order in which they apply.

    Raises UserError for a source that cannot be read or parsed, and for an unknown preset. `merge` checks
    keys and types.
    """
    sources = read_sources(path, overrides)
    return [*read_preset(sources), *sources]


def read_sources(path: str | None, overrides: list[str]) -> list[Layer]:
    """Return the layer of the YAML file, then one layer for each argument; without the preset.

    path: the YAML file; None: no file.

    Raises UserError for a file or an argument that cannot be read or parsed.
    """
    return [*_read_file(path), *map(_read_override, overrides)]


def read_preset(sources: list[Layer]) -> list[Layer]:
    """Return the layer of the preset that `algorithm.preset` names; an empty list without a preset.

    A preset is a published recipe, a file in grpo_megatron/presets. If several sources name one, the last
    counts. Raises UserError for an unknown preset.
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


def merge(settings: list[Layer]) -> DictConfig:
    """Return the schema's defaults overridden by the layers. A later layer overrides an earlier one.

    Required keys may still be without a value. Raises UserError for an unknown key or a value of the wrong
    type.
    """
    created = [_create(layer) for layer in settings]
    try:
        return OmegaConf.merge(_defaults(), *created)
    except (OmegaConfBaseException, RecursionError) as joint:
        for layer, values in zip(settings, created, strict=True):
            try:
                OmegaConf.merge(_defaults(), values)
            except (OmegaConfBaseException, RecursionError) as error:
                raise UserError(f"{shortened(layer.source)}: {_plain(error)}") from error
        raise UserError(_plain(joint)) from joint


@cache
def _defaults() -> DictConfig:
    """Return the schema's defaults. Callers must not modify them; OmegaConf.merge copies them.

    They are cached because building them takes longer than everything else in a merge.
    """
    return OmegaConf.structured(Config)


def _create(layer: Layer) -> DictConfig:
    source, values = shortened(layer.source), copy.deepcopy(layer.values)
    _check_section(source, values)
    try:
        return OmegaConf.create(values)
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"{source}: {_plain(error)}") from error


def as_config(merged: DictConfig) -> Config:
    """Return the typed form of a merged configuration. A required key without a value becomes "".

    Raises UserError for a ${reference} that cannot be resolved. Raises UserError also for an integer beyond
    64 bits or NaN, which can come from a number that was written as text.
    """
    try:
        config = OmegaConf.to_object(_fill_missing(merged))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(_plain(error)) from error
    for key, value in flat(config).items():
        for number in value if isinstance(value, list) else [value]:
            # A number that was written as text has not been checked by the YAML reader.
            if isinstance(number, int) and abs(number) >= 2**63:
                raise UserError(f"{key} is not an integer of 64 bits")
            if isinstance(number, float) and math.isnan(number):
                raise UserError(f"{key}=.nan is not a number")
    return config


def flat(config: Config) -> dict[str, Any]:
    """Return {dotted key: value} of all keys, in the order of the schema. Sections have no entry."""
    return {
        key: reduce(getattr, key.split("."), config)
        for key, field in known_keys().items()
        if not dataclasses.is_dataclass(field.type)
    }


def missing_keys(config: Config, command: Command) -> list[str]:
    """Return the keys that a command requires and that have no value, such as `model.path`."""
    values = flat(config)
    return [key for key in _required(command) if values[key] in (None, "", [], MISSING)]


def _required(command: Command) -> list[str]:
    # `train` does not always need data.train: a replayed run has no prompts. A rule in preflight checks it.
    data = {Command.sft: "data.train", Command.reward_model: "data.train", Command.eval: "data.eval"}
    return ["model.path", *([data[command]] if command in data else [])]


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
            f"{path} is not valid YAML: {error.reason} at byte {error.start}, this is not UTF-8 text"
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
        raise UserError(f"argument {shown} is not of the form key=value")
    values: Any = read_yaml(value, f"argument {shown}").value
    for name in reversed(key.split(".")):
        values = {name: values}
    return Layer(text, values)


def _check_section(source: str, values: dict, prefix: str = "") -> None:
    """Check the settings of one layer before OmegaConf reads them, section by section.

    Raises UserError for an unknown key, and for a value that OmegaConf would misread. It also changes
    `values`: a bare `off`, which YAML reads as false, becomes the text again where it is a choice.

    values: settings of the section, from the layer.
    prefix: dotted name of the section with a dot at its end; empty for the top level.
    """
    known = known_keys()
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key not in known or "." in name:
            raise UserError(f"{source}: {_unknown(key, name, value)}")
        if not dataclasses.is_dataclass(known[key].type):
            values[name] = _checked(source, key, value)
        elif isinstance(value, dict):
            _check_section(source, value, f"{key}.")
        else:
            first = dataclasses.fields(known[key].type)[0].name
            raise UserError(f"{source}: {key} is a section; set its keys, such as {key}.{first}")


def _unknown(key: str, name: str, value: Any) -> str:
    shown = shortened(repr(key))
    if "." in name:
        return (
            f"{shown} is written with dots; in a file, nest it: "
            f"{shortened(name.replace('.', ': {', 1))}: ...}}"
        )
    nearest = nearest_key(key) or _buried_key(key, value)
    return f"unknown key {shown}" + (f"; did you mean {nearest!r}?" if nearest else "")


def _checked(source: str, key: str, value: Any) -> Any:
    """Return the value of a key in a form that OmegaConf reads as it was meant.

    Raises UserError for a value that OmegaConf would misread. The key must not be a section.
    """
    kind = known_keys()[key].type
    if kind is bool and isinstance(value, (int, float)) and value not in (0, 1):
        # OmegaConf would read every number but 0 as true.
        raise UserError(f"{source}: {key} is true or false, not {value}")
    if (
        get_origin(kind) in (list, dict)
        and isinstance(value, (list, dict))
        and not isinstance(value, get_origin(kind))
    ):
        # OmegaConf would raise a plain Python error that does not name the key.
        raise UserError(
            f"{source}: {key} is a {'list' if get_origin(kind) is list else 'mapping'}, not "
            f"{shortened(repr(value))}"
        )
    if isinstance(value, str) and (key, value) in REMOVED_VALUES:
        raise UserError(f"{source}: {key} can no longer be {value}; {REMOVED_VALUES[key, value]}")
    if value is False and "off" in getattr(kind, "__members__", ()):
        return "off"  # YAML reads a bare off as false, but here it is one of the choices
    for text in _texts(value):
        if "${" in text and len(text) > _LONGEST_REFERENCE:
            raise UserError(
                f"{source}: {key}: a text with a ${{reference}} has at most {_LONGEST_REFERENCE} characters"
            )
        if text == MISSING and default_of(known_keys()[key]) != MISSING:
            raise UserError(f"{source}: {key} has no value; ??? stands for one that is yet to come")
    return value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _buried_key(key: str, value) -> str | None:
    """Return the known key at the end of an unknown nested one, for a `did you mean` hint; else None.

    It finds rollout.n in verl's actor_rollout_ref.rollout.n.

    key: the unknown dotted key.
    value: its value. The first key of each nested mapping in it continues the dotted key.
    """
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return next((known for known in known_keys() if key.endswith(f".{known}")), None)


def nearest_key(key: str) -> str | None:
    """Return the known key most similar to an unknown one, for a `did you mean` hint; else None.

    A key with the same last name in another section counts as most similar.
    """
    if len(key) > _LONGEST_KEY:
        return None
    known = list(known_keys())
    last = key.rsplit(".", 1)[-1]
    # Names with the same words in another order count as equal, such as grad_clip and clip_grad.
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last] or [
        candidate
        for candidate in known
        if sorted(candidate.rsplit(".", 1)[-1].split("_")) == sorted(last.split("_"))
    ]
    if same_name:
        return difflib.get_close_matches(key, same_name, 1, cutoff=0.0)[0]
    by_name = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    section = key.rpartition(".")[0]
    siblings = [c for c in known if c.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, siblings, 1, cutoff=0.75) or difflib.get_close_matches(
        key, known, 1, cutoff=0.75
    )
    if close:
        return close[0]
    close = difflib.get_close_matches(last, by_name, 1, cutoff=0.6)
    return by_name[close[0]] if close else None


def _fill_missing(merged):
    for key in OmegaConf.missing_keys(merged):
        OmegaConf.update(merged, key, "", force_add=False)
    return merged


def _plain(error: Exception) -> str:
    """Return the first line of OmegaConf's error message, with the key and its expected type."""
    text = shortened((str(error).strip() or type(error).__name__).splitlines()[0], 300)
    key = getattr(error, "full_key", None)
    if not key:
        return text
    field = known_keys().get(key.partition("[")[0])
    return f"{text} (key {shortened(key)}" + (f": {type_name(field)})" if field else ")")

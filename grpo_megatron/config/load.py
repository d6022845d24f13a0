"""YAML files and `key=value` arguments into a typed Config."""

import dataclasses
import difflib
from pathlib import Path

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.config.keys import type_name
from grpo_megatron.config.schema import Config
from grpo_megatron.config.yaml_lines import key_lines
from grpo_megatron.errors import UserError

PRESETS = Path(__file__).parent.parent / "presets"


def known_keys(cls: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every dotted key of the schema, sections included."""
    found = {}
    for field in dataclasses.fields(cls):
        found[prefix + field.name] = field
        if dataclasses.is_dataclass(field.type):
            found |= known_keys(field.type, f"{prefix}{field.name}.")
    return found


def read_config(path: str | None, overrides: list[str], command: str = "train") -> Config:
    """Defaults, then algorithm.preset, then the YAML file, then `key=value` overrides. Rules across keys are not checked.

    command: "train" or "sft"; which keys are required. Raises UserError for an unreadable file, an unknown key
    (naming the nearest), a wrong type, or a missing value.
    """
    config = as_config(merge(layers(path, overrides)))
    missing = missing_keys(config, command)
    if missing:
        raise UserError(f"no value for {', '.join(missing)}; set it in the YAML file or as key=value")
    return config


def layers(path: str | None, overrides: list[str]) -> list[tuple[str, DictConfig]]:
    """(where it comes from, values) of everything that is set, in the order in which it applies.

    Raises UserError for what cannot be read; keys and types are not checked here but in merge.
    """
    sources = [*_read_yaml(path), *map(_read_override, overrides)]
    return [*_read_preset(sources), *sources]


def merge(settings: list[tuple[str, DictConfig]]) -> DictConfig:
    """The defaults with `settings` on top. Raises UserError for an unknown key or a wrong type."""
    merged = OmegaConf.structured(Config)
    for source, values in settings:
        _reject_unknown(source, values)
        try:
            merged = OmegaConf.merge(merged, _off_as_word(values))
        except OmegaConfBaseException as error:
            raise UserError(f"{source}: {_plain(error)}") from error
    return merged


def _off_as_word(values: DictConfig) -> DictConfig:
    """YAML reads a bare `off` as false; where off is one of the choices, it is meant."""
    for key, field in known_keys().items():
        choices = getattr(field.type, "__members__", ())
        if "off" in choices and OmegaConf.select(values, key) is False:
            values = OmegaConf.merge(values, OmegaConf.from_dotlist([f"{key}='off'"]))
    return values


def as_config(merged: DictConfig) -> Config:
    """The typed form of what merge gives. Raises UserError for a ${reference} that leads nowhere."""
    try:
        return OmegaConf.to_object(_fill_missing(merged))
    except OmegaConfBaseException as error:
        raise UserError(_plain(error)) from error


def missing_keys(config: Config, command: str) -> list[str]:
    """The keys without which this command (train or sft) cannot start, and that have no value."""
    return [key for key in _required(command) if _get(config, key) in (None, MISSING)]


def _required(command: str) -> list[str]:
    # A replayed run needs no prompts of its own; preflight.rules says when that is.
    return ["model.path"] if command == "train" else ["model.path", "data.train"]


def _read_yaml(path: str | None) -> list[tuple[str, dict]]:
    if path is None:
        return []
    if not Path(path).is_file():
        raise UserError(f"--config {path} does not exist")
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text)
        key_lines(text, path)  # refuses a key that is set twice
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected sections at the top level, got {type(values).__name__}")
    return [(path, OmegaConf.create(values))]


def _read_preset(sources: list[tuple[str, DictConfig]]) -> list[tuple[str, DictConfig]]:
    """What the last algorithm.preset of the sources stands for."""
    sections = [values.get("algorithm") for _, values in sources]
    named = [section.preset for section in sections if OmegaConf.is_dict(section) and "preset" in section]
    if not named or named[-1] is None:
        return []
    known = sorted(file.stem for file in PRESETS.glob("*.yaml"))
    if named[-1] not in known:
        raise UserError(f"algorithm.preset={named[-1]} is unknown; choose one of {', '.join(known)}")
    return [(f"preset {named[-1]}", values) for _, values in _read_yaml(str(PRESETS / f"{named[-1]}.yaml"))]


def _read_override(text: str) -> tuple[str, dict]:
    key, separator, _ = text.partition("=")
    if not separator or not key:
        raise UserError(f"argument {text!r} is not of the form key=value")
    try:
        return text, OmegaConf.from_dotlist([text])
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(f"argument {text!r} cannot be read: {_plain(error)}") from error


def _reject_unknown(source: str, values, prefix: str = "") -> None:
    known = known_keys()
    for name in values:
        key = f"{prefix}{name}"
        if "." in str(name):
            raise UserError(
                f"{source}: {key!r} is written with dots; in a file, nest it: {str(name).replace('.', ': {', 1)}: ...}}"
            )
        if key not in known:
            nearest = nearest_key(key)
            if nearest is None and OmegaConf.is_dict(values[name]):
                nearest = _buried_key(key, OmegaConf.to_container(values[name], resolve=False))
            raise UserError(f"{source}: unknown key {key!r}" + (f"; did you mean {nearest!r}?" if nearest else ""))
        if dataclasses.is_dataclass(known[key].type):
            child = OmegaConf.select(values, str(name)) if not isinstance(values, dict) else values[name]
            if child is None or not OmegaConf.is_dict(child):
                raise UserError(
                    f"{source}: {key} is a section; set its keys, such as {key}.{dataclasses.fields(known[key].type)[0].name}"
                )
            _reject_unknown(source, child, f"{key}.")
        elif known[key].type is bool and not OmegaConf.is_interpolation(values, name) and _is_other_number(values[name]):
            # OmegaConf takes every number but 0 for true.
            raise UserError(f"{source}: {key} is true or false, not {values[name]}")


def _buried_key(key: str, value) -> str | None:
    """A key of ours below sections that we do not have, such as rollout.n in actor_rollout_ref.rollout.n."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return next((known for known in known_keys() if key.endswith(f".{known}")), None)


def _is_other_number(value) -> bool:
    return isinstance(value, (int, float)) and value not in (0, 1)


def nearest_key(key: str) -> str | None:
    """The known key most like this one; a right name in a wrong section counts most."""
    known = list(known_keys())
    last = key.rsplit(".", 1)[-1]
    # Or the same words in another order, such as grad_clip and clip_grad.
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last] or [
        candidate for candidate in known if sorted(candidate.rsplit(".", 1)[-1].split("_")) == sorted(last.split("_"))
    ]
    if same_name:
        return difflib.get_close_matches(key, same_name, 1, cutoff=0.0)[0]
    by_name = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    section = key.rpartition(".")[0]
    siblings = [c for c in known if c.rpartition(".")[0] == section]
    close = difflib.get_close_matches(key, siblings, 1, cutoff=0.75) or difflib.get_close_matches(key, known, 1, cutoff=0.75)
    if close:
        return close[0]
    close = difflib.get_close_matches(last, by_name, 1, cutoff=0.6)
    return by_name[close[0]] if close else None


def _fill_missing(merged):
    for key in OmegaConf.missing_keys(merged):
        OmegaConf.update(merged, key, "", force_add=False)
    return merged


def _get(config, key: str):
    for name in key.split("."):
        config = getattr(config, name)
    return config or None


def _plain(error: Exception) -> str:
    text = str(error).strip().splitlines()[0]
    key = getattr(error, "full_key", None)
    if not key:
        return text
    field = known_keys().get(key.partition("[")[0])
    return f"{text} (key {key}" + (f": {type_name(field)})" if field else ")")

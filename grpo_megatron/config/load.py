"""YAML files and `key=value` arguments into a checked Config."""

import dataclasses
import difflib
from pathlib import Path

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.config.rules import violations
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError


def known_keys(cls: type = Config, prefix: str = "") -> dict[str, dataclasses.Field]:
    """Every dotted key of the schema, sections included."""
    found = {}
    for field in dataclasses.fields(cls):
        found[prefix + field.name] = field
        if dataclasses.is_dataclass(field.type):
            found |= known_keys(field.type, f"{prefix}{field.name}.")
    return found


def load_config(path: str | None, overrides: list[str], command: str = "train") -> Config:
    """Defaults, then the YAML file, then `key=value` overrides; all checked.

    command: "train" or "sft"; which keys are required and which rules apply. Raises UserError for
    an unreadable file, an unknown key (naming the nearest), a wrong type, a missing value, or any
    broken rule (all of them listed).
    """
    merged = OmegaConf.structured(Config)
    for source, values in [*_read_yaml(path), *map(_read_override, overrides)]:
        _reject_unknown(source, values)
        try:
            merged = OmegaConf.merge(merged, values)
        except OmegaConfBaseException as error:
            raise UserError(f"{source}: {_plain(error)}") from error
    config: Config = OmegaConf.to_object(_fill_missing(merged))
    missing = [key for key in _required(command) if _get(config, key) in (None, MISSING)]
    if missing:
        raise UserError(f"no value for {', '.join(missing)}; set it in the YAML file or as key=value")
    broken = violations(config, command)
    if broken:
        raise UserError("the configuration is not legal:\n" + "\n".join(f"  - {rule}" for rule in broken))
    return config


def _required(command: str) -> list[str]:
    # A replayed run needs no prompts of its own; rules.py says when that is.
    return ["model.path"] if command == "train" else ["model.path", "data.train"]


def _read_yaml(path: str | None) -> list[tuple[str, dict]]:
    if path is None:
        return []
    if not Path(path).is_file():
        raise UserError(f"--config {path} does not exist")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return []
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected sections at the top level, got {type(values).__name__}")
    return [(path, OmegaConf.create(values))]


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
        if key not in known:
            nearest = _nearest(key, list(known))
            raise UserError(f"{source}: unknown key {key!r}" + (f"; did you mean {nearest!r}?" if nearest else ""))
        if dataclasses.is_dataclass(known[key].type):
            child = OmegaConf.select(values, str(name)) if not isinstance(values, dict) else values[name]
            if child is None or not OmegaConf.is_dict(child):
                raise UserError(
                    f"{source}: {key} is a section; set its keys, such as {key}.{dataclasses.fields(known[key].type)[0].name}"
                )
            _reject_unknown(source, child, f"{key}.")


def _nearest(key: str, known: list[str]) -> str | None:
    """The known key most like this one; a right name in a wrong section counts most."""
    last = key.rsplit(".", 1)[-1]
    same_name = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == last]
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
    return str(error).strip().splitlines()[0] + (f" (key {error.full_key})" if getattr(error, "full_key", None) else "")

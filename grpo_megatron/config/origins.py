"""The resolved value of every key, and where it comes from."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo_megatron.config.load import as_config, known_keys, layers, merge
from grpo_megatron.config.schema import Config
from grpo_megatron.config.yaml_lines import key_lines

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Values by dotted key, and for each `default`, `preset NAME`, `FILE:line` or `command line`."""

    values: dict[str, Any]
    origins: dict[str, str]


def resolve(path: str | None, overrides: list[str]) -> Resolved:
    """All keys, with neither required keys nor rules checked. Raises UserError as merge does."""
    settings = layers(path, overrides)
    values = flat(as_config(merge(settings)))
    origins = dict.fromkeys(values, DEFAULT)
    lines = key_lines(Path(path).read_text(encoding="utf-8"), path) if path else {}
    for source, layer in settings:
        for names, _ in leaves(OmegaConf.to_container(layer, resolve=False)):
            key = ".".join(names)
            if source == path:
                origins[key] = f"{path}:{lines[key]}" if key in lines else path
            else:
                origins[key] = COMMAND_LINE if source in overrides else source
    return Resolved(values, origins)


def flat(config: Config) -> dict[str, Any]:
    """{dotted key: value}, sections left out, in the order of the schema."""
    values = {}
    for key, field in known_keys().items():
        if not dataclasses.is_dataclass(field.type):
            value = config
            for name in key.split("."):
                value = getattr(value, name)
            values[key] = value
    return values


def leaves(layer: dict, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names from the top, value as written) of what a layer sets, known or not; sections are gone into."""
    known = known_keys()
    for name, value in layer.items():
        names = (*parents, str(name))
        field = known.get(".".join(names))
        if isinstance(value, dict) and value and (field is None or dataclasses.is_dataclass(field.type)):
            yield from leaves(value, names)
        else:
            yield names, value

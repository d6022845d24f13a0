"""The resolved value of every key, and where it comes from."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from grpo_megatron.config.load import as_config, flat, known_keys, layers, merge

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
    arguments = len(settings) - len(overrides)  # they apply last
    for number, layer in enumerate(settings):
        for names, _ in leaves(layer.values):
            key = ".".join(names)
            if number >= arguments:
                origins[key] = COMMAND_LINE
            else:
                origins[key] = f"{layer.source}:{layer.lines[key]}" if key in layer.lines else layer.source
    return Resolved(values, origins)


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

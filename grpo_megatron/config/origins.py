"""The resolved value of every key and its origin."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from grpo_megatron.config.load import as_config, flat, known_keys, layers, merge

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Resolved values and their origins, both by dotted key.

    An origin is `default`, `preset NAME`, `FILE:line` or `command line`.
    """

    values: dict[str, Any]
    origins: dict[str, str]


def resolve(path: str | None, overrides: list[str]) -> Resolved:
    """Return the values and origins of all keys.

    Neither required keys nor rules are checked. Raises UserError like `merge`.
    """
    settings = layers(path, overrides)
    values = flat(as_config(merge(settings)))
    origins = dict.fromkeys(values, DEFAULT)
    arguments = len(settings) - len(overrides)  # the arguments apply last, so they are at the end
    for number, layer in enumerate(settings):
        for names, _ in leaves(layer.values):
            key = ".".join(names)
            if number >= arguments:
                origins[key] = COMMAND_LINE
            else:
                origins[key] = f"{layer.source}:{layer.lines[key]}" if key in layer.lines else layer.source
    return Resolved(values, origins)


def leaves(layer: dict, parents: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (names from the top, value as written) for each value that a layer sets, known or unknown.

    Sections are descended into.
    """
    known = known_keys()
    for name, value in layer.items():
        names = (*parents, str(name))
        field = known.get(".".join(names))
        if isinstance(value, dict) and value and (field is None or dataclasses.is_dataclass(field.type)):
            yield from leaves(value, names)
        else:
            yield names, value

"""The value of every key and where it was set, for `grpo-megatron config show` and `diff`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from grpo_megatron.config.load import as_config, flat, known_keys, layers, merge

DEFAULT = "default"
COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Value and origin of every key, both by dotted key. ${references} are resolved.

    An origin is `default`, `preset NAME`, `FILE:line` or `command line`.
    """

    values: dict[str, Any]
    origins: dict[str, str]


def resolve(path: str | None, overrides: list[str]) -> Resolved:
    """Return the value of every key, and where it was set.

    It checks neither that required keys have a value nor the rules between keys. Raises UserError for a
    source that cannot be read, an unknown key, or a value of the wrong type.
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
    """Yield (names, value) for each value that a layer sets, of known and unknown keys.

    names: parts of the dotted key, such as ("rollout", "n").
    value: as written. Sections are descended into, as are mappings under an unknown key.

    layer: nested values, such as Layer.values.
    parents: names of the sections around `layer`.
    """
    known = known_keys()
    for name, value in layer.items():
        names = (*parents, str(name))
        field = known.get(".".join(names))
        if isinstance(value, dict) and value and (field is None or dataclasses.is_dataclass(field.type)):
            yield from leaves(value, names)
        else:
            yield names, value

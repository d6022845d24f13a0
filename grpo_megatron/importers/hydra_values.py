"""Parser for the value of a Hydra argument `key=value`: numbers, quoted text, [lists] and {mappings}."""

import re
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_STAND_IN = re.compile(r"xHELDx(\d+)x")


def hydra_value(text: str, placeholders: str = "(?!)", shown: Callable[[str], str] = str) -> Any:
    """Parse the value of a Hydra argument `key=value`, such as `[1, 2]`, `{a: 1}` or `'text'`.

    A text that Hydra's grammar rejects, such as a path with a tilde, is returned as a string. Empty text and
    `None` become None. A reference ${key} is not resolved, but becomes the text $<key>.

    text: the value. It may contain placeholders, which are numbers in place of texts that are not known.
    placeholders: regular expression that matches each placeholder. The default matches nothing.
    shown: function that takes a placeholder and returns a readable text, such as "$HOME". The parsed value
        contains this text in place of the placeholder.
    """
    if text in ("", "None"):
        return None
    # A plain word stands in for each reference and placeholder while Hydra's grammar parses the text.
    held: list[str] = []

    def stand_in(match: re.Match) -> str:
        held.append(as_words(shown(match[0])))
        return f"xHELDx{len(held) - 1}x"

    plain = re.sub(f"{placeholders}|{_REFERENCE.pattern}", stand_in, text)

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return {restored(name): restored(one) for name, one in value.items()}
        if isinstance(value, list):
            return [restored(one) for one in value]
        return _STAND_IN.sub(lambda match: held[int(match[1])], value) if isinstance(value, str) else value

    try:
        value = OmegaConf.create({"text": plain, "value": "${oc.decode:${text}}"}).value
    except (OmegaConfBaseException, RecursionError):
        return restored(plain)
    return restored(OmegaConf.to_container(value) if OmegaConf.is_config(value) else value)


def as_words(value: Any) -> Any:
    """Replace each reference ${key} in a value by the text $<key>, also within lists and mappings.

    Otherwise OmegaConf would try to resolve the reference when it loads the imported configuration.
    """
    if isinstance(value, dict):
        return {as_words(name): as_words(one) for name, one in value.items()}
    if isinstance(value, list):
        return [as_words(one) for one in value]
    if not isinstance(value, str):
        return value
    before = None
    while before != value:
        before, value = value, _REFERENCE.sub(r"$<\1>", value)
    return value.replace("${", "$<")

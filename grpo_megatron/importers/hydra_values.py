"""Parser for the value of a Hydra argument `key=value`: numbers, quoted text, [lists] and {mappings}."""

import re
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_STAND_IN = re.compile(r"xHELDx(\d+)x")


def hydra_value(text: str, placeholders: str = "(?!)", shown: Callable[[str], str] = str) -> Any:
    """Return the value that Hydra's grammar reads from the text.

    A text that the grammar rejects, such as a path with a tilde, is returned unchanged.

    placeholders: regular expression that matches the parts of the text that stand for unknown texts.
    shown: function that turns such a part into readable words, which replace it in the returned value.
    """
    if text in ("", "None"):
        return None
    # A plain word replaces each reference and placeholder, so that the grammar takes neither for its own.
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
    """Return the value with ${references} written as $<references>.

    OmegaConf then does not resolve them in the imported configuration. Texts within lists and mappings are
    changed as well.
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

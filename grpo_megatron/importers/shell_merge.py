"""Merging of a script's variables after branches whose condition is not known."""

import difflib
import re

from grpo_megatron.importers.shell_expand import Value, Variables

_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w@]*(?:[./][\w@-]+)+=")


def is_setting(word: str, variables: Variables) -> bool:
    """Return whether a word is a setting: key=value with a dotted key.

    A placeholder of `Variables.hold_perhaps` is judged by the word that it stands for.
    """
    perhaps = variables.perhaps(word)
    return _SETTING.match(perhaps.word if perhaps else word) is not None


def merged(
    ends: list[dict[str, Value]], condition: str, variables: Variables
) -> tuple[dict[str, Value], dict[str, str]]:
    """Merge the variables that each branch ends with.

    Return the merged variables, and {"$NAME": its possible values and the condition} for each variable that
    is unknown. An array, or a text that consists of settings, keeps the words that all branches agree on.
    Each of its other words becomes a placeholder (`Variables.hold_perhaps`).
    """
    if len(ends) == 1:
        return ends[0], {}
    found: dict[str, Value] = {}
    reasons: dict[str, str] = {}
    for name in {name: None for end in ends for name in end}:
        values = [end.get(name) for end in ends]
        if all(value == values[0] for value in values):
            found[name] = values[0]
        elif any(isinstance(value, list) for value in values):
            found[name] = _merged_words([_words(value) for value in values], condition, variables)
        elif all(is_setting(word, variables) for value in values for word in (value or "").split()) and any(
            values
        ):
            found[name] = " ".join(
                _merged_words([(value or "").split() for value in values], condition, variables)
            )
        else:
            found[name] = variables.hold(f"${name}")
            shown = dict.fromkeys(
                "not set" if value is None else variables.shown(value) or "empty" for value in values
            )
            reasons[f"${name}"] = f"{' or '.join(shown)}, depending on {condition}"
    return found, reasons


def _words(value: Value | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _merged_words(ends: list[list[str]], condition: str, variables: Variables) -> list[str]:
    kept, *others = ends
    for other in others:
        words: list[str] = []
        for tag, *span in difflib.SequenceMatcher(None, kept, other, autojunk=False).get_opcodes():
            here, there = kept[span[0] : span[1]], other[span[2] : span[3]]
            words += (
                here if tag == "equal" else [variables.hold_perhaps(word, condition) for word in here + there]
            )
        kept = words
    return kept

"""Texts of `grpo-megatron config show`, `explain` and `diff`."""

from enum import Enum
from typing import Any

from omegaconf import MISSING
from pydantic.fields import FieldInfo

from grpo_megatron.config.keys import (
    default_of,
    is_internal,
    is_section,
    known_keys,
    nested_yaml,
    unit_of,
    unknown_key_problem,
    value_text,
)
from grpo_megatron.config.load import DEFAULT, ResolvedConfig, must_be_legal, resolve
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.preflight.docs import type_with_limits
from grpo_megatron.preflight.keys import interacting_keys, rules_about
from grpo_megatron.preflight.rule import COMMANDS, Rule


def show(path: str | None, overrides: list[str], only_set: bool = False) -> str:
    """Return the whole configuration as YAML, with the origin of each value (such as FILE:line) as a comment.

    `config show` prints this text. Loading the YAML gives the same configuration.

    path: YAML file. None: no file.
    overrides: arguments of the form key=value, which override the file.
    only_set: if True, leave out keys that have their default because no file, preset or argument sets them.

    Raises UserError if a file or an argument cannot be read, or if the schema refuses a value.
    """
    resolved = _legal(path, overrides)
    values, comments = {}, dict(resolved.origins)
    for key, value in resolved.values.items():
        if only_set and resolved.origins[key] == DEFAULT:
            continue
        values[key] = value
        if value in (MISSING, "") and _required(key):
            values[key] = MISSING
            comments[key] += "; no value yet"
    return nested_yaml(values, comments)


def _legal(path: str | None, overrides: list[str]) -> ResolvedConfig:
    """Load the settings of a file and of key=value arguments. They must be legal for the schema.

    Raises UserError if the file or an argument cannot be read, or if the schema refuses a value.
    """
    settings = resolve(path, overrides)
    must_be_legal(list(settings.refused.values()))
    return settings


def _required(key: str) -> bool:
    return default_of(known_keys()[key]) == MISSING


def explain(key: str) -> str:
    """Return the text that `config explain` prints about a configuration key or a section.

    For a key, this is its meaning, type with limits, default, related keys and rules. For a section, it is a
    list of the section's keys, without those that are only for tests.

    Raises UserError if `key` is neither a key nor a section.
    """
    known = known_keys()
    if key not in known:
        raise UserError(unknown_key_problem(key))
    if is_section(known[key]):
        return _explain_section(key)
    field = known[key]
    rows = [("type", type_with_limits(key)), ("unit", unit_of(field)), ("default", _default_text(field))]
    lines = [key, f"  {field.description}", "", *(f"  {name:<8} {text}" for name, text in rows if text)]
    others = interacting_keys(key)
    if others:
        width = max(map(len, others))
        lines += [
            "",
            "interacts with",
            *(f"  {other:<{width}}  {known[other].description}" for other in others),
        ]
    rules = rules_about(key)
    if rules:
        lines += ["", "what must hold", *(f"  - {rule.says}{_of_commands(rule)}" for rule in rules)]
    return "\n".join(lines)


def _of_commands(rule: Rule) -> str:
    return "" if rule.commands == COMMANDS else f" ({' and '.join(rule.commands)} only)"


def _explain_section(key: str) -> str:
    known = known_keys()
    children = {
        name: field
        for name, field in known.items()
        if name.rpartition(".")[0] == key and not is_internal(field)
    }
    width = max(map(len, children))
    lines = [f"{key}: {known[key].description}", ""]
    for name, field in children.items():
        what = "section" if is_section(field) else _default_text(field)
        lines.append(f"  {name:<{width}}  {field.description} [{what}]")
    return "\n".join(lines)


def _default_text(field: FieldInfo) -> str:
    default = default_of(field)
    return "none: must be set" if default == MISSING else value_text(default)


def diff(a: str, b: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Compare two configuration files. Return the keys whose values differ, for `config diff`.

    The result is {key: {"a": {"value": ..., "origin": ...}, "b": {"value": ..., "origin": ...}}}. References
    of the form ${key} are resolved before the comparison.

    a, b: paths of the files.

    Raises UserError if a file cannot be read, or if the schema refuses a value.
    """
    left, right = _legal(a, []), _legal(b, [])
    return {
        key: {"a": _entry(left, key), "b": _entry(right, key)}
        for key in left.values
        if left.values[key] != right.values[key]
    }


def _entry(resolved: ResolvedConfig, key: str) -> dict[str, Any]:
    value = resolved.values[key]
    return {"value": value.value if isinstance(value, Enum) else value, "origin": resolved.origins[key]}


def diff_text(a: str, b: str, as_json: bool) -> tuple[str, bool]:
    """Compare two configuration files. Return (text that `config diff` prints, True if any key differs).

    a, b: paths of the files.
    as_json: if True, the text is JSON instead of a list for people.

    Raises UserError if a file cannot be read, or if the schema refuses a value.
    """
    found = diff(a, b)
    if as_json:
        return json_text(found, indent=2), bool(found)
    if not found:
        return f"{a} and {b} resolve to the same configuration", False
    lines = []
    for key, sides in found.items():
        lines.append(key)
        texts = [value_text(side["value"]) for side in sides.values()]
        width = max(map(len, texts))
        lines += [
            f"  {name} {text:<{width}}  # {side['origin']}"
            for (name, side), text in zip(sides.items(), texts, strict=True)
        ]
    return "\n".join(lines), True

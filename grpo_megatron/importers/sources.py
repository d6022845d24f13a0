"""Reading the other system's configuration: YAML, or the `key=value` arguments of a launch script."""

import ast
import operator
import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.errors import UserError

_ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)$")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^${}]*))?\}|([A-Za-z_]\w*))")
_ARGUMENT = re.compile(r"^\+{0,2}([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)$", re.DOTALL)
_REMOVAL = re.compile(r"^~([A-Za-z_][\w.]*)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_KEEP_UNREAD = re.compile(r"\$\{oc\.env:")


@dataclass
class Settings:
    """values by dotted key. unread: words of a command that are no settings, each with what it is."""

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read_settings(text: str) -> Settings:
    """YAML sections or a launch command, told apart by what they look like. Raises UserError for neither."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        tree = None
    if isinstance(tree, dict) and any(isinstance(value, dict) for value in tree.values()):
        return Settings(dict(_flat(_resolved(tree))))
    settings = _read_command(text)
    if not settings.values:
        raise UserError("found neither YAML sections nor key=value arguments of a launch command")
    return settings


# YAML


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolved(tree: dict) -> dict:
    """The tree with its ${references} replaced where that is possible, and left as they are where not."""
    with _arithmetic():
        config = OmegaConf.create(tree)
        return _resolve_node(config, OmegaConf.to_container(config, resolve=False), ())


def _resolve_node(config, raw: Any, path: tuple) -> Any:
    if isinstance(raw, dict):
        return {name: _resolve_node(config, value, (*path, name)) for name, value in raw.items()}
    if isinstance(raw, list):
        return [_resolve_node(config, value, (*path, index)) for index, value in enumerate(raw)]
    if not isinstance(raw, str) or "${" not in raw or _KEEP_UNREAD.search(raw):
        return raw
    node = config
    try:
        for name in path:
            node = node[name]
    except OmegaConfBaseException:
        return raw
    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


@contextmanager
def _arithmetic() -> Iterator[None]:
    """The resolvers that RLinf's files use, within this block only."""
    resolvers = {
        "add": lambda *numbers: sum(numbers),
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "divide": lambda a, b: a / b,
        "int_div": lambda a, b: a // b,
        "not": lambda value: not value,
    }
    added = [name for name in resolvers if not OmegaConf.has_resolver(name)]
    with warnings.catch_warnings():
        # The name of this method changes between versions of omegaconf, with a warning about the old one.
        warnings.simplefilter("ignore", UserWarning)
        for name in added:
            OmegaConf.register_new_resolver(name, resolvers[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


# Launch commands


def _read_command(text: str) -> Settings:
    settings = Settings()
    variables: dict[str, str] = {}
    for raw in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = _ARITHMETIC.sub(lambda match: _computed(match[1], variables), raw)
        assignment = _ASSIGNMENT.match(line)
        words = _words(line)
        if assignment and len(words) <= 2 and "." not in assignment[1]:
            variables[assignment[1]] = _expand(_words(assignment[2])[0] if _words(assignment[2]) else "", variables)
            continue
        if any("=" in word for word in words) and _launches(words):
            _read_arguments([_expand(word, variables) for word in words], settings)
    return settings


def _computed(expression: str, variables: dict[str, str]) -> str:
    """$((...)) of whole numbers and variables with such values; another one as it is, in one word."""
    numbers = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: variables.get(match[1], match[0]), expression)
    if not re.fullmatch(r"[\d+\-*/% ()]+", numbers):
        return f"$(({''.join(expression.split())}))"
    try:
        return str(_evaluate(ast.parse(numbers.strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError, KeyError, AttributeError):
        return f"$(({''.join(expression.split())}))"


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.UnaryOp):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    return node.value


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote that is closed on another line
        return line.split()


def _launches(words: list[str]) -> bool:
    """A line that sets a few keys with dots, or calls Python; not `export A=b` nor `set -x`."""
    return any(re.fullmatch(r".*python[\d.]*|.*\.py|torchrun|-m", word) for word in words) or (
        sum(bool(_ARGUMENT.match(word)) and "." in word.partition("=")[0] for word in words) > 0
    )


def _read_arguments(words: list[str], settings: Settings) -> None:
    for word in words:
        match = _ARGUMENT.match(word)
        if match and not word.startswith("-"):
            settings.values[match[1]] = _value(match[2])
        elif _REMOVAL.match(word):
            settings.unread.append(f"{word}: removes a key of theirs")
        elif word.startswith("--config"):
            settings.unread.append(
                f"{word}: names a base configuration that was not read; import that file too, if it is your own"
            )
        elif word in ("$@", "$*", '"$@"'):
            settings.unread.append(f"{word}: further arguments of the script's caller")


def _expand(text: str, variables: dict[str, str]) -> str:
    """$NAME and ${NAME:-default} replaced by what the script itself sets; others stay as they are."""

    def value(match: re.Match) -> str:
        name = match[1] or match[3]
        if name in variables:
            return variables[name]
        return match[2] if match[2] is not None else match[0]

    return _VARIABLE.sub(value, text)


def _value(text: str) -> Any:
    """A value as Hydra reads it: YAML, and numbers such as 1e-6 without a point."""
    if "$" in text:
        return text
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value

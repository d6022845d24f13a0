"""Reading the other system's configuration: YAML, or the `key=value` arguments of a launch script."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_megatron.errors import UserError
from grpo_megatron.importers.hydra_values import as_words, hydra_value
from grpo_megatron.importers.shell import Launch, read_script
from grpo_megatron.importers.shell_expand import Variables
from grpo_megatron.importers.shell_tokens import ShellSyntaxError

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)\Z", re.DOTALL)
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*)")
_UNKNOWN_WORD = re.compile(r"\$(?:[\w@*]+|<.*>|\(.*\))\Z", re.DOTALL)
_KEEP_UNREAD = re.compile(r"\$\{oc\.env:")
_NEITHER = "found neither YAML sections nor key=value arguments of a launch command"


@dataclass
class Settings:
    """values by dotted key. unread: words of a command that are no settings, each with what it is.

    lost: settings that stand in the script and reach no command. program: the Python module or file that is
    launched; None for YAML. base: what the command says with --config-name, --config-path, --config-dir.
    """

    values: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    program: str | None = None
    base: dict[str, str] = field(default_factory=dict)


def read_settings(text: str, launch: int | None = None, is_yaml: bool = False) -> Settings:
    """YAML sections or a launch command, told apart by what they look like. Raises UserError for neither.

    launch: which of a script's launch commands, counted from 1. is_yaml: nothing else is tried.
    """
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        if is_yaml:
            raise UserError(f"this is no valid YAML: {' '.join(str(error).split()) or 'nested too deeply'}") from error
        tree = None
    if isinstance(tree, dict) and (is_yaml or any(isinstance(value, dict) for value in tree.values())):
        return _read_tree(tree)
    if is_yaml:
        raise UserError(f"expected YAML sections at the top level, got {type(tree).__name__}")
    return _read_command(text, launch)


# YAML


class _Loader(yaml.SafeLoader):
    """Dates stay text: no key of a training run is one."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def _read_tree(tree: dict) -> Settings:
    try:
        values = dict(_flat(_resolved(tree)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"this YAML cannot be read: {' '.join(str(error).split())}") from error
    return Settings({key: _without_references(value) for key, value in values.items()})


def _without_references(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_references(one) for one in value]
    return as_words(value) if isinstance(value, str) else value


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


def _read_command(text: str, number: int | None) -> Settings:
    try:
        script = read_script(text)
    except ShellSyntaxError as error:
        raise UserError(f"{_NEITHER}; as a script: {error}") from error
    launches = [launch for launch in script.launches if _settings(launch)]
    if not launches:
        raise UserError(_NEITHER)
    chosen = _chosen(launches, number)
    settings = Settings(unread=list(script.notes), lost=list(script.lost), program=_program(chosen))
    _read_arguments(chosen, script.variables, settings)
    settings.unread += [f"{name}: {why}" for name, why in chosen.reasons.items()]
    return settings


def _settings(launch: Launch) -> list[str]:
    return [word for word in launch.words if _ARGUMENT.match(word) and not word.startswith("-")]


def _chosen(launches: list[Launch], number: int | None) -> Launch:
    """The launch command to import. Raises UserError if several differ and none is named."""
    if number is not None:
        if not 1 <= number <= len(launches):
            raise UserError(f"--launch {number}: the script has {len(launches)} launch commands")
        return launches[number - 1]
    if any(_settings(launch) != _settings(launches[0]) for launch in launches):
        listed = "; ".join(
            f"{place} in line {launch.line} ({_program(launch) or launch.words[0]}, {len(_settings(launch))} settings)"
            for place, launch in enumerate(launches, start=1)
        )
        raise UserError(f"the script launches {len(launches)} different runs; choose one with --launch NUMBER: {listed}")
    return launches[0]


def _program(launch: Launch) -> str | None:
    """What Python is told to run: the module after the last -m before the settings, or a .py file."""
    words = launch.words[: next(place for place, word in enumerate(launch.words) if _ARGUMENT.match(word))]
    modules = [after for word, after in pairwise(words) if word == "-m"]
    files = [word for word in words if word.endswith(".py")]
    return (modules + files)[-1] if modules or files else None


def _read_arguments(launch: Launch, variables: Variables, settings: Settings) -> None:
    begun = False  # words before the program may be variables of the launcher
    for word, held in zip(launch.words, launch.held, strict=True):
        match = _ARGUMENT.match(held)
        if match and not held.startswith("-"):
            settings.values[match[1]] = hydra_value(match[2], variables.shown)
        elif _REMOVAL.match(word):
            settings.unread.append(f"{word}: removes a key of theirs")
        elif word.startswith(("--config-name", "--config-path", "--config-dir")):
            name, _, value = word.removeprefix("--config-").partition("=")
            settings.base[name] = value or _after(launch.words, word)
        elif word in ("$@", "$*"):
            settings.unread.append(f"{word}: further arguments of the script's caller")
        elif begun and _UNKNOWN_WORD.match(word):
            settings.unread.append(f"{word}: not known here, and perhaps further settings")
        begun = begun or bool(match) or word == settings.program


def _after(words: list[str], word: str) -> str:
    place = words.index(word) + 1
    return words[place] if place < len(words) else ""

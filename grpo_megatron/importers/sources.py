"""Reader of another system's configuration: YAML, or the `key=value` arguments of a launch script."""

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
from grpo_megatron.importers import others
from grpo_megatron.importers.hydra_values import as_words, hydra_value
from grpo_megatron.importers.shell import Launch, names, read_script
from grpo_megatron.importers.shell_expand import Perhaps, Variables
from grpo_megatron.importers.shell_tokens import ShellSyntaxError

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)\Z", re.DOTALL)
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*)")
_UNKNOWN_WORD = re.compile(r"\$(?:[\w@*]+|<.*>|\(.*\))\Z", re.DOTALL)
_KEEP_UNREAD = re.compile(r"\$\{oc\.env:")
_NEITHER = "found neither YAML sections nor key=value arguments of a launch command"


@dataclass
class Settings:
    """The settings of another system, and the parts of its file that could not be read."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value. A value that is not known is text with a $ in it, such as `$N` or `$<8 or 16>`."""
    undecided: dict[str, str] = field(default_factory=dict)
    """Key of `values` whose value is not certain -> text that says what it depends on."""
    unread: list[str] = field(default_factory=list)
    """Words of a launch script that may be settings or change some, each with an explanation."""
    notes: list[str] = field(default_factory=list)
    """Arguments that the launch script takes from its caller, such as "$@". Often there are none."""
    lost: list[str] = field(default_factory=list)
    """Settings that occur in the launch script but are passed to no command."""
    program: str | None = None
    """Python module, .py file or .sh file that is launched; None for YAML."""
    base: dict[str, str] = field(default_factory=dict)
    """Values of --config-name, --config-path and --config-dir, under the keys name, path and dir."""


def read_settings(
    text: str, launch: int | None = None, is_yaml: bool = False, environment: dict[str, str] | None = None
) -> Settings:
    """Read another system's settings from the text of a YAML file or a launch script, whichever it is.

    launch: number of the script's launch command to import, counted from 1. None: all of them must be equal.
    is_yaml: True to accept nothing but YAML.
    environment: variables that are set when the script starts.

    Raises UserError if the text is neither, or if several launch commands differ and `launch` is None. Raises
    UserError also if it is a file of a system that cannot be imported.
    """
    if problem := others.refusal(text):
        raise UserError(problem)
    try:
        tree = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        if is_yaml:
            raise UserError(
                f"this is no valid YAML: {' '.join(str(error).split()) or 'nested too deeply'}"
            ) from error
        tree = None
    if isinstance(tree, dict) and (is_yaml or any(isinstance(value, dict) for value in tree.values())):
        return _read_tree(tree)
    if is_yaml:
        raise UserError(f"expected YAML sections at the top level, got {type(tree).__name__}")
    return _read_command(text, launch, environment)


# YAML


class _Loader(yaml.SafeLoader):
    """A YAML loader that keeps dates as text, because no setting of a training run is a date."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


def _read_tree(tree: dict) -> Settings:
    try:
        values = dict(_flat(_resolved(tree)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise UserError(f"this YAML cannot be read: {' '.join(str(error).split())}") from error
    return Settings({key: as_words(value) for key, value in values.items()})


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _resolved(tree: dict) -> dict:
    """Return the tree with its ${references} replaced by what they refer to.

    References that cannot be resolved, and those to environment variables, stay as they are.
    """
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
    """Register OmegaConf resolvers that RLinf's files use, such as ${multiply:a,b}.

    OmegaConf's registry is global, so they are removed when the `with` block ends.
    """
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
        # omegaconf renamed this method; some versions warn about the old name.
        warnings.simplefilter("ignore", UserWarning)
        for name in added:
            OmegaConf.register_new_resolver(name, resolvers[name])
    try:
        yield
    finally:
        for name in added:
            OmegaConf.clear_resolver(name)


# Launch commands


def _read_command(text: str, number: int | None, environment: dict[str, str] | None) -> Settings:
    try:
        script = read_script(text, environment)
    except ShellSyntaxError as error:
        raise UserError(f"{_NEITHER}; as a script: {error}") from error
    launches = [launch for launch in script.launches if _settings(launch)]
    if not launches:
        raise UserError(_NEITHER)
    chosen = _chosen(launches, number)
    settings = Settings(unread=list(script.notes), lost=list(script.lost), program=_program(chosen))
    _Arguments(chosen, script.variables, settings).read()
    return settings


def _settings(launch: Launch) -> list[str]:
    """Return the words of a launch command that are settings or may be some: key=value, ~key, $VARIABLE."""
    return [
        word
        for word in launch.words
        if (_ARGUMENT.match(word) and not word.startswith("-"))
        or _UNKNOWN_WORD.match(word)
        or _REMOVAL.match(word)
    ]


def _chosen(launches: list[Launch], number: int | None) -> Launch:
    """Return the launch command to import.

    number: its number, counted from 1. None: the first one, if all of them have equal settings.

    Raises UserError if there is no such command, or if they differ and `number` is None.
    """
    if number is not None:
        if not 1 <= number <= len(launches):
            raise UserError(f"--launch {number}: the script has {len(launches)} launch commands")
        return launches[number - 1]
    if any(_settings(launch) != _settings(launches[0]) for launch in launches):
        listed = "; ".join(
            f"{place} in line {launch.line} ({_program(launch) or launch.words[0]}, "
            f"{len(_settings(launch))} settings)"
            for place, launch in enumerate(launches, start=1)
        )
        raise UserError(
            f"the script launches {len(launches)} different runs; choose one with --launch NUMBER: {listed}"
        )
    return launches[0]


def _program(launch: Launch) -> str | None:
    """Return the program that a launch command starts: the last .py or .sh file before the settings.

    If there is no such file, return the module after the last -m before the settings, or None.
    """
    first = next(
        (place for place, word in enumerate(launch.words) if _ARGUMENT.match(word)), len(launch.words)
    )
    words = launch.words[:first]
    modules = [after for word, after in pairwise(words) if word == "-m"]
    files = [word for word in words if word.endswith((".py", ".sh"))]
    return (modules + files)[-1] if modules or files else None


class _Arguments:
    """Reader of the words of a launch command. Its method `read` adds what they say to `settings`."""

    def __init__(self, launch: Launch, variables: Variables, settings: Settings):
        self._launch, self._variables, self._settings = launch, variables, settings
        # Settings that depend on a condition that is not known: {key: [(value, condition)]}
        self._perhaps: dict[str, list[tuple[Any, str]]] = {}

    def read(self) -> None:
        begun = False  # unknown words before the program may be variables of the launcher; they are skipped
        for word, held in zip(self._launch.words, self._launch.held, strict=True):
            perhaps = self._variables.perhaps(held)
            match = _ARGUMENT.match(perhaps.word if perhaps else held)
            if match and not match[0].startswith("-"):
                self._set(match[1], match[2], perhaps)
            elif begun or not _UNKNOWN_WORD.match(word):
                self._read_other(word, perhaps)
            begun = begun or bool(match) or word == self._settings.program
        for key, found in self._perhaps.items():
            self._leave_open(key, found)

    def _set(self, key: str, text: str, perhaps: Perhaps | None) -> None:
        value = hydra_value(text, self._variables.shown)
        if perhaps:
            self._perhaps.setdefault(key, []).append((value, perhaps.condition))
            return
        self._perhaps.pop(key, None)
        self._settings.values[key] = value
        self._settings.undecided.pop(key, None)
        if reasons := self._reasons(self._variables.shown(text)):
            self._settings.undecided[key] = reasons

    def _leave_open(self, key: str, found: list[tuple[Any, str]]) -> None:
        """Record all possible values of a key that is set only under a condition that is not known.

        found: (value, condition) of each place that may set the key.
        """
        always = [self._settings.values[key]] if key in self._settings.values else []
        values = list(dict.fromkeys(map(str, [*always, *(value for value, _ in found)])))
        if always and len(values) == 1:
            return
        listed = " or ".join(values if len(values) > 1 else [*values, "not set"])
        self._settings.values[key] = f"$<{as_words(listed)}>"
        self._settings.undecided[key] = (
            f"depends on {', '.join(dict.fromkeys(condition for _, condition in found))}"
        )

    def _read_other(self, word: str, perhaps: Perhaps | None) -> None:
        unread, condition = self._settings.unread, f", depending on {perhaps.condition}" if perhaps else ""
        plain = self._variables.shown(perhaps.word) if perhaps else word
        if _REMOVAL.match(plain):
            unread.append(f"{plain}: removes a key of theirs{condition}")
        elif plain.startswith(("--config-name", "--config-path", "--config-dir")):
            name, _, value = plain.removeprefix("--config-").partition("=")
            self._settings.base[name] = value or _after(self._launch.words, word)
        elif plain in ("$@", "$*"):
            self._settings.notes.append(f"{plain}: further arguments of the script's caller")
        elif _UNKNOWN_WORD.match(plain):
            reason = self._reasons(plain) or "not known here, and perhaps further settings"
            unread.append(f"{plain}: {reason}{condition}")

    def _reasons(self, word: str) -> str:
        found = {name: why for name, why in self._launch.reasons.items() if names(name, word)}
        return "; ".join(f"{name} is {why}" for name, why in found.items())


def _after(words: list[str], word: str) -> str:
    place = words.index(word) + 1
    return words[place] if place < len(words) else ""

"""Settings of a launch command, read from the commands that a launch script calls.

Where a script depends on what is not known, it is run again with something changed: a variable that is set,
a program that fails, files that exist. A setting that then differs is not certain.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from grpo_megatron.errors import UserError
from grpo_megatron.importers.hydra_values import as_words, hydra_value
from grpo_megatron.importers.launch_script import ALWAYS_SET, Call, Recorder, ScriptEnded, Trace
from grpo_megatron.importers.settings import Settings

NEITHER = "found neither YAML sections nor key=value arguments of a launch command"
_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)\Z", re.DOTALL)
_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w@]*(?:[./][\w@-]+)+=")
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*)")
_UNKNOWN_WORD = re.compile(r"\$(?:\w+|<.*>|\(.*\))\Z", re.DOTALL)
_VARIABLE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
# Programs whose arguments are no settings, whatever they look like.
_TALKS = ("pip", "pip3", "sed", "git", "grep", "awk", "tee", "cat")
# Variables that bash sets, or that are always set.
_OF_BASH = re.compile(
    rf"({'|'.join(ALWAYS_SET)}|BASH\w*|FUNCNAME|LINENO|RANDOM|SECONDS|PIPESTATUS|OPT\w+|REPLY|IFS|[EP]?[UP]ID)\Z"
)
_POSITIONAL = tuple(map(str, range(1, 10)))
_MOST_FAILURES = 12


@dataclass
class Launch:
    """A command that has settings (key=value) among its words."""

    call: Call
    trace: Trace

    @property
    def words(self) -> list[str]:
        return [self.trace.shown(word) for word in self.call.words]

    @property
    def program(self) -> str | None:
        """The last .py or .sh file before the settings; else the module after the last -m before them."""
        words = self.words
        words = words[: next((place for place, word in enumerate(words) if _ARGUMENT.match(word)), None)]
        modules = [after for word, after in pairwise(words) if word == "-m"]
        files = [word for word in words if word.endswith((".py", ".sh"))]
        return (modules + files)[-1] if modules or files else None

    @property
    def settings(self) -> dict[str, str]:
        """{key: its value as Hydra's text, with placeholders}."""
        return {match[1]: match[2] for match in filter(None, map(_ARGUMENT.match, self.call.words))}

    @property
    def words_of_settings(self) -> list[str]:
        return [word for word in self.words if _ARGUMENT.match(word) or _REMOVAL.match(word)]

    @property
    def other_words(self) -> list[str]:
        """The words that are no settings, from the program or the first setting on."""
        words, program = self.words, self.program
        first = next(
            (place for place, word in enumerate(words) if word == program or _ARGUMENT.match(word)), 0
        )
        return [word for word in words[first:] if not _ARGUMENT.match(word)]

    def shown(self, key: str) -> str | None:
        """Return the text of a setting; None if it is not set."""
        text = self.settings.get(key)
        return None if text is None else self.trace.shown(text)

    def shown_without(self, key: str, names: list[str]) -> str:
        """Return the text of a setting with nothing in place of the variables `names`."""

        def replace(match: re.Match) -> str:
            return "" if _mentioned(names, self.trace.shown(match[0])) else match[0]

        return self.trace.shown(re.sub(self.trace.pattern, replace, self.settings[key]))

    def known(self, key: str) -> str | None:
        """Return the text of a setting as it is in a run with `other_outputs`; None if it is not set."""
        text = self.settings.get(key)
        return None if text is None else self.trace.without_placeholders(text)

    def value(self, key: str) -> Any:
        return hydra_value(self.settings[key], self.trace.pattern, self.trace.shown)


def read_launch(script: str, number: int | None, environment: dict[str, str]) -> Settings:
    """Run a launch script in the sandbox and return the settings of a command that it launches.

    number: number of the launch command, counted from 1. None: all of them must have equal settings.
    environment: variables that are set when the script starts.
    """
    with Recorder(script, environment) as recorder:
        return _Reader(script, recorder, number, environment).read()


def _variables(script: str) -> list[str]:
    """Return the names of variables that a script reads: $NAME, ${NAME...}, and NAME in arithmetic."""
    arithmetic = " ".join(re.findall(r"\(\((.*?)\)\)", script))
    return _VARIABLE.findall(script) + re.findall(r"\b[A-Za-z_]\w*", arithmetic)


def is_argument(word: Any) -> bool:
    """Return True if this is a `key=value` argument of Hydra, or a `~key`."""
    return isinstance(word, str) and (_ARGUMENT.match(word) or _REMOVAL.match(word)) is not None


def read_arguments(words: list[str]) -> Settings:
    """Return the settings of a list of `key=value` arguments, such as Hydra's overrides.yaml."""
    settings = Settings()
    _read_words(Launch(Call(words), Trace({})), settings)
    return settings


class _Reader:
    """Reader of one launch command. `read` returns its settings."""

    def __init__(self, script: str, recorder: Recorder, number: int | None, environment: dict[str, str]):
        self._recorder, self._number = recorder, number
        self._script = re.sub(r"^\s*#.*", "", script, flags=re.M)
        self._names = [
            name
            for name in dict.fromkeys(_variables(self._script))
            if name not in environment and not _OF_BASH.match(name)
        ]
        self._settings = Settings()
        self._unknown: tuple[str, ...] = ()
        self._place = 0
        self._launch: Launch

    def read(self) -> Settings:
        trace = self._first_run()
        launches = _launches(trace)
        self._place = _chosen(launches, self._number)
        self._launch = launches[self._place]
        settings = self._settings
        settings.program = self._launch.program
        settings.unread += [f"{source}: another script, which was not read" for source in trace.sources]
        settings.unread += trace.errors
        settings.lost += [
            f"line {call.line}: settings that reach no command, as after a missing backslash: "
            f"{trace.shown(' '.join(call.words))}"
            for call in trace.calls
            if _SETTING.match(call.words[0])
        ]
        _read_words(self._launch, settings)
        # Apart from each other, because a variable hides those that its default contains.
        self._try_variables([(name,) for name in self._names if not self._has_default(name)])
        self._try_variables([(name,) for name in self._names if self._has_default(name)])
        self._try_variables([_POSITIONAL])
        self._try_failures(trace)
        if trace.tests:
            tests = dict.fromkeys(trace.tests)
            settings.notes += [f"{test}: no file of this machine was looked at" for test in tests]
            self._differs(self._run(files_exist=True), f"depends on {', '.join(tests)}")
        self._try_outputs()
        return settings

    def _first_run(self) -> Trace:
        """Run the script with as few unknown variables and arguments as it needs to launch something."""
        without_default = tuple(name for name in self._names if not self._has_default(name))
        for unknown in ((), _POSITIONAL, (*_POSITIONAL, *without_default), (*_POSITIONAL, *self._names)):
            self._unknown = unknown
            try:
                trace = self._recorder.run(self._unknown)
                while missing := [name for name in trace.not_set if name not in self._unknown]:
                    digits = [int(name) for name in missing if name.isdigit()]
                    missing += _POSITIONAL[: max(digits, default=0)]
                    self._unknown = tuple(dict.fromkeys((*self._unknown, *missing)))
                    trace = self._recorder.run(self._unknown)
            except ScriptEnded:
                if not unknown:
                    raise
                continue
            if _launches(trace):
                return trace
        raise UserError(NEITHER)

    def _has_default(self, name: str) -> bool:
        return re.search(rf"\$\{{{name}:?[-=+]", self._script) is not None

    def _run(self, unknown: tuple[str, ...] = (), **options) -> Trace | None:
        """Run the script with something changed; None if it then ends without the launch command."""
        try:
            trace = self._recorder.run((*self._unknown, *unknown), **options)
        except ScriptEnded:
            return None
        return trace if len(_launches(trace)) > self._place else None

    def _differing(self, other: Launch) -> list[str]:
        keys = self._launch.settings | other.settings
        return [key for key in keys if self._launch.shown(key) != other.shown(key)]

    def _differs(self, trace: Trace | None, reason: str) -> None:
        """Record as undecided what differs in another run. reason: text that says why."""
        if trace is None:
            return
        other = _launches(trace)[self._place]
        settings = self._settings
        for key in self._differing(other):
            values = [launch.shown(key) for launch in (self._launch, other)]
            listed = " or ".join("not set" if value is None else value for value in values)
            self._leave_open(key, f"$<{as_words(listed)}>", reason)
        for word in other.other_words:
            if word not in self._launch.other_words:
                settings.unread.append(f"{word}: {reason}")
        for source in trace.sources:
            told = f"{source}: another script, which was not read"
            if told not in settings.unread:
                settings.unread.append(f"{told}; {reason}")

    def _leave_open(self, key: str, value: str, reason: str) -> None:
        settings = self._settings
        settings.values[key] = value
        settings.undecided[key] = "; ".join(filter(None, (settings.undecided.get(key), reason)))

    def _try_outputs(self) -> None:
        """Find out what is computed from placeholders, or depends on the output of a program."""
        trace = self._run(other_outputs=True)
        other = _launches(trace)[self._place] if trace else self._launch
        names = ", ".join(
            ["the output of a program", *(f"${name}" for name in self._unknown if name.isidentifier())]
        )
        for key in self._differing(other):
            if "$(" not in (self._launch.shown(key) or "") and self._launch.known(key) != other.known(key):
                self._leave_open(key, "$<unknown>", f"depends on {names}, which is not known here")

    def _try_failures(self, trace: Trace) -> None:
        """Find out what depends on whether a program succeeds."""
        launched = [launch.call for launch in _launches(trace)]
        commands = {trace.command(call): call for call in trace.calls if call not in launched}
        together = self._run(failing=tuple(commands)) if commands else None
        if together is None or self._differing(_launches(together)[self._place]):
            for command, call in list(commands.items())[:_MOST_FAILURES]:
                reason = f"depends on whether {trace.shown(' '.join(call.words))} succeeds"
                self._differs(self._run(failing=(command,)), reason)

    # variables that are not set

    def _try_variables(self, groups: list[tuple[str, ...]]) -> None:
        """Find out what depends on variables that are not set, by setting them to placeholders.

        groups: variables that are set together. All groups are tried at once, and then ever fewer of them if
            a setting differs in another way than by a placeholder.
        """
        groups = [group for group in groups if not set(group) & set(self._unknown)]
        names = tuple(name for group in groups for name in group)
        trace = self._run(names) if names else None
        other = _launches(trace)[self._place] if trace else None
        if len(groups) > 1 and (
            other is None or not all(_mentioned(names, other.shown(key)) for key in self._differing(other))
        ):
            self._try_variables(groups[: len(groups) // 2])
            self._try_variables(groups[len(groups) // 2 :])
        elif other is not None:
            # Each of these hides the variables in the branch that is not taken now.
            decisive = self._record_variables(other, names)
            if decisive and len(groups) > 1:
                self._try_variables([group for group in groups if not decisive & set(group)])
        elif len(names) == 1 and not self._has_default(names[0]):
            # The script cannot go on with such a number.
            trace = self._run(given={names[0]: "1"})
            for key in self._differing(_launches(trace)[self._place]) if trace else ():
                self._leave_open(key, f"${names[0]}", f"depends on ${names[0]}, which is not set")

    def _record_variables(self, other: Launch, names: tuple[str, ...]) -> set[str]:
        """Record the settings that differ where the variables `names` are set to placeholders.

        Return the variables that decide which branch is taken.
        """
        settings = self._settings
        notes: dict[str, list[str]] = {}
        for key in self._differing(other):
            mentioned = _mentioned(names, other.shown(key))
            has_default = any(map(self._has_default, mentioned or names))
            if (
                mentioned
                and not has_default
                and self._launch.shown(key) == other.shown_without(key, mentioned)
            ):
                settings.values[key] = other.value(key)
            elif mentioned and has_default and self._launch.shown(key) is not None:
                continue  # the default is the value
            elif not mentioned and self._is_computed(key, other, names):
                if not has_default:
                    self._leave_open(key, "$<unknown>", f"computed from ${names[0]}, which is not set")
            else:
                notes.setdefault([*mentioned, *names][0], []).append(key)
        settings.notes += [
            f"${name}: not set; with another value, these may differ: {', '.join(keys)}"
            for name, keys in notes.items()
        ]
        for word in dict.fromkeys(other.other_words):
            mentioned = _mentioned(names, word)
            if not mentioned or word in self._launch.other_words:
                continue
            if mentioned[0].isdigit():
                told, where = "$@: further arguments of the script's caller", settings.notes
            else:
                told, where = f"{word}: not known here, and perhaps further settings", settings.unread
            if told not in where and not self._has_default(mentioned[0]):
                where.append(told)
        return set(notes)

    def _is_computed(self, key: str, other: Launch, names: tuple[str, ...]) -> bool:
        """Return True if the value of a key differs with the numbers of the placeholders for `names`."""
        trace = self._run(names, other_outputs=True)
        return trace is not None and _launches(trace)[self._place].known(key) != other.known(key)


def _launches(trace: Trace) -> list[Launch]:
    return [
        Launch(call, trace)
        for call in trace.calls
        if call.words[0] not in _TALKS
        and not _SETTING.match(call.words[0])
        and any(map(_SETTING.match, call.words))
    ]


def _chosen(launches: list[Launch], number: int | None) -> int:
    """Return the index of the launch command to import.

    number: its number, counted from 1. None: the first one, if all of them have equal settings.

    Raises UserError if there is no such command, or if they differ and `number` is None.
    """
    if number is not None:
        if not 1 <= number <= len(launches):
            raise UserError(f"--launch {number}: the script has {len(launches)} launch commands")
        return number - 1
    if any(launch.words_of_settings != launches[0].words_of_settings for launch in launches):
        listed = "; ".join(
            f"{place} in line {launch.call.line} ({launch.program or launch.words[0]}, "
            f"{len(launch.words_of_settings)} settings)"
            for place, launch in enumerate(launches, start=1)
        )
        raise UserError(
            f"the script launches {len(launches)} different runs; choose one with --launch NUMBER: {listed}"
        )
    return 0


def _mentioned(names: tuple[str, ...], text: str | None) -> list[str]:
    """Return the variables of `names` that a text contains, written as $NAME."""
    return [name for name in names if re.search(rf"\${name}(?!\w)", text or "")]


def _read_words(launch: Launch, settings: Settings) -> None:
    """Add the settings of a launch command, and what its other words say."""
    settings.values |= {key: launch.value(key) for key in launch.settings}
    words = iter(launch.other_words)
    for word in words:
        if _REMOVAL.match(word):
            settings.unread.append(f"{word}: removes a key of theirs")
        elif word.startswith(("--config-name", "--config-path", "--config-dir")):
            name, _, value = word.removeprefix("--config-").partition("=")
            settings.base[name] = value or next(words, "")
        elif re.fullmatch(r"\$\d", word):
            if not settings.notes:
                settings.notes.append("$@: further arguments of the script's caller")
        elif _UNKNOWN_WORD.match(word):
            settings.unread.append(f"{word}: not known here, and perhaps further settings")

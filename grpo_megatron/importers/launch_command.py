"""Launch command: a command of a launch script that has Hydra settings `key=value` among its words."""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from grpo_megatron.errors import UserError
from grpo_megatron.importers.hydra_values import hydra_value
from grpo_megatron.importers.launch_script import RecordedCall, Trace
from grpo_megatron.importers.settings import Settings

_ARGUMENT = re.compile(r"\+{0,2}([A-Za-z_][\w]*(?:[./][\w-]+)*)=(.*)\Z", re.DOTALL)
SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w@]*(?:[./][\w@-]+)+=")
_REMOVAL = re.compile(r"~([A-Za-z_][\w.]*)")
_UNKNOWN_WORD = re.compile(r"\$(?:\w+|<.*>|\(.*\))\Z", re.DOTALL)
OF_CALLER = "$@: further arguments of the script's caller"
UNKNOWN_WORD = "not known here, and it may contain further settings"
# Programs whose arguments are no settings, whatever they look like.
_TALKS = ("pip", "pip3", "sed", "git", "grep", "awk", "tee", "cat")


@dataclass
class Launch:
    """A launch command: a command in a shell script with Hydra settings `key=value` among its words.

    call: the command as it was recorded. Its words contain placeholders, which are numbers in place of texts
        that are not known, such as the value of $HOME
    trace: record of the script's run in which the command was called. It maps placeholders to the texts
        that they stand for
    """

    call: RecordedCall
    trace: Trace

    @property
    def words(self) -> list[str]:
        return [self.trace.shown(word) for word in self.call.words]

    @property
    def program(self) -> str | None:
        """Return the program that the command launches: a file or a module. None if neither is found.

        The program is the last .py or .sh file before the first setting. If there is no such file, it is the
        module after the last -m before the first setting.
        """
        words = self.words
        words = words[: next((index for index, word in enumerate(words) if _ARGUMENT.match(word)), None)]
        modules = [after for word, after in pairwise(words) if word == "-m"]
        files = [word for word in words if word.endswith((".py", ".sh"))]
        return (modules + files)[-1] if modules or files else None

    @property
    def settings(self) -> dict[str, str]:
        """Return {key: value as text} of the command's settings, with placeholders for unknown texts."""
        return {match[1]: match[2] for match in filter(None, map(_ARGUMENT.match, self.call.words))}

    @property
    def words_of_settings(self) -> list[str]:
        """Return the command's words that set or remove a key, such as `a.b=1`, `+a.b=1` or `~a.b`."""
        return [word for word in self.words if _ARGUMENT.match(word) or _REMOVAL.match(word)]

    @property
    def other_words(self) -> list[str]:
        """Return the words of the command that are not settings, from the program's name on.

        Words before the program, such as `python3 -m`, are left out. If the program is not found, words
        before the first setting are left out. The returned words may contain placeholders, which are numbers
        in place of texts that are not known.
        """
        words, program = self.words, self.program
        first = next(
            (index for index, word in enumerate(words) if word == program or _ARGUMENT.match(word)), 0
        )
        return [word for word in self.call.words[first:] if not _ARGUMENT.match(word)]

    def shown(self, key: str) -> str | None:
        """Return the value of a setting as readable text; None if the command does not set the key.

        Each placeholder (a number in place of an unknown text) is replaced by a name for this text, such as
        `$HOME`.
        """
        text = self.settings.get(key)
        return None if text is None else self.trace.shown(text)

    def shown_without(self, key: str, names: list[str]) -> str:
        """Return the value of a setting as readable text, without the parts that depend on some variables.

        For example, `run-$USER` becomes `run-` if `names` contains USER, and `$(date $USER)` becomes empty.

        key: key of a setting of this command.
        names: the variables, without a dollar sign.
        """

        def replace(match: re.Match) -> str:
            return "" if mentioned(names, self.trace.shown(match[0])) else match[0]

        return self.trace.shown(re.sub(self.trace.pattern, replace, self.settings[key]))

    def filled(self, key: str, filling: str = "") -> str | None:
        """Return the value of a setting as text, with `filling` in place of each part that is not known.

        Returns None if the command does not set the key.
        """
        text = self.settings.get(key)
        return None if text is None else self.trace.filled(text, filling)

    def value(self, key: str) -> Any:
        """Return the parsed value of a setting. A part that is not known becomes a text such as `$HOME`."""
        return hydra_value(self.settings[key], self.trace.pattern, self.trace.shown)


def is_argument(word: Any) -> bool:
    """Return True if `word` is an argument of Hydra: `key=value`, or `~key`, which removes a key."""
    return isinstance(word, str) and (_ARGUMENT.match(word) or _REMOVAL.match(word)) is not None


def read_arguments(words: list[str]) -> Settings:
    """Return the settings in a list of Hydra arguments, such as the lines of Hydra's overrides.yaml.

    words: arguments of the form `key=value`, `+key=value`, or `~key`, which removes a key.
    """
    settings = Settings()
    read_words(Launch(RecordedCall(words), Trace({})), settings)
    return settings


def launches(trace: Trace) -> list[Launch]:
    """Return the launch commands among the commands that a script has called, in the order of their calls.

    A launch command has at least one setting with a dotted key, such as `data.shuffle=true`. Calls of sed,
    git and similar tools are left out, because their arguments may look like settings.

    trace: record of one run of the script.
    """
    return [
        Launch(call, trace)
        for call in trace.calls
        if call.words[0] not in _TALKS
        and not SETTING.match(call.words[0])
        and any(map(SETTING.match, call.words))
    ]


def chosen(found: list[Launch], wanted: int | None) -> int:
    """Return the index in `found` of the launch command to import.

    found: all launch commands of the script.
    wanted: number of the command that the user chose, counted from 1. None: the first command, provided that
        all commands have the same settings.

    Raises UserError if there is no command of this number, or if `wanted` is None and the settings of the
    commands differ.
    """
    if wanted is not None:
        if not 1 <= wanted <= len(found):
            raise UserError(
                f"--launch {wanted} does not exist; the script has {len(found)} launch commands, numbered "
                "from 1"
            )
        return wanted - 1
    if any(launch.words_of_settings != found[0].words_of_settings for launch in found):
        listed = "; ".join(
            f"{number} in line {launch.call.line} ({launch.program or launch.words[0]}, "
            f"{len(launch.words_of_settings)} settings)"
            for number, launch in enumerate(found, start=1)
        )
        raise UserError(
            f"the script launches {len(found)} different runs; choose one with --launch NUMBER: {listed}"
        )
    return 0


def mentioned(names: tuple[str, ...], text: str | None) -> list[str]:
    """Return the variables among `names` that occur in a text as $NAME."""
    return [name for name in names if re.search(rf"\${name}(?!\w)", text or "")]


def read_words(launch: Launch, settings: Settings) -> None:
    """Write the words of a launch command into the fields of `settings`.

    The fields get these words:
    values: the settings `key=value`.
    base: the values of --config-name, --config-path and --config-dir.
    unread: removals of keys (`~key`), and words whose text is not known.
    notes: one note, if the script passes its own arguments on to the command, such as $1.
    Other words, such as the program's name, are ignored.
    """
    settings.values |= {key: launch.value(key) for key in launch.settings}
    words = map(launch.trace.shown, launch.other_words)
    for word in words:
        if _REMOVAL.match(word):
            settings.unread.append(f"{word}: removes a key of the original configuration")
        elif word.startswith(("--config-name", "--config-path", "--config-dir")):
            name, _, value = word.removeprefix("--config-").partition("=")
            settings.base[name] = value or next(words, "")
        elif re.fullmatch(r"\$\d", word):
            if OF_CALLER not in settings.notes:
                settings.notes.append(OF_CALLER)
        elif _UNKNOWN_WORD.match(word):
            settings.unread.append(f"{word}: {UNKNOWN_WORD}")

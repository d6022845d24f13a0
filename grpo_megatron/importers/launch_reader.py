"""Reader of a launch script: the settings of one of its launch commands, and how certain they are.

The script is run several times, each time under another assumption about what is not known here: a variable
is set, a program fails, files exist. A setting that differs between the runs is not certain.
"""

import re

from grpo_megatron.errors import UserError
from grpo_megatron.importers.hydra_values import as_words
from grpo_megatron.importers.launch_command import (
    OF_CALLER,
    SETTING,
    UNKNOWN_WORD,
    Launch,
    chosen,
    launches,
    mentioned,
    read_words,
)
from grpo_megatron.importers.launch_script import ALWAYS_SET, NEITHER, ScriptEnded, ScriptRecorder, Trace
from grpo_megatron.importers.settings import Settings

_ANOTHER = "another script, which was not read"
_VARIABLE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
# Variables that bash sets, or that are always set.
_OF_BASH = re.compile(
    rf"({'|'.join(ALWAYS_SET)}|BASH\w*|FUNCNAME|LINENO|RANDOM|SECONDS|PIPESTATUS|OPT\w+|REPLY|IFS|[EP]?[UP]ID)\Z"
)
_POSITIONAL = tuple(map(str, range(1, 10)))
_MOST_FAILURES = 12


def read_launch(script: str, wanted: int | None, environment: dict[str, str]) -> Settings:
    """Run a launch script in the sandbox and return the settings of a command that it launches.

    script: text of the script.
    wanted: number of the launch command, counted from 1. None: all of them must have equal settings.
    environment: variables that are set when the script starts.
    """
    with ScriptRecorder(script, environment) as recorder:
        return _Reader(script, recorder, wanted, environment).read()


class _Reader:
    """Reader of one launch command. `read` returns its settings, which the other methods complete."""

    def __init__(
        self, script: str, recorder: ScriptRecorder, wanted: int | None, environment: dict[str, str]
    ):
        self._recorder, self._wanted = recorder, wanted
        self._script = re.sub(r"^\s*#.*", "", script, flags=re.M)
        self._names = [
            name
            for name in dict.fromkeys(_variables(self._script))
            if name not in environment and not _OF_BASH.match(name)
        ]
        self._settings = Settings()
        self._unknown: tuple[str, ...] = ()
        self._prints = "placeholder"
        self._place = 0
        self._launch: Launch
        self._sources: list[str] = []

    def read(self) -> Settings:
        trace = self._first_run()
        found = launches(trace)
        self._place = chosen(found, self._wanted)
        self._launch = found[self._place]
        settings = self._settings
        settings.program = self._launch.program
        self._sources = trace.sources
        settings.unread += [f"{source}: {_ANOTHER}" for source in trace.sources]
        settings.unread += trace.errors
        settings.lost += [
            f"line {call.line}: settings that reach no command, as after a missing backslash: "
            f"{trace.shown(' '.join(call.words))}"
            for call in trace.calls
            if SETTING.match(call.words[0])
        ]
        read_words(self._launch, settings)
        # Separately, because a variable that is set hides the variables in its default.
        self._try_variables([(name,) for name in self._names if not self._has_default(name)])
        self._try_variables([(name,) for name in self._names if self._has_default(name)])
        if re.search(r"\$\{?[@*#1-9]|\bgetopts\b", self._script):
            self._try_variables([_POSITIONAL])
        self._note_conditions()
        if trace.tests:
            tests = dict.fromkeys(trace.tests)
            settings.notes += [f"{test}: no file of this machine was looked at" for test in tests]
            self._record_differences(self._run(files_exist=True), f"depends on {', '.join(tests)}")
        if len(trace.calls) > len(found) or self._unknown:
            self._try_outputs()
        self._try_failures(trace)
        return settings

    def _first_run(self) -> Trace:
        """Return the trace of a run of the script that launches something.

        As few unknown variables and arguments as possible are set to placeholders. Raises UserError if the
        script never launches anything.
        """
        without_default = tuple(name for name in self._names if not self._has_default(name))
        for prints, unknown in (
            ("placeholder", ()),
            ("nothing", ()),
            ("placeholder", _POSITIONAL),
            ("placeholder", (*_POSITIONAL, *without_default)),
            ("placeholder", (*_POSITIONAL, *self._names)),
        ):
            self._prints, self._unknown = prints, unknown
            try:
                trace = self._recorder.run(unknown, prints=prints)
                while missing := [name for name in trace.not_set if name not in self._unknown]:
                    digits = [int(name) for name in missing if name.isdigit()]
                    missing += _POSITIONAL[: max(digits, default=0)]
                    self._unknown = tuple(dict.fromkeys((*self._unknown, *missing)))
                    trace = self._recorder.run(self._unknown, prints=prints)
            except ScriptEnded:
                if not unknown:
                    raise
                continue
            if launches(trace):
                return trace
        raise UserError(NEITHER)

    def _has_default(self, name: str) -> bool:
        return re.search(rf"\$\{{{name}:?[-=+]", self._script) is not None

    def _run(self, unknown: tuple[str, ...] = (), **options) -> Trace | None:
        """Run the script under another assumption, and return its trace.

        Returns None if the launch command is then not reached.

        unknown: further variables that are set to placeholders.
        options: arguments of ScriptRecorder.run.
        """
        try:
            trace = self._recorder.run((*self._unknown, *unknown), **({"prints": self._prints} | options))
        except ScriptEnded:
            return None
        return trace if len(launches(trace)) > self._place else None

    def _differing(self, other: Launch) -> list[str]:
        keys = self._launch.settings | other.settings
        return [key for key in keys if self._launch.shown(key) != other.shown(key)]

    def _changes(self, trace: Trace) -> tuple[list[str], list[str], list[str]]:
        """Return (keys, other words, sourced scripts) in which another run differs from the first run.

        Values are compared without their placeholders, because a program that fails prints nothing in place
        of a placeholder.

        trace: the other run.
        """
        other = launches(trace)[self._place]
        keys = [key for key in self._differing(other) if self._launch.filled(key) != other.filled(key)]
        known = set(map(self._launch.trace.filled, self._launch.other_words))
        words = [word for word in other.other_words if trace.filled(word) not in known]
        return keys, list(map(trace.shown, words)), [one for one in trace.sources if one not in self._sources]

    def _record_differences(self, trace: Trace | None, reason: str) -> None:
        """Mark the settings that differ in another run as not certain.

        trace: the other run; None: nothing is marked.
        reason: text that says on what the settings depend.
        """
        if trace is None:
            return
        keys, words, sources = self._changes(trace)
        for key in keys:
            values = [launch.shown(key) for launch in (self._launch, launches(trace)[self._place])]
            listed = " or ".join("not set" if value is None else value for value in values)
            self._leave_open(key, f"$<{as_words(listed)}>", reason)
        self._settings.unread += [f"{word}: {reason}" for word in words]
        self._settings.unread += [f"{source}: {_ANOTHER}; {reason}" for source in sources]

    def _leave_open(self, key: str, value: str, reason: str) -> None:
        settings = self._settings
        if key not in settings.undecided:
            settings.values[key] = value
        settings.undecided[key] = "; ".join(filter(None, (settings.undecided.get(key), reason)))

    def _try_outputs(self) -> None:
        """Run the script with other outputs of programs, and mark the settings that change as not certain.

        These settings are computed from an output, or depend on it in another way.
        """
        names = [f"${name}" for name in self._unknown if name.isidentifier()]
        reason = f"depends on {', '.join(['the output of a program', *names])}, which is not known here"
        for prints, filling in (("1", "1"), ("nothing", "")):
            trace = self._run(prints=prints)
            other = launches(trace)[self._place] if trace else self._launch
            for key in self._differing(other):
                told = "$" in str(self._settings.values.get(key))
                if not told and self._launch.filled(key, filling) != other.filled(key, filling):
                    self._leave_open(key, "$<unknown>", reason)

    def _try_failures(self, trace: Trace) -> None:
        """Run the script with failing programs, and mark the settings that change as not certain.

        trace: the first run, whose programs all succeed.
        """
        launched = [launch.call for launch in launches(trace)]
        commands = {trace.command(call): call for call in trace.calls if call not in launched}
        together = self._run(failing=tuple(commands)) if commands else None
        if together is None or any(self._changes(together)):
            for command, call in list(commands.items())[:_MOST_FAILURES]:
                reason = f"depends on whether {trace.shown(' '.join(call.words))} succeeds"
                self._record_differences(self._run(failing=(command,)), reason)

    # variables that are not set

    def _try_variables(self, groups: list[tuple[str, ...]]) -> None:
        """Run the script with unset variables set to placeholders, and record the settings that change.

        groups: unset variables; those of a group are always set together. At first, one run sets all groups.
            If a setting then changes, but not to a value that contains a placeholder, each half of `groups`
            is tried separately.
        """
        groups = [group for group in groups if not set(group) & set(self._unknown)]
        names = tuple(name for group in groups for name in group)
        trace = self._run(names) if names else None
        other = launches(trace)[self._place] if trace else None
        if len(groups) > 1 and (
            other is None or not all(mentioned(names, other.shown(key)) for key in self._differing(other))
        ):
            self._try_variables(groups[: len(groups) // 2])
            self._try_variables(groups[len(groups) // 2 :])
        elif other is not None:
            # A decisive variable hides the variables in the branch that is not taken now.
            decisive = self._record_variables(other, names)
            if decisive and len(groups) > 1:
                self._try_variables([group for group in groups if not decisive & set(group)])
        elif len(names) == 1 and not self._has_default(names[0]):
            # The script cannot go on with a placeholder, so try 1.
            trace = self._run(given={names[0]: "1"})
            for key in self._differing(launches(trace)[self._place]) if trace else ():
                self._leave_open(key, f"${names[0]}", f"depends on ${names[0]}, which is not set")

    def _record_variables(self, other: Launch, names: tuple[str, ...]) -> set[str]:
        """Record the settings that change in a run in which variables are set to placeholders.

        Returns the variables that decide which branch of the script is taken.

        other: the launch command of this run.
        names: the variables.
        """
        settings, decisive = self._settings, dict[str, list[str]]()
        for key in self._differing(other):
            named = mentioned(names, other.shown(key))
            has_default = any(map(self._has_default, named or names))
            if named and not has_default and self._launch.shown(key) == other.shown_without(key, named):
                settings.values[key] = other.value(key)
            elif named and has_default and self._launch.shown(key) is not None:
                continue  # the default is the value
            elif not named and self._is_computed(key, other, names):
                if not has_default:
                    self._leave_open(key, "$<unknown>", f"computed from ${names[0]}, which is not set")
            else:
                decisive.setdefault([*named, *names][0], []).append(key)
        settings.notes += [
            f"${name}: not set; with another value, these may differ: {', '.join(keys)}"
            for name, keys in decisive.items()
        ]
        for word in dict.fromkeys(map(other.trace.shown, other.other_words)):
            named = mentioned(names, word)
            if not named or self._has_default(named[0]):
                continue
            if named[0].isdigit():
                _add(OF_CALLER, settings.notes)
            else:
                _add(f"{word}: {UNKNOWN_WORD}", settings.unread)
        return set(decisive)

    def _note_conditions(self) -> None:
        """Note the conditions of the script that contain unset variables, unless other values were tried."""
        noted = {note.partition(":")[0] for note in self._settings.notes}
        for name in self._names:
            assigned = re.search(rf"(?:^|[\s;(]){name}\+?=|\b(?:for|read)\s(?:-\w+\s)*{name}\b", self._script)
            condition = re.search(
                rf"^\s*((?:case|if|elif|while|\[\[?|test)\s[^;\n]*\$\{{?{name}\b[^;\n]*)", self._script, re.M
            )
            if condition and f"${name}" not in noted and (self._has_default(name) or not assigned):
                self._settings.notes.append(
                    f"${name}: not set, where the script asks for it: {condition[1].split(' in')[0]}"
                )

    def _is_computed(self, key: str, other: Launch, names: tuple[str, ...]) -> bool:
        """Return True if a key's value is computed from the variables `names`, rather than containing them.

        In the run of `other`, the variables are placeholders. Here they are set to 1. If the value only
        contains the variables, it is the same as the value of `other` with 1 in place of the placeholders.
        """
        trace = self._run(names, prints="1")
        return trace is not None and launches(trace)[self._place].filled(key, "1") != other.filled(key, "1")


def _variables(script: str) -> list[str]:
    """Return the names of variables that a script reads: $NAME, ${NAME...}, and NAME in arithmetic."""
    arithmetic = " ".join(re.findall(r"\(\((.*?)\)\)", script))
    return _VARIABLE.findall(script) + re.findall(r"\b[A-Za-z_]\w*", arithmetic)


def _add(text: str, texts: list[str]) -> None:
    if text not in texts:
        texts.append(text)

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
from grpo_megatron.importers.settings import ONLY_THESE, Settings

_ANOTHER = "another script, which was not read"
_VARIABLE = re.compile(r"\$\{?[!#]?([A-Za-z_]\w*)")
# Variables that bash sets, or that are always set.
_OF_BASH = re.compile(
    rf"({'|'.join(ALWAYS_SET)}|BASH\w*|FUNCNAME|LINENO|RANDOM|SECONDS|PIPESTATUS|OPT\w+|REPLY|IFS|[EP]?[UP]ID)\Z"
)
_POSITIONAL = tuple(map(str, range(1, 10)))
_MOST_FAILURES = 12


def read_launch(script: str, wanted: int | None, environment: dict[str, str]) -> Settings:
    """Run a launch script in a sandbox and return the settings of one of its launch commands.

    Launch commands are those with settings `key=value`. All commands are recorded, not executed.

    script: text of the script.
    wanted: number of the launch command, counted from 1. None: all launch commands must have the same
        settings.
    environment: {name: value} of the variables that are set when the script starts.

    Raises UserError if the script cannot be run, calls no launch command, or has no launch command with the
    number `wanted`, or if `wanted` is None and the settings of the launch commands differ.
    """
    with ScriptRecorder(script, environment) as recorder:
        return _Reader(script, recorder, wanted, environment).read()


class _Reader:
    """Reader of the settings `key=value` that one command in a launch script passes to its program.

    `read` takes the settings from a first run of the script in a sandbox. Each further run makes another
    assumption about the machine, such as that a program fails. Settings that differ between the first run
    and a further run are marked as uncertain.
    """

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
        self._index = 0
        self._launch: Launch
        self._sources: list[str] = []

    def read(self) -> Settings:
        """Run the script several times, and return the settings of the launch command.

        The fields `undecided`, `unread` and `notes` of the result say which settings are uncertain, and why.
        Call this method only once.
        """
        trace = self._first_run()
        found = launches(trace)
        self._index = chosen(found, self._wanted)
        self._launch = found[self._index]
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
        # Variables with a default come later: one that is set hides the variables in its default.
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
        """Run the script until it calls a launch command, under up to five assumptions. Return the record.

        The assumptions are, in this order:
        1. Programs print placeholders (numbers in place of texts that are not known).
        2. Programs print nothing.
        3. Programs print placeholders, and the script's arguments $1 to $9 are placeholders.
        4. The same, and unset variables that have no default in the script are placeholders.
        5. The same, and all unset variables are placeholders.
        In each case, variables and arguments that the script requires, as with `set -u`, are placeholders
        too. All later runs of this object keep the successful assumption.

        Raises UserError if no run calls a launch command. Raises ScriptEnded if the first run exceeds a limit
        of the sandbox. If another run exceeds a limit, the next assumption is tried.
        """
        without_default = tuple(name for name in self._names if not self._has_default(name))
        tries = (
            ("placeholder", ()),
            ("nothing", ()),
            ("placeholder", _POSITIONAL),
            ("placeholder", (*_POSITIONAL, *without_default)),
            ("placeholder", (*_POSITIONAL, *self._names)),
        )
        for index, (prints, unknown) in enumerate(tries):
            self._prints, self._unknown = prints, unknown
            try:
                trace = self._recorder.run(unknown, prints=prints)
                while missing := [name for name in trace.not_set if name not in self._unknown]:
                    digits = [int(name) for name in missing if name.isdigit()]
                    missing += _POSITIONAL[: max(digits, default=0)]
                    self._unknown = tuple(dict.fromkeys((*self._unknown, *missing)))
                    trace = self._recorder.run(self._unknown, prints=prints)
            except ScriptEnded:
                if index == 0:
                    raise
                continue
            if launches(trace):
                return trace
        raise UserError(f"{NEITHER}; {ONLY_THESE}")

    def _has_default(self, name: str) -> bool:
        return re.search(rf"\$\{{{name}:?[-=+]", self._script) is not None

    def _run(self, unknown: tuple[str, ...] = (), **options) -> Trace | None:
        """Run the script again under another assumption, and return the record of that run.

        Returns None if the run does not reach the launch command, or exceeds a limit of the sandbox.

        unknown: variables to set to placeholders (numbers in place of unknown texts), in addition to those of
            the first run.
        options: further arguments of ScriptRecorder.run, which say what is assumed.
        """
        try:
            trace = self._recorder.run((*self._unknown, *unknown), **({"prints": self._prints} | options))
        except ScriptEnded:
            return None
        return trace if len(launches(trace)) > self._index else None

    def _differing(self, other: Launch) -> list[str]:
        keys = self._launch.settings | other.settings
        return [key for key in keys if self._launch.shown(key) != other.shown(key)]

    def _changes(self, trace: Trace) -> tuple[list[str], list[str], list[str]]:
        """Compare the first run of the script with another run. Return (keys, other words, sourced scripts).

        keys: keys whose values in the launch command differ between the runs. Parts of a value that come from
            the output of a program are ignored, because a program that fails prints nothing.
        other words: words of the launch command that are not settings and occur only in the other run.
        sourced scripts: commands such as `source env.sh` that occur only in the other run.

        trace: record of the other run.
        """
        other = launches(trace)[self._index]
        keys = [key for key in self._differing(other) if self._launch.filled(key) != other.filled(key)]
        known = set(map(self._launch.trace.filled, self._launch.other_words))
        words = [word for word in other.other_words if trace.filled(word) not in known]
        return keys, list(map(trace.shown, words)), [one for one in trace.sources if one not in self._sources]

    def _record_differences(self, trace: Trace | None, reason: str) -> None:
        """Mark the settings that differ between the first run and another run of the script as uncertain.

        Other words of the launch command and sourced scripts that occur only in the other run are recorded as
        unread.

        trace: record of the other run. None: nothing is marked.
        reason: text that says what the differences depend on, for the user.
        """
        if trace is None:
            return
        keys, words, sources = self._changes(trace)
        for key in keys:
            values = [launch.shown(key) for launch in (self._launch, launches(trace)[self._index])]
            listed = " or ".join("not set" if value is None else value for value in values)
            self._leave_open(key, f"$<{as_words(listed)}>", reason)
        self._settings.unread += [f"{word}: {reason}" for word in words]
        self._settings.unread += [f"{source}: {_ANOTHER}; {reason}" for source in sources]

    def _leave_open(self, key: str, value: str, reason: str) -> None:
        """Mark a setting as uncertain. If it is marked already, keep its value and only add the reason.

        key: key of the setting.
        value: text with a $ that replaces the value of the setting, such as "$<8 or 16>".
        reason: text that says what the value depends on.
        """
        settings = self._settings
        if key not in settings.undecided:
            settings.values[key] = value
        settings.undecided[key] = "; ".join(filter(None, (settings.undecided.get(key), reason)))

    def _try_outputs(self) -> None:
        """Find the settings that are computed from the output of a program, and mark them as uncertain.

        The script is run again with programs that print 1, and with programs that print nothing. A setting
        that contains an output unchanged is not marked, because its value shows this, as in `$(nproc)`.
        """
        names = [f"${name}" for name in self._unknown if name.isidentifier()]
        reason = f"depends on {', '.join(['the output of a program', *names])}, which is not known here"
        for prints, filling in (("1", "1"), ("nothing", "")):
            trace = self._run(prints=prints)
            other = launches(trace)[self._index] if trace else self._launch
            for key in self._differing(other):
                is_marked = "$" in str(self._settings.values.get(key))
                if not is_marked and self._launch.filled(key, filling) != other.filled(key, filling):
                    self._leave_open(key, "$<unknown>", reason)

    def _try_failures(self, trace: Trace) -> None:
        """Find the settings that depend on whether a program succeeds, and mark them as uncertain.

        The script is run again with all programs failing. If this changes the launch command, or if the
        launch command is not reached, the first twelve programs are made to fail one at a time.

        trace: record of the first run, in which all programs succeed.
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
        """Find the settings that depend on variables that are not set, and record the dependence.

        The script is run with all these variables set to placeholders, which are recognisable numbers. Each
        half of `groups` is tried separately, to find the variable that matters, in two cases: the script does
        not reach the launch command, or a setting changes to a value without any of the placeholders. If a
        single variable without a default keeps the script from the launch command, it is set to 1 instead.

        groups: variables that are not set. The variables of one group are always set together.
        """
        groups = [group for group in groups if not set(group) & set(self._unknown)]
        names = tuple(name for group in groups for name in group)
        trace = self._run(names) if names else None
        other = launches(trace)[self._index] if trace else None
        if len(groups) > 1 and (
            other is None or not all(mentioned(names, other.shown(key)) for key in self._differing(other))
        ):
            self._try_variables(groups[: len(groups) // 2])
            self._try_variables(groups[len(groups) // 2 :])
        elif other is not None:
            # A variable that chose another branch hides the variables of the branch that is now left out.
            decisive = self._record_variables(other, names)
            if decisive and len(groups) > 1:
                self._try_variables([group for group in groups if not decisive & set(group)])
        elif len(names) == 1 and not self._has_default(names[0]):
            # The script cannot go on with a placeholder, so try 1.
            trace = self._run(given={names[0]: "1"})
            for key in self._differing(launches(trace)[self._index]) if trace else ():
                self._leave_open(key, f"${names[0]}", f"depends on ${names[0]}, which is not set")

    def _record_variables(self, other: Launch, names: tuple[str, ...]) -> set[str]:
        """Record the settings that change when some unset variables are set to placeholders.

        A value that contains a variable becomes a text such as `$N`. A value that is computed from a variable
        is marked as uncertain. Neither is done for a variable with a default in the script, because the first
        run has used the default. Any other change becomes a note: the variable may choose a branch.

        other: the launch command of a run in which the variables are placeholders (recognisable numbers).
        names: the variables.

        Returns the variables that the new notes are about.
        """
        settings, decisive = self._settings, dict[str, list[str]]()
        for key in self._differing(other):
            named = mentioned(names, other.shown(key))
            has_default = any(map(self._has_default, named or names))
            if named and not has_default and self._launch.shown(key) == other.shown_without(key, named):
                settings.values[key] = other.value(key)
            elif named and has_default and self._launch.shown(key) is not None:
                continue  # the first run has used the default, which is the value
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
        """Add a note for each unset variable that occurs in a condition, such as `case $DEVICE in`.

        Two kinds of variables are left out: those that have a note already, and those that the script sets
        itself. But a variable with a default, as in `${DEVICE:-gpu}`, gets a note even if the script sets it.
        """
        noted = {note.partition(":")[0] for note in self._settings.notes}
        for name in self._names:
            assigned = re.search(rf"(?:^|[\s;(]){name}\+?=|\b(?:for|read)\s(?:-\w+\s)*{name}\b", self._script)
            condition = re.search(
                rf"^\s*((?:case|if|elif|while|\[\[?|test)\s[^;\n]*\$\{{?{name}\b[^;\n]*)", self._script, re.M
            )
            if condition and f"${name}" not in noted and (self._has_default(name) or not assigned):
                self._settings.notes.append(
                    f"${name}: not set, but the script tests it: {condition[1].split(' in')[0]}"
                )

    def _is_computed(self, key: str, other: Launch, names: tuple[str, ...]) -> bool:
        """Return True if a setting's value is computed from variables, as in `$((8 * N))`.

        The result is False if the value contains the variables unchanged, as in `run-$N`. To find out, the
        script is run with the variables set to 1. A value that contains them unchanged is then equal to the
        value in `other` with 1 in place of each placeholder. The result is also False if this run does not
        reach the launch command.

        key: key of the setting.
        other: the launch command of a run in which the variables are placeholders (recognisable numbers).
        names: the variables.
        """
        trace = self._run(names, prints="1")
        return trace is not None and launches(trace)[self._index].filled(key, "1") != other.filled(key, "1")


def _variables(script: str) -> list[str]:
    """Return the names of the variables that a script reads, as $NAME, ${NAME...} or NAME in arithmetic."""
    arithmetic = " ".join(re.findall(r"\(\((.*?)\)\)", script))
    return _VARIABLE.findall(script) + re.findall(r"\b[A-Za-z_]\w*", arithmetic)


def _add(text: str, texts: list[str]) -> None:
    if text not in texts:
        texts.append(text)

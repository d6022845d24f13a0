"""Recorder of the commands of a launch script: bash runs the script in the sandbox, where no program exists.

bash itself expands variables, arrays and arithmetic, and takes the branches that the environment gives.
launch_prelude.sh makes bash record each command in place of running it. Only these text tools do their work,
written in bash: basename, dirname, seq, cat and tee. The output of every other program is not known. A
placeholder replaces it: a number that can be recognised in the settings that contain it.

The sandbox keeps the script from the network, and from files and processes of this machine. It ends the
script at limits of time, memory, processes, files and output.
"""

import re
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path

from grpo_megatron.config.sandbox import SandboxLimits
from grpo_megatron.errors import UserError
from grpo_megatron.importers.settings import ONLY_THESE
from grpo_megatron.sandbox.program import Ended, Outcome, Program
from grpo_megatron.sandbox.run import Sandbox

NEITHER = "this is neither YAML with sections nor a launch command with key=value arguments"
_PRELUDE = (Path(__file__).parent / "launch_prelude.sh").read_text(encoding="utf-8")
_LIMITS = SandboxLimits(
    seconds=10.0, cpu_seconds=2, memory_mib=192, threads=4, files_mib=4, files=200, output_kib=1024
)
_PROCESSES = 32
_MOST_CALLS = 300
_INSTEAD = (
    "Import what Hydra itself wrote instead: the file .hydra/overrides.yaml in the output folder of a run, "
    "or the text that the launch command prints with --cfg job"
)
# Variables that are always set, with values that are not known here.
ALWAYS_SET = ("HOME", "USER", "LOGNAME", "HOSTNAME", "SHELL", "PATH", "PWD", "0")
# First number of the placeholders for variables. Smaller numbers stand for outputs of programs: they are
# process ids.
_FIRST_VARIABLE = 5_000_000
_DIGITS = 7

_START = """
import os, signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.dup2(1, 50)
os.dup2(2, 1)
environment = {environment} | {{"BASH_ENV": os.path.join(os.getcwd(), "prelude")}}
os.execve({bash}, ["bash", *{arguments}], environment)
"""
_SYNTAX_ERROR = re.compile(r": line (\d+: (?:syntax error(?: near|: unexpected)|unexpected EOF).*)")
_ERROR = re.compile(
    r": (line \d+: .*(?:No such file or directory|Permission denied|ambiguous redirect|division by 0"
    r"|syntax error: .* expected).*)$",
    re.M,
)
_NOT_SET = re.compile(r": line \d+: \$?(\w+): (.*)", re.M)
_ITEM = re.compile(r"(\d+) (word|line|input|text|test|source) (.*)", re.DOTALL)


@dataclass
class RecordedCall:
    """A command that a launch script has called: words, line and input. It was recorded, not run."""

    words: list[str] = field(default_factory=list)
    """Words of the command. Placeholders stand for unknown texts."""
    line: int = 0
    """Line of the script in which the command is called, from 1; 0 if it is not known."""
    input: str = ""
    """Text that the command reads from standard input; empty if the text contains no placeholder."""


@dataclass
class Trace:
    """Record of one run of a launch script: the commands that it called, and what was not known."""

    placeholders: dict[str, str]
    """{placeholder: text that it stands for, such as "$(nproc)" or "$HOME"}."""
    calls: list[RecordedCall] = field(default_factory=list)
    """Commands that the script has called, in the order of their start."""
    sources: list[str] = field(default_factory=list)
    """Commands that read another script, such as `source env.sh`. These scripts were not read."""
    tests: list[str] = field(default_factory=list)
    """Conditions on files of the machine, such as `[ -f env.sh ]`. No file of the machine was looked at."""
    errors: list[str] = field(default_factory=list)
    """Messages of bash about files that it could not open, and about wrong arithmetic."""
    not_set: list[str] = field(default_factory=list)
    """Variables and positional parameters that the script requires to be set, but that were not set."""

    @property
    def pattern(self) -> str:
        """Return a regular expression that matches the placeholders of this run.

        Placeholders are numbers in place of texts that are not known. If the run has none, the expression
        matches nothing.
        """
        return next((rf"{one[:-_DIGITS]}\d{{{_DIGITS}}}" for one in self.placeholders), "(?!)")

    def shown(self, text: str) -> str:
        """Return a text in which each placeholder (number in place of an unknown text) is made readable.

        For example, the placeholder for the value of HOME becomes `$HOME`.
        """
        for _ in range(10):  # the text that a placeholder stands for may contain further placeholders
            text = re.sub(self.pattern, lambda match: self.placeholders.get(match[0], match[0]), text)
        return text

    def filled(self, text: str, filling: str = "") -> str:
        """Return a text with `filling` in place of each placeholder, a number that marks an unknown text."""
        return re.sub(self.pattern, filling, text)

    def command(self, call: RecordedCall) -> str:
        """Return a recorded command as one line of text: its words, without the parts that are not known.

        This text identifies the command in the argument `failing` of ScriptRecorder.run.
        """
        return self.filled(" ".join(call.words)).replace("\n", " ")


class ScriptEnded(UserError):
    """Raised if the sandbox has ended the script at one of its limits, such as time or memory."""


class ScriptRecorder:
    """Recorder that runs a launch script in a sandbox and records the commands that the script calls.

    The commands themselves are not run. `run` can be called any number of times. Use the recorder as a
    context manager. Raises UserError if this machine has no bash or no sandbox.
    """

    def __init__(self, script: str, environment: dict[str, str]):
        """Prepare runs of a script.

        script: text of the script.
        environment: {name: value} of the variables that are set when the script starts.
        """
        self._script = script.replace("\r\n", "\n")
        self._environment = environment
        self._bash = shutil.which("bash")
        if self._bash is None:
            raise UserError(f"reading a launch script requires bash, which is not installed. {_INSTEAD}")
        try:
            self._sandbox = Sandbox(_LIMITS)
        except UserError as error:
            raise UserError(
                "a launch script must be run in a sandbox, which is not possible on this machine. "
                f"{_INSTEAD}. {error}"
            ) from error
        digits = "".join([script, *environment.values()])
        self._prefixes = [prefix for prefix in map(str, range(71828, 99999)) if prefix not in digits][:2]

    def __enter__(self) -> "ScriptRecorder":
        self._sandbox.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._sandbox.__exit__(*error)

    def run(
        self,
        unknown: tuple[str, ...] = (),
        failing: tuple[str, ...] = (),
        files_exist: bool = False,
        prints: str = "placeholder",
        given: dict[str, str] | None = None,
    ) -> Trace:
        """Run the script once and return a record of the commands that it called.

        unknown: variables and positional parameters whose values are not known. Each is set to a placeholder,
            which is a number that can be recognised in the recorded commands.
        failing: commands, as Trace.command returns them, that fail when they are first called. Other commands
            succeed. But a program fails from its 31st call on, so that a loop that waits for this ends.
        files_exist: True if conditions such as `[ -f FILE ]` hold.
        prints: output of every program: "placeholder", "nothing", or "1". With "1", the variables `unknown`
            are 1 too, and all other placeholders are different numbers than with "placeholder". So a value
            that is computed from a placeholder differs between a run with "1" and one with "placeholder".
        given: {name: value} of variables to set, in addition to those of the constructor.

        Raises ScriptEnded at a limit of the sandbox. Raises UserError if the text is not a bash script.
        """
        prefix = self._prefixes[prints == "1"]
        placeholders = {
            name: f"{prefix}{_FIRST_VARIABLE + index}" for index, name in enumerate((*ALWAYS_SET, *unknown))
        }
        ones = dict.fromkeys(unknown, "1") if prints == "1" else {}
        environment = placeholders | ones | self._environment | (given or {})
        arguments = [environment.pop("0")]
        while str(len(arguments)) in environment:
            arguments.append(environment.pop(str(len(arguments))))
        environment |= {
            "RECORDER_BASH": self._bash,
            "RECORDER_PREFIX": prefix,
            "RECORDER_FAILS": "".join(f"\n{command}\n" for command in failing),
            "RECORDER_PRINTS": prints,
            "RECORDER_CALLS": str(_MOST_CALLS),
            "RECORDER_FILES": "1" if files_exist else "",
            "RECORDER_PATH": environment["PATH"],
            "RECORDER_PWD": environment["PWD"],
            "LANG": "C.UTF-8",
        }
        source = _START.format(environment=environment, bash=repr(self._bash), arguments=arguments)
        files = {"prelude": _PRELUDE, placeholders["0"]: self._script}
        outcome = self._sandbox.run(Program(source, files=files, processes=_PROCESSES))
        _check(outcome)
        shown = {placeholder: f"${name}" for name, placeholder in placeholders.items()}
        trace = _trace(outcome, shown, prefix, prints)
        for name, message in _NOT_SET.findall(outcome.stderr):
            asked = f"${{{name}:?" in self._script or f"${{{name}?" in self._script
            if (asked or message == "unbound variable") and name not in trace.not_set:
                trace.not_set.append(name)
        return trace


def _check(outcome: Outcome) -> None:
    """Raise an error if bash could not run the script.

    Raises ScriptEnded if the sandbox ended the script at a limit, such as time or memory. Raises UserError if
    bash did not start, or if the text is not a bash script.
    """
    reason = outcome.ended.value
    if "cannot allocate" in outcome.stderr:
        reason = "memory"
    elif outcome.status == -signal.SIGXFSZ:
        reason = "files"
    if reason != Ended.itself.value:
        raise ScriptEnded(f"the script exceeded a limit of the sandbox ({reason}). {_INSTEAD}")
    if outcome.status == 2 and (error := _SYNTAX_ERROR.search(outcome.stderr)):
        raise UserError(f"{NEITHER}; as a script: line {error[1]}; {ONLY_THESE}")
    if outcome.stderr.startswith("Traceback"):
        raise UserError(
            f"bash cannot be started in the sandbox: {outcome.stderr.splitlines()[-1]}. {_INSTEAD}"
        )


def _trace(outcome: Outcome, placeholders: dict[str, str], prefix: str, prints: str) -> Trace:
    trace = Trace(placeholders, errors=list(dict.fromkeys(_ERROR.findall(outcome.stderr))))
    calls: dict[int, RecordedCall] = {}
    # A script writes $(PROGRAM && echo yes) to learn whether the program succeeds. Only the `yes` matters, so
    # the output of the program before it is removed.
    printed = r"\b1\n" if prints == "1" else rf"{prefix}\d{{{_DIGITS}}}\n"
    for process, kind, text in filter(None, map(_item, outcome.stdout.split("\0"))):
        if kind == "source":
            trace.sources.append(text)
        elif kind == "test":
            trace.tests.append(text)
        elif kind == "text":
            placeholders[f"{prefix}{process:0{_DIGITS}}"] = f"$({text})"
        else:
            call = calls.setdefault(process, RecordedCall())
            if kind == "word":
                call.words.append(re.sub(printed, "", text))
            elif kind == "line":
                call.line = int(text) if text.isdigit() else 0
            else:
                call.input = text
    trace.calls = [call for call in calls.values() if call.words]
    for process, call in calls.items():
        words = " ".join(call.words)
        if call.input:
            before = trace.shown(call.input.strip())
            inner = before[2:-1] if before.startswith("$(") and before.endswith(")") else "..."
            words = f"{inner} | {words}"
        placeholders[f"{prefix}{process:0{_DIGITS}}"] = f"$({words})"
    trace.sources = list(map(trace.shown, trace.sources))
    return trace


def _item(text: str) -> tuple[int, str, str] | None:
    """Parse a part of bash's output, which contains the records of the commands that a script called.

    Returns (process id of the command, kind, text), or None if the part is not a record but other output.
    kind: `word`, `line`, `input`, `text`, `test` or `source`.
    """
    match = _ITEM.fullmatch(text)
    return (int(match[1]), match[2], match[3]) if match else None

"""Interpreter that finds the launch commands of a bash script. It runs no program.

If a condition is known, only the branch that it selects is followed. If not, all branches are followed and
the variables that they end with are merged (shell_merge): a variable that differs between the branches is
unknown afterwards, and an array keeps the words that all branches agree on. A loop over known words is
followed once per word. A function is followed at each call.
"""

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from grpo_megatron.importers import shell_syntax as syntax
from grpo_megatron.importers.shell_expand import PLACEHOLDER, Variables, home_written_out
from grpo_megatron.importers.shell_merge import is_setting, merged
from grpo_megatron.importers.shell_tokens import ShellSyntaxError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)\Z", re.DOTALL)
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_TALKS = ("echo", "printf", "alias", "trap", "pip", "sed", "git", ":", *_DECLARES)
_READS = ("read", "mapfile", "readarray", "getopts")
_SHELLS = ("bash", "sh", "sbatch", "ssh", "srun", "zsh")
_DEEPEST = 20
_MOST_TURNS = 50


@dataclass
class Launch:
    """A command that has settings (key=value) among its words."""

    words: list[str]
    """The words that the program gets. An unknown part is written $NAME, $(...) or $<...>."""
    held: list[str]
    """The same words with placeholders (shell_expand) for the unknown parts."""
    line: int
    reasons: dict[str, str]
    """{"$NAME": why it is unknown}, such as "1 or 2, depending on [ -n $DEBUG ]"."""


@dataclass
class Script:
    """All that `read_script` has found in a script."""

    launches: list[Launch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages about other scripts that this script sources. They are not read."""
    lost: list[str] = field(default_factory=list)
    """Messages about settings that no command receives, as after a missing backslash."""
    variables: Variables = field(default_factory=Variables)


class _Status(Enum):
    true = auto()
    false = auto()
    undecided = auto()
    ran = auto()  # a command, which is taken to succeed


class _Left(Exception):
    """Raised by `exit` and `return`: nothing after them is followed."""


def read_script(text: str, environment: dict[str, str] | None = None) -> Script:
    """Follow a script that starts with the variables of `environment` set.

    Raises ShellSyntaxError if the text is not a bash script.
    """
    run = _Run(environment)
    nodes = syntax.parse(text.replace("\r\n", "\n").translate(dict.fromkeys(range(2, 7))))
    try:
        run.block(nodes)
    except _Left:
        pass
    except RecursionError as error:
        raise ShellSyntaxError("it is nested too deeply") from error
    return run.script


def _written(nodes: list[syntax.Node]) -> str:
    """Return a condition as the script writes it, for messages."""
    last = nodes[-1] if nodes else None
    if isinstance(last, syntax.Not):
        return f"! {_written([last.node])}"
    if isinstance(last, syntax.AndOr):
        return f"{_written([last.first])} {last.operator} {_written([last.second])}"
    return " ".join(last.words) if isinstance(last, syntax.Command) else "a condition that is not known here"


def names(variable: str, word: str) -> bool:
    """Return whether `variable`, such as $NAME, occurs in the word."""
    return re.search(re.escape(variable) + r"(?!\w)", word) is not None


class _Run:
    def __init__(self, environment: dict[str, str] | None) -> None:
        self.script = Script(variables=Variables(environment))
        self._functions: dict[str, list[syntax.Node]] = {}
        self._reasons: dict[str, str] = {}
        self._depth = 0

    @property
    def _variables(self) -> Variables:
        return self.script.variables

    def block(self, nodes: list[syntax.Node]) -> _Status:
        status = _Status.true
        for node in nodes:
            status = self._node(node)
        return status

    def _node(self, node: syntax.Node) -> _Status:
        match node:
            case syntax.Command():
                return self._command(node)
            case syntax.AndOr():
                return self._and_or(node)
            case syntax.Not():
                opposite = {
                    _Status.true: _Status.false,
                    _Status.false: _Status.true,
                    _Status.ran: _Status.undecided,
                }
                status = self._node(node.node)
                return opposite.get(status, status)
            case syntax.If():
                self._if(node)
            case syntax.Case():
                self._case(node)
            case syntax.Loop():
                self._loop(node)
            case syntax.Function():
                self._functions[node.name] = node.body
            case syntax.Group():
                return self._group(node)
        return _Status.ran

    def _group(self, node: syntax.Group) -> _Status:
        if not node.subshell:
            return self.block(node.body)
        before = dict(self._variables.values)
        try:
            return self.block(node.body)
        except _Left:
            return _Status.undecided
        finally:
            self._variables.values = before

    # branches

    def _and_or(self, node: syntax.AndOr) -> _Status:
        first = self._node(node.first)
        if first is _Status.undecided:
            self._undecided([lambda: self._node(node.second), lambda: None], _written([node.first]))
            return first
        runs = (first is not _Status.false) == (node.operator == "&&")
        return self._node(node.second) if runs else first

    def _if(self, node: syntax.If) -> None:
        possible: list[Callable[[], object]] = []
        conditions = []
        for condition, body in node.branches:
            status = self.block(condition)
            if status is _Status.false:
                continue
            conditions.append(_written(condition))
            possible.append(lambda body=body: self.block(body))
            if status is _Status.true:
                break
        else:
            possible.append(lambda: self.block(node.otherwise))
        self._undecided(possible, " and ".join(conditions))

    def _case(self, node: syntax.Case) -> None:
        word = self._variables.string(node.word)
        if PLACEHOLDER.search(word):
            possible = [lambda body=body: self.block(body) for _, body in node.branches]
            if not any("*" in patterns for patterns, _ in node.branches):
                possible.append(lambda: None)
            self._undecided(possible, f"case {node.word}")
            return
        for patterns, body in node.branches:
            if any(fnmatch.fnmatchcase(word, self._variables.string(pattern)) for pattern in patterns):
                self.block(body)
                return

    def _loop(self, node: syntax.Loop) -> None:
        items = [field for item in node.items for field in self._variables.fields(item)]
        if (
            node.name
            and items
            and not any(PLACEHOLDER.search(item) for item in items)
            and len(items) <= _MOST_TURNS
        ):
            for item in items:
                self._variables.values[node.name] = item
                self.block(node.body)
            return
        if node.name:
            self._variables.values[node.name] = self._variables.hold(f"${node.name}")
        self._undecided([lambda: self.block(node.body), lambda: None], "how often a loop runs")

    def _undecided(self, branches: list[Callable[[], object]], condition: str) -> None:
        """Follow all branches, because any of them may be taken, and merge the variables they end with.

        A branch that leaves the script or function is not merged. Raises _Left if all branches leave.
        """
        variables = self._variables
        before, ends = variables.values, []
        for branch in branches:
            variables.values = dict(before)
            try:
                branch()
                ends.append(variables.values)
            except _Left:
                pass
        if not ends:
            raise _Left
        variables.values, reasons = merged(ends, condition, variables)
        self._reasons |= reasons

    # commands

    def _command(self, node: syntax.Command) -> _Status:
        words = list(node.words)
        assignments = []
        while words and (assignment := _ASSIGNMENT.match(words[0])):
            assignments.append(assignment)
            words.pop(0)
        if not words:
            for assignment in assignments:
                self._assign(assignment)
            return _Status.true
        if words[0].startswith("(("):
            return self._arithmetic(words[0][2:-2])
        if words[0] == "[[":
            return self._test(words[1:-1])
        if words[0] in _DECLARES:
            for assignment in filter(None, map(_ASSIGNMENT.match, words[1:])):
                self._assign(assignment)
            return _Status.true
        held = [field for word in words for field in self._variables.fields(word)]
        # Assignments in front of a command hold for that command only, and not for its own words.
        before = dict(self._variables.values)
        for assignment in assignments:
            self._assign(assignment)
        try:
            return self._plain(held, node) if held else _Status.true
        finally:
            for name in {assignment[1] for assignment in assignments}:
                self._variables.values.pop(name)
                self._variables.values |= {name: before[name]} if name in before else {}

    def _plain(self, held: list[str], node: syntax.Command) -> _Status:
        name, *arguments = held
        if name in ("[", "test"):
            return self._test([word for word in node.words[1:] if word != "]"])
        if name in ("exit", "return"):
            raise _Left
        if name in ("true", ":", "false"):
            return _Status.false if name == "false" else _Status.true
        if name == "unset":
            for variable in arguments:
                self._variables.values.pop(variable, None)
        elif name in _READS or (name == "printf" and arguments[:1] == ["-v"]):
            for variable in arguments[1:2] if name == "printf" else arguments:
                self._variables.values[variable] = self._variables.hold(f"${variable}")
        elif name == "eval":
            self._nested(" ".join(arguments))
        elif name == "set":
            if "--" in arguments:
                self._variables.arguments = arguments[arguments.index("--") + 1 :]
        elif name == "let":
            for expression in arguments:
                self._arithmetic(expression)
        elif name == "shift" and self._variables.arguments is not None:
            count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
            self._variables.arguments = self._variables.arguments[count:]
        elif name in ("source", "."):
            self.script.notes.append(
                f"{self._variables.shown(' '.join(held))}: another script, which was not read"
            )
        elif name in self._functions:
            self._call(name, arguments)
        elif (inner := self._inner_script(held, node)) is not None:
            self._nested(inner)
        elif is_setting(name, self._variables):
            shown = self._variables.shown(" ".join(held))
            self.script.lost.append(
                f"line {node.line}: settings that reach no command, as after a missing backslash: {shown}"
            )
        elif name not in _TALKS and any(is_setting(word, self._variables) for word in held):
            self._launch(held, node.line)
        return _Status.ran

    def _inner_script(self, held: list[str], node: syntax.Command) -> str | None:
        """Return the SCRIPT of `bash -c SCRIPT`, or the here-document that a shell reads."""
        for number, word in enumerate(held[:-2]):
            if word.rpartition("/")[2] in _SHELLS and re.fullmatch(r"-[a-z]*c", held[number + 1]):
                return held[number + 2]
        if node.script is not None and held[0].rpartition("/")[2] in _SHELLS:
            return self._variables.string(node.script.replace('"', '\\"'), quoted=True)
        return None

    def _nested(self, text: str) -> None:
        if self._depth >= _DEEPEST:
            return
        self._depth += 1
        try:
            self.block(syntax.parse(text))
        except _Left:
            pass
        finally:
            self._depth -= 1

    def _call(self, name: str, arguments: list[str]) -> None:
        if self._depth >= _DEEPEST:
            return
        outer = self._variables.arguments
        self._depth, self._variables.arguments = self._depth + 1, arguments
        try:
            self.block(self._functions[name])
        except _Left:
            pass
        finally:
            self._depth, self._variables.arguments = self._depth - 1, outer

    def _launch(self, held: list[str], line: int) -> None:
        shown = [self._variables.shown(word) for word in held]
        used = {name: why for name, why in self._reasons.items() if any(names(name, word) for word in shown)}
        self.script.launches.append(Launch(shown, held, line, used))

    def _assign(self, assignment: re.Match) -> None:
        name, index, more, raw = assignment.groups()
        variables = self._variables
        if index:
            variables.values[name] = variables.hold(f"${name}")
            return
        value = variables.array(raw) if raw.startswith("(") else variables.string(home_written_out(raw))
        before = variables.values.get(name)
        if more and before is not None:
            if isinstance(before, list) != isinstance(value, list):
                before, value = ([one] if isinstance(one, str) else one for one in (before, value))
            value = before + value
        variables.values[name] = value

    def _arithmetic(self, expression: str) -> _Status:
        for name in re.findall(r"([A-Za-z_]\w*)\s*(?:\+\+|--|(?:[-+*/%]|<<|>>)?=(?!=))", expression):
            self._variables.values[name] = self._variables.hold(f"${name}")
        number = self._variables.number(expression)
        return _Status.undecided if number is None else _Status.true if number else _Status.false

    def _test(self, words: list[str]) -> _Status:
        """Evaluate the words, as written, between [ ] or [[ ]]."""
        for operator, decides in ((("||", "-o"), _Status.true), (("&&", "-a"), _Status.false)):
            places = [number for number, word in enumerate(words) if word in operator]
            if places:
                parts = [self._test(words[: places[0]]), self._test(words[places[0] + 1 :])]
                if decides in parts:
                    return decides
                return _Status.undecided if _Status.undecided in parts else parts[0]
        if words[:1] == ["!"]:
            status = self._test(words[1:])
            return {_Status.true: _Status.false, _Status.false: _Status.true}.get(status, status)
        known = self._compared([self._variables.string(word) for word in words])
        return _Status.undecided if known is None else _Status.true if known else _Status.false

    def _compared(self, words: list[str]) -> bool | None:
        if not words or any(PLACEHOLDER.search(word) for word in words):
            return None
        match words:
            case [word]:
                return bool(word)
            case ["-z", word]:
                return not word
            case ["-n", word]:
                return bool(word)
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as name, right]:
                sign = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}[name]
                number = self._variables.number(f"({left}) {sign} ({right})")
                return None if number is None else bool(number)
        return None

"""Parser of bash scripts. It returns commands, branches, loops and functions as nodes and runs nothing.

Words are kept as they are written: quotes and variables are not expanded.
"""

import re
from dataclasses import dataclass, field

from grpo_megatron.importers.shell_tokens import ShellSyntaxError, Token, is_redirection, tokens

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass
class Command:
    """A simple command."""

    words: list[str]
    """Words as written, with their quotes and without redirections."""
    line: int
    script: str | None = None
    """The here-document that the command reads from standard input."""


@dataclass
class AndOr:
    """The list `first && second` or `first || second`."""

    first: "Node"
    operator: str
    second: "Node"


@dataclass
class If:
    """An if command.

    branches: (condition, body) of the `if` and of each `elif`.
    otherwise: the body of `else`.
    """

    branches: list[tuple[list["Node"], list["Node"]]]
    otherwise: list["Node"] = field(default_factory=list)


@dataclass
class Case:
    """A case command. branches: (patterns, body)."""

    word: str
    branches: list[tuple[list[str], list["Node"]]]


@dataclass
class Loop:
    """A for, select, while or until loop.

    name: the variable of a `for NAME in ITEMS`; None for a while, until or C-style for loop.
    items: the words after `in`, as written.
    """

    name: str | None
    items: list[str]
    body: list["Node"]


@dataclass
class Function:
    name: str
    body: list["Node"]


@dataclass
class Not:
    """A pipeline that is negated by a leading `!`."""

    node: "Node"


@dataclass
class Group:
    """A group { ...; }, a subshell ( ... ), or the commands of a pipeline.

    subshell: variables set inside are lost at the end, as in ( ... ) and in a pipeline.
    """

    body: list["Node"]
    subshell: bool = False


Node = Command | AndOr | Not | If | Case | Loop | Function | Group


def parse(text: str) -> list[Node]:
    """Return the script as nodes. Raises ShellSyntaxError if the text is not a bash script."""
    try:
        parser = _Parser(tokens(text))
        body = parser.block(())
    except RecursionError as error:
        raise ShellSyntaxError("brackets or blocks are nested too deeply") from error
    if parser.ahead() is not None:
        raise ShellSyntaxError(
            f"line {parser.ahead().line}: {parser.ahead().text.strip()!r} is not expected here"
        )
    return body


class _Parser:
    def __init__(self, found: list[Token]):
        self._tokens = found
        self._at = 0

    def ahead(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self) -> Token:
        token = self.ahead()
        if token is None:
            raise ShellSyntaxError("the script ends within a block")
        self._at += 1
        return token

    def _is(self, *texts: str) -> bool:
        token = self.ahead()
        return token is not None and token.kind != "script" and token.text in texts

    def _expect(self, text: str) -> None:
        token = self._next()
        if token.text != text:
            raise ShellSyntaxError(f"line {token.line}: expected {text}, found {token.text.strip()!r}")

    def _skip(self, *texts: str) -> None:
        while self._is(*texts):
            self._at += 1

    def block(self, enders: tuple[str, ...]) -> list[Node]:
        """Parse commands up to one of the words `enders`. The caller consumes that word."""
        nodes = []
        while True:
            self._skip("\n", ";", "&")
            if self.ahead() is None or self._is(*enders, ")", ";;", ";&", ";;&"):
                return nodes
            nodes.append(self._and_or())

    def _and_or(self) -> Node:
        node = self._pipeline()
        while self._is("&&", "||"):
            operator = self._next().text
            self._skip("\n")
            node = AndOr(node, operator, self._pipeline())
        return node

    def _pipeline(self) -> Node:
        negated = False
        while self._is("!"):
            self._next()
            negated = not negated
        parts = [self._command()]
        while self._is("|", "|&"):
            self._next()
            self._skip("\n")
            parts.append(self._command())
        node = parts[0] if len(parts) == 1 else Group(parts, subshell=True)
        return Not(node) if negated else node

    def _command(self) -> Node:
        token = self.ahead()
        if token is None:
            raise ShellSyntaxError("the script ends within a command")
        compound = {
            "if": self._if,
            "case": self._case,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "function": self._function,
            "{": lambda: self._group("}"),
            "(": lambda: self._group(")"),
        }.get(token.text if token.kind != "script" else "")
        if compound is None:
            return self._simple()
        node = compound()
        if not isinstance(node, Function):
            self._redirections()
        return node

    def _redirections(self) -> str | None:
        script = None
        while (token := self.ahead()) is not None and is_redirection(token):
            self._next()
            target = self._next()
            if target.kind == "script":
                script = target.text
        return script

    def _simple(self) -> Node:
        line = self.ahead().line
        words: list[str] = []
        script = None
        while True:
            inside_test = words[:1] == ["[["] and words[-1] != "]]"
            if not inside_test:
                script = self._redirections() or script
            token = self.ahead()
            if token is None or (token.kind == "operator" and (not inside_test or token.text == "\n")):
                break
            words.append(self._next().text)
            if len(words) == 1 and self._is("(") and _NAME.fullmatch(words[0]):
                self._next()
                self._expect(")")
                return self._body_of(words[0])
        if not words and script is None and token is not None:
            raise ShellSyntaxError(f"line {token.line}: {token.text.strip()!r} is not expected here")
        return Command(words, line, script)

    def _function(self) -> Node:
        self._next()
        name = self._next().text
        if self._is("("):
            self._next()
            self._expect(")")
        return self._body_of(name)

    def _body_of(self, name: str) -> Function:
        self._skip("\n")
        return Function(name, [self._command()])

    def _group(self, closer: str) -> Group:
        self._next()
        body = self.block((closer,))
        self._expect(closer)
        return Group(body, subshell=closer == ")")

    def _if(self) -> If:
        branches = []
        while self._is("if", "elif"):
            self._next()
            condition = self.block(("then",))
            self._expect("then")
            branches.append((condition, self.block(("elif", "else", "fi"))))
        otherwise = []
        if self._is("else"):
            self._next()
            otherwise = self.block(("fi",))
        self._expect("fi")
        return If(branches, otherwise)

    def _case(self) -> Case:
        self._next()
        word = self._next().text
        self._skip("\n")
        self._expect("in")
        branches = []
        self._skip("\n")
        while not self._is("esac"):
            self._skip("(")
            patterns = [self._next().text]
            while self._is("|"):
                self._next()
                patterns.append(self._next().text)
            self._expect(")")
            branches.append((patterns, self.block(("esac",))))
            if self._is(";&", ";;&"):
                raise ShellSyntaxError(
                    f"line {self.ahead().line}: a branch of case that ends with "
                    f"{self.ahead().text} is not read"
                )
            self._skip(";;", "\n")
        self._expect("esac")
        return Case(word, branches)

    def _for(self) -> Loop:
        self._next()
        name, items = self._next().text, []
        self._skip("\n")
        if self._is("in"):
            self._next()
            while not self._is(";", "\n"):
                items.append(self._next().text)
        self._skip(";", "\n")
        return Loop(name if _NAME.fullmatch(name) else None, items, self._do())

    def _while(self) -> Loop:
        self._next()
        self.block(("do",))
        return Loop(None, [], self._do())

    def _do(self) -> list[Node]:
        self._expect("do")
        body = self.block(("done",))
        self._expect("done")
        return body

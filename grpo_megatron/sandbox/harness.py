"""Code that runs inside a contained process.

It runs the program, calls one of its functions, or serves the program's functions to tests in another
process.
"""

import builtins
import importlib
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any

from grpo_megatron.sandbox import plain

# Descriptor of the pipe for a function's result, or of the socket between a program and its tests.
CHANNEL = 3


def run(source: str, name: str = "__main__") -> dict[str, Any]:
    """Execute a program as the module `name`, and return {global name: value} of the module.

    If the program raises an error, this process prints the traceback and ends with status 1, as Python itself
    would.

    source: source code of the program.
    """
    module = types.ModuleType(name)
    module.__file__ = "program.py"
    sys.modules[name] = module
    _execute(source, "program.py", module.__dict__)
    return module.__dict__


def _execute(source: str, file: str, names: dict[str, Any]) -> None:
    # Tracebacks take source lines from this cache. Otherwise they would look for a file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    _or_exit(lambda: exec(compile(source, file, "exec"), names))


def execute(command: str, environment: dict[str, str], links: dict[str, str]) -> None:
    """Replace this process by a shell that executes a command.

    environment: environment variables of the shell. Those that name a folder for files are added.
    links: {name in the working directory: path of the file or folder to link to}.
    """
    for name, path in links.items():
        os.symlink(path, name)
    # Python ignores these signals, and a shell's programs would inherit that.
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    folder = os.getcwd()
    os.execve("/bin/sh", ["sh", "-c", command], {"HOME": folder, **environment, "TMPDIR": folder})


def call(source: str, function: str, arguments: list) -> None:
    """Execute a program, call one of its functions, and write the return value to the descriptor CHANNEL.

    The value is written in the encoding of plain.dumps. If the program raises an error, lacks the function,
    or returns anything but plain data, this process prints the error and ends with status 1.

    source: source code of the program.
    function: name of a global function, or of a method of a class `Solution` (as on LeetCode).
    arguments: the function's positional arguments, as plain data.
    """
    names = run(source, "program")
    result = _or_exit(lambda: plain.dumps(_function(names, function)(*arguments)))
    with open(CHANNEL, "wb", closefd=False) as channel:
        channel.write(result)


def _function(names: dict[str, Any], function: str) -> Any:
    if function in names:
        return names[function]
    if hasattr(names.get("Solution"), function):
        return getattr(names["Solution"](), function)
    raise NameError(f"the program has no function {function!r}")


def _or_exit(action) -> Any:
    """Return the result of `action()`. After an error, print the traceback and exit with status 1.

    The traceback omits this module's functions, so that it looks as if Python had run the program directly.
    """
    try:
        return action()
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        sys.exit(1)


class Server:
    """Lets tests that run in another process call the functions of a program in this process.

    Calls and results go over the socket CHANNEL, so the program sees nothing of the tests except the
    arguments of calls. Objects that are not plain data stay in this process. The tests refer to such an
    object by an index.
    """

    def __init__(self, source: str, function: str | None):
        """Execute the program. function: name of the function under test; None if there is none."""
        self._kept: list[Any] = []
        self._function, self._names = function, run(source, "program")

    def serve(self) -> None:
        """Send the program's public names to the tests, then answer calls until the tests' process ends.

        If a call raises an error, the error's traceback goes to stderr, and the tests get its type and text.
        """
        lines = socket.socket(fileno=CHANNEL).makefile("rwb")
        public = {
            name: value
            for name, value in self._names.items()
            if name == self._function or not name.startswith("_")
        }
        self._answer(lines, public)
        for line in lines:
            try:
                result = self._do(*plain.loads(line, self._found))
            except Exception as error:
                traceback.print_exc()
                result = Failure(type(error).__name__, str(error))
            self._answer(lines, result)

    def _do(self, target: Any, attribute: str | None, arguments: list, keywords: dict) -> Any:
        return getattr(target, attribute) if attribute is not None else target(*arguments, **keywords)

    def _answer(self, lines, value: Any) -> None:
        lines.write(plain.dumps(value, self._encoded) + b"\n")
        lines.flush()

    def _encoded(self, value: Any) -> list:
        if isinstance(value, Failure):
            return ["failure", [value.kind, value.text]]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        self._kept.append(value)
        return ["kept", len(self._kept) - 1]

    def _found(self, value: list) -> Any:
        return self._kept[value[1]]


class Failure:
    def __init__(self, kind: str, text: str):
        self.kind, self.text = kind, text


class Kept:
    """A stand-in, in the process of the tests, for an object that stays in the program's process.

    Calls and attribute accesses are forwarded to the object. If they fail there, an error of the same builtin
    type is raised here, or RuntimeError. bool() and == raise TypeError: the object's class belongs to the
    program, and if it decided about these results, the program could pass any test.
    """

    def __init__(self, client: "Client", index: int):
        self._client, self._index = client, index

    def __call__(self, *arguments, **keywords):
        return self._client.ask(self, None, list(arguments), keywords)

    def __getattr__(self, name: str):
        return self._client.ask(self, name, [], {})

    def __bool__(self):
        raise TypeError(
            "the program returned an object of a class of its own, which is neither true nor "
            "false here; tests can only use plain data, such as numbers, strings and lists"
        )

    __hash__ = None

    def __eq__(self, other):
        raise TypeError(
            "the program returned an object of a class of its own, which cannot be compared here; tests can "
            "only use plain data, such as numbers, strings and lists"
        )


class Client:
    """Forwards calls of tests, which run in this process, to the program, which runs in another process.

    The program's process has a Server, which executes the calls.
    """

    def __init__(self):
        self._lines = socket.socket(fileno=CHANNEL).makefile("rwb")

    def names(self, function: str | None) -> dict[str, Any]:
        """Return {name: value} of the program's global names that the tests may use.

        If the program has given another meaning to a builtin function, such as `all`, or to the name of a
        standard module, the name is left out, so that the tests use Python's own version. Names with a
        leading underscore are left out, too.

        function: name of the function under test, which is kept in any case; None if there is none.
        """
        found = self._receive()
        return {
            name: value for name, value in found.items() if name == function or self._is_harmless(name, value)
        }

    def _is_harmless(self, name: str, value: Any) -> bool:
        if not name.isidentifier() or name.startswith("_") or hasattr(builtins, name):
            return False
        return isinstance(value, types.ModuleType) or name not in sys.stdlib_module_names

    def ask(self, target: Kept, attribute: str | None, arguments: list, keywords: dict) -> Any:
        self._lines.write(plain.dumps([target, attribute, arguments, keywords], self._encoded) + b"\n")
        self._lines.flush()
        return self._receive()

    def _receive(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise EOFError("the program has ended")
        return plain.loads(line, self._made)

    def _encoded(self, value: Any) -> list:
        if not isinstance(value, Kept):
            raise TypeError(f"tests give plain data to the program, not {type(value).__name__}")
        return ["kept", object.__getattribute__(value, "_index")]

    def _made(self, value: list) -> Any:
        name, content = value
        if name == "kept":
            return Kept(self, content)
        if name == "module" and content in sys.stdlib_module_names:
            return importlib.import_module(content)
        if name == "failure":
            kind = getattr(builtins, content[0], None)
            # Do not raise StopIteration here, because it would end the tests' own iteration: all(map(right,
            # cases)) would be true.
            is_error = (
                isinstance(kind, type)
                and issubclass(kind, Exception)
                and kind not in (StopIteration, StopAsyncIteration)
            )
            raise kind(content[1]) if is_error else RuntimeError(": ".join(content))
        return None


def test(source: str, function: str | None) -> None:
    """Run the tests of a program that runs in another process (see Server).

    The tests can use the program's functions by name. This process ends with status 1 if a test fails.

    source: source code of the tests.
    function: name of the function under test, or None. If the tests define `check(candidate)`, as in
        HumanEval, `check` is called with this function.
    """
    names: dict[str, Any] = {}
    _or_exit(lambda: names.update(Client().names(function)))
    names["__name__"] = "tests"
    candidate = names.get(function) if function else None
    _execute(source, "tests.py", names)
    if function and isinstance(names.get("check"), types.FunctionType):
        if candidate is None:
            print(f"the program has no function {function!r}", file=sys.stderr)
            sys.exit(1)
        _or_exit(lambda: names["check"](candidate))


def attach_standard_streams() -> None:
    """Replace sys.stdin, sys.stdout and sys.stderr by new streams on the descriptors 0, 1 and 2.

    Call this in a process that was forked from the helper process. The descriptors are then the program's own
    stdin and pipes, but Python's stream objects are still those of the helper.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def forget_helper() -> None:
    """Remove this project's modules and arguments from `sys`, so that the program does not find them.

    The working directory is put on the import path, as Python does for a script.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
        del sys.modules[name]
    sys.argv = ["program.py"]
    sys.path.insert(0, os.getcwd())

"""Sandbox: runs Python programs that nobody has read, and says what became of them."""

import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from grpo_megatron.config.sandbox import Isolation, SandboxLimits
from grpo_megatron.errors import UserError
from grpo_megatron.sandbox import plain
from grpo_megatron.sandbox.contain import LANDLOCK, NAMESPACES, NOTHING


class Ended(str, Enum):
    """What a program was ended by: itself, or the limit of this name."""

    itself = "itself"
    time = "time"
    cpu = "cpu"
    memory = "memory"
    threads = "threads"
    files = "files"
    output = "output"


@dataclass(frozen=True)
class Program:
    """What to run. files: texts by their names in the program's folder. It finds stdin at its end where the text ends.

    function: with `arguments`, plain data, the function of the program that is called, for Outcome.result. Or with `tests`: the
    one that they test. tests: source text that is run in a process of its own, with the program's functions among its names. Only
    plain data, such as numbers, texts and lists, goes between the two, so that the program sees no more of a test than the
    arguments of the calls, and cannot pass for what it is not.
    """

    source: str
    stdin: str = ""
    files: dict[str, str] = field(default_factory=dict)
    function: str | None = None
    arguments: list | None = None
    tests: str | None = None


@dataclass(frozen=True)
class Outcome:
    """ended: by what. status: the exit status, or -signal; with tests, theirs: 0 means that they passed. seconds: with its start.

    stdout, stderr: what was written, up to the limit; with tests, the program's and then theirs. result: of the function that was
    called; has_result: whether it returned plain data.
    """

    ended: Ended
    status: int
    stdout: str
    stderr: str
    seconds: float
    has_result: bool = False
    result: Any = None

    @property
    def succeeded(self) -> bool:
        """It ran to its end without an error. A program can do so by leaving early; its tests cannot be made to."""
        return self.ended == Ended.itself and self.status == 0


_PACKAGE_FOLDER = str(Path(__file__).parents[2])
# Many start at once, and a busy machine has better things to do; programs themselves are behind everything else.
_START = (
    "import os, sys; os.nice(19); sys.path.append(sys.argv[1]); "
    "from grpo_megatron.sandbox.helper import main; main(sys.argv[1], sys.argv[2:])"
)
_ANSWER_SECONDS = (
    20.0  # beyond a program's own time; helpers do not wait behind other processes, but may be slow to start
)
_LEAVE_SECONDS = 10.0


class Sandbox:
    """A helper process, and programs that it runs one after the other, each in a process of its own.

    `with Sandbox(limits) as sandbox: outcome = sandbox.run(Program(...))`. One thread uses it at a time. Nothing is left of it
    afterwards, however it is left. Raises UserError if this machine cannot contain programs as `isolation` asks.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        isolation: Isolation = Isolation.full,
        containment: str | None = None,
    ):
        """containment: of contain.py; None: the best that this machine has."""
        self._limits = asdict(limits or SandboxLimits())
        self._containment = containment or required_containment(isolation)

    def __enter__(self) -> "Sandbox":
        packages = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})
        self._python_folders = [sys.base_prefix, sys.base_exec_prefix, *packages]
        self._helper = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-c", _START, _PACKAGE_FOLDER, *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=_environment(),
            process_group=0,  # Ctrl-C is for the run to handle
        )
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """The helper ends what it runs, and itself, as soon as its stdin ends."""
        self._helper.stdin.close()
        try:
            self._helper.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._helper.kill()  # what it runs ends with it
            self._helper.wait()
        self._helper.stdout.close()

    def run(self, program: Program, within: float | None = None) -> Outcome:
        """within: the seconds after which it is ended in any case; without, ten times limits.seconds.

        Raises RuntimeError if the program could not be contained, or the helper is lost. Nothing was run outside of a sandbox then.
        """
        within = 10 * self._limits["seconds"] if within is None else within
        deadline = time.monotonic() + within + _ANSWER_SECONDS
        kind = "served" if program.tests is not None else "script" if program.arguments is None else "call"
        with tempfile.TemporaryDirectory(prefix="grpo-sandbox-", ignore_cleanup_errors=True) as folder:
            self._send(kind, program.source, program, within, folder)
            answer = self._receive(deadline)
            if kind == "served" and "problem" not in answer:
                # Sent only now, so that the program is not forked from a process that has read them.
                with tempfile.TemporaryDirectory(
                    prefix="grpo-sandbox-", ignore_cleanup_errors=True
                ) as other_folder:
                    self._send("tests", program.tests, program, within, other_folder)
                    answer = self._receive(deadline)
        if "problem" in answer:
            raise RuntimeError(f"a program could not be run in the sandbox: {answer['problem']}")
        return _outcome(answer)

    def _send(self, kind: str, source: str, program: Program, within: float, folder: str) -> None:
        message = {
            "kind": kind,
            "source": source,
            "stdin": program.stdin,
            "files": {} if kind == "tests" else program.files,
            "function": program.function,
            "arguments": program.arguments,
            "within": within,
            "folder": folder,
            "limits": self._limits,
            "containment": self._containment,
            "python_folders": self._python_folders,
        }
        data = json.dumps(message).encode()
        data = memoryview(len(data).to_bytes(8) + data)
        try:
            while data:
                data = data[self._helper.stdin.write(data) :]
        except BrokenPipeError:
            raise self._lost() from None

    def _receive(self, deadline: float) -> dict:
        size = int.from_bytes(self._read_exactly(8, deadline))
        return json.loads(self._read_exactly(size, deadline))

    def _read_exactly(self, count: int, deadline: float) -> bytes:
        found = bytearray()
        while len(found) < count:
            ready, _, _ = select.select([self._helper.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = self._helper.stdout.read(count - len(found)) if ready else b""
            if not data:
                raise self._lost()
            found += data
        return bytes(found)

    def _lost(self) -> RuntimeError:
        status = self._helper.poll()
        return RuntimeError(
            "the sandbox's helper "
            + ("does not answer" if status is None else f"has ended with status {status}")
        )


def _environment() -> dict[str, str]:
    """All that programs see of this process' environment, which may have keys of services in it."""
    # Where libraries of the interpreter itself are found, on machines with modules.
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # The order of sets is the same each time, and so is the reward.
    return (
        kept
        | one_thread
        | {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/", "TMPDIR": ".", "PYTHONHASHSEED": "0"}
    )


def _outcome(answer: dict) -> Outcome:
    result, has_result = answer["result"], False
    if result is not None:
        try:
            result, has_result = plain.loads(result.encode()), True
        except (
            Exception
        ):  # such as OverflowError, for a float of 400 digits: the program has written there itself
            result = None
    return Outcome(
        Ended(answer["ended"]),
        answer["status"],
        answer["stdout"],
        answer["stderr"],
        answer["seconds"],
        has_result,
        result,
    )


# -- what this machine can contain --------------------------------------------------------------

# What a contained program must not be able to do, tried by one. It prints what it could.
_ATTEMPTS = """
import os, socket
def fork():
    if not os.fork():
        os._exit(0)
for name, attempt in {attempts}:
    try:
        attempt()
        print(name)
    except OSError:
        pass
"""
_OF_ALL = "('reach the network', socket.socket), ('start processes', fork)"
_OF_FILES = "('read files', lambda: open('/etc/passwd')), ('see processes', lambda: open('/proc/1/status'))"


@cache
def problem_with(containment: str) -> str | None:
    """Why this machine cannot contain programs so; None if it can. containment: of contain.py. Asked once in a process."""
    attempts = _OF_ALL if containment == NOTHING else f"{_OF_ALL}, {_OF_FILES}"
    program = Program(_ATTEMPTS.replace("{attempts}", f"({attempts})"))
    try:
        with Sandbox(containment=containment) as sandbox:
            outcome = sandbox.run(program)
    except (RuntimeError, OSError) as error:
        return str(error)
    if not outcome.succeeded:
        return (
            f"a program ended with status {outcome.status}, by {outcome.ended.value}: {outcome.stderr[-200:]}"
        )
    return f"programs could {' and '.join(outcome.stdout.splitlines())}" if outcome.stdout else None


def required_containment(isolation: Isolation) -> str:
    """The best containment that this machine has, if it is as `isolation` asks. Raises UserError otherwise."""
    problems = {}
    for containment in (NAMESPACES, LANDLOCK, *([NOTHING] if isolation == Isolation.no_network else [])):
        problems[containment] = problem_with(containment)
        if problems[containment] is None:
            return containment
    raise UserError(
        "this machine cannot keep programs that a model wrote from its files and network. "
        + "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        + ". Let users make namespaces (sysctl user.max_user_namespaces above 0, kernel.apparmor_restrict_unprivileged_userns=0, or a "
        "container that allows unshare), or use a kernel from 5.13 on with landlock in lsm=; reward.code.isolation=no_network does "
        "without the files"
    )

"""Sandbox runs untrusted Python programs and reports their outcomes."""

import json
import os
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from grpo_megatron.config.sandbox import Isolation, SandboxLimits
from grpo_megatron.errors import UserError
from grpo_megatron.sandbox import plain
from grpo_megatron.sandbox.contain import LANDLOCK, NAMESPACES, NOTHING
from grpo_megatron.sandbox.program import CommandStopped, Ended, Outcome, Program, ShellCommand

_PACKAGE_FOLDER = str(Path(__file__).parents[2])
# The helper runs with low priority, because many helpers may start at once on a busy machine. The programs
# have an even lower priority.
_START = (
    "import os, sys; os.nice(int(sys.argv[2])); sys.path.append(sys.argv[1]); "
    "from grpo_megatron.sandbox.helper import main; main(sys.argv[1], sys.argv[3:])"
)
# Seconds to wait for an answer beyond the program's own time limit. A helper has a higher priority than
# programs, but may be slow to start.
_ANSWER_SECONDS = 20.0
_LEAVE_SECONDS = 10.0
# Node does not start if it may not read OpenSSL's configuration.
_READ_BY_CLIENTS = ("/etc/ssl/openssl.cnf", "/etc/ssl/certs")


class Sandbox:
    """A helper process that runs untrusted programs one after the other, each in a process of its own.

    Usage: `with Sandbox(limits) as sandbox: outcome = sandbox.run(Program(...))`.

    Only one thread may use a sandbox at a time. No processes or files remain after the `with` block, even
    after an error.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        isolation: Isolation = Isolation.full,
        containment: str | None = None,
        nice: int = 19,
    ):
        """Choose how programs are contained. The helper process starts when the `with` block begins.

        limits: limits of each program. If None, the default limits hold.
        isolation: the least isolation that the caller accepts. The strongest mechanism that this machine
            supports is used.
        containment: mechanism to use instead, whatever `isolation` says: NAMESPACES, LANDLOCK, NOTHING or
            BARE of contain.py.
        nice: how much lower the priority of the helper is than that of this process.

        Raises UserError if this machine cannot isolate programs as `isolation` requires.
        """
        self._limits = asdict(limits or SandboxLimits())
        self._containment, self._nice = containment or required_containment(isolation), nice

    def __enter__(self) -> "Sandbox":
        self.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def start(self) -> None:
        """Start the helper process. `close` must be called afterwards."""
        packages = _packages()
        self._helper = subprocess.Popen(
            [sys.executable, "-s", "-S", "-P", "-c", _START, _PACKAGE_FOLDER, str(self._nice), *packages],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            cwd="/",
            env=clean_environment() | {"HOME": "/"},
            process_group=0,  # Ctrl-C should only reach the run itself
        )

    @property
    def is_alive(self) -> bool:
        """True while the helper process runs."""
        return self._helper.poll() is None

    def close(self) -> None:
        """End the helper process by closing its stdin. The helper ends its programs before it exits."""
        self._end_helper()
        self._helper.stdout.close()

    def _end_helper(self) -> None:
        self._helper.stdin.close()
        try:
            self._helper.wait(_LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self._helper.kill()  # its programs end with it
            self._helper.wait()

    def run(self, program: Program, within: float | None = None) -> Outcome:
        """Run a program in the sandbox, and return its outcome.

        within: maximum number of wall-clock seconds of the program. If None, it is ten times limits.seconds.
            Unlike limits.seconds, `within` also counts the time in which the program waits for a processor.

        Raises RuntimeError if the program cannot be contained, or if the helper process has ended or does not
        answer. Even then, the program has not run outside of the sandbox.
        """
        within = 10 * self._limits["seconds"] if within is None else within
        deadline = time.monotonic() + within + _ANSWER_SECONDS
        kind = "served" if program.tests is not None else "script" if program.arguments is None else "call"
        with tempfile.TemporaryDirectory(prefix="grpo-sandbox-", ignore_cleanup_errors=True) as folder:
            common = {"within": within, "processes": program.processes, "function": program.function}
            common |= {"stdin": program.stdin, "arguments": program.arguments}
            own = {"kind": kind, "source": program.source, "files": program.files}
            self._send(folder, common | own)
            answer = self._receive(deadline)
            if kind == "served" and "problem" not in answer:
                # Send the tests only now, so that the program is not forked from a process that has read
                # them.
                with tempfile.TemporaryDirectory(
                    prefix="grpo-sandbox-", ignore_cleanup_errors=True
                ) as other_folder:
                    self._send(other_folder, common | {"kind": "tests", "source": program.tests})
                    answer = self._receive(deadline)
        return _outcome(answer)

    def run_command(self, command: ShellCommand, stop: int) -> Outcome:
        """Run a shell command in the sandbox, and return its outcome. There is no limit on its time.

        stop: descriptor, such as of an eventfd. When it can be read, the command is ended.

        Raises CommandStopped after that, and what `run` raises. After an error, the sandbox must not be used
        again.
        """
        own = {"kind": "command", "source": command.command, "within": self._limits["seconds"]}
        readable = readable_by_command(command.links)
        with tempfile.TemporaryDirectory(prefix="grpo-agent-", ignore_cleanup_errors=True) as folder:
            try:
                self._send(folder, asdict(command) | own | {"readable": readable})
                return _outcome(self._receive(None, stop))
            except BaseException:
                self._end_helper()  # with the command, before its folder is deleted
                raise

    def _send(self, folder: str, specific: dict[str, Any]) -> None:
        """Send a program to the helper.

        specific: the parts of the message that this kind of program has.
        """
        message = {
            "files": {},
            "port": None,
            "readable": _python_folders(),
            "folder": folder,
            "limits": self._limits,
            "containment": self._containment,
            **specific,
        }
        data = json.dumps(message).encode()
        data = memoryview(len(data).to_bytes(8) + data)
        try:
            while data:
                data = data[self._helper.stdin.write(data) :]
        except BrokenPipeError:
            raise self._lost() from None

    def _receive(self, deadline: float | None, stop: int | None = None) -> dict:
        size = int.from_bytes(self._read_exactly(8, deadline, stop))
        return json.loads(self._read_exactly(size, deadline, stop))

    def _read_exactly(self, count: int, deadline: float | None, stop: int | None) -> bytes:
        """Read from the helper. Raises CommandStopped when the descriptor `stop` can be read."""
        found, answer = bytearray(), self._helper.stdout.fileno()
        waiting = select.poll()  # select.select takes no descriptor above 1023
        for descriptor in (answer, *([] if stop is None else [stop])):
            waiting.register(descriptor, select.POLLIN)
        while len(found) < count:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            ready = [descriptor for descriptor, _ in waiting.poll(left)]
            if stop in ready:
                raise CommandStopped
            data = self._helper.stdout.read(count - len(found)) if ready else b""
            if not data:
                raise self._lost()
            found += data
        return bytes(found)

    def _lost(self) -> RuntimeError:
        status = self._helper.poll()
        return RuntimeError(
            "the sandbox's helper process "
            + (
                "does not answer; the machine may be overloaded"
                if status is None
                else f"has ended with status {status}; its error is on stderr"
            )
        )


@cache
def _packages() -> list[str]:
    return sorted({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def _python_folders() -> list[str]:
    return [sys.base_prefix, sys.base_exec_prefix, *_packages()]


def readable_by_command(links: dict[str, str]) -> list[str]:
    """Return the files and folders that a contained shell command may read, besides those of the system.

    links: as in ShellCommand.
    """
    return [*_python_folders(), sys.prefix, *_READ_BY_CLIENTS, *links.values()]


def clean_environment() -> dict[str, str]:
    """Return the environment variables for the helper process and the sandboxed programs, except HOME.

    The environment variables of this process are not passed on, because they may contain API keys.
    """
    # The interpreter may need this to find its own libraries, on machines with environment modules.
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # PYTHONHASHSEED makes the order of sets, and so the reward, reproducible.
    return (
        kept | one_thread | {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": ".", "PYTHONHASHSEED": "0"}
    )


def _outcome(answer: dict) -> Outcome:
    if "problem" in answer:
        raise RuntimeError(f"the sandbox could not start a program: {answer['problem']}")
    result, has_result = answer["result"], False
    if result is not None:
        try:
            result, has_result = plain.loads(result.encode()), True
        # Any error is possible, because the program itself may have written to the channel. For example, a
        # float of 400 digits raises OverflowError.
        except Exception:
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

# A program that tries what a contained program must not be able to do. It prints the attempts that succeed.
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
    """Return why this machine cannot contain programs by the given mechanism, or None if it can.

    To find out, a test program in a sandbox tries forbidden actions. The result is cached in this process.

    containment: the mechanism: NAMESPACES, LANDLOCK or NOTHING of contain.py.
    """
    attempts = _OF_ALL if containment == NOTHING else f"{_OF_ALL}, {_OF_FILES}"
    program = Program(_ATTEMPTS.replace("{attempts}", f"({attempts})"))
    try:
        with Sandbox(containment=containment) as sandbox:
            outcome = sandbox.run(program)
    except (RuntimeError, OSError) as error:
        return str(error)
    if not outcome.succeeded:
        return (
            f"a test program ended with status {outcome.status} (cause: {outcome.ended.value}): "
            f"{outcome.stderr[-200:]}"
        )
    return f"a test program could {' and '.join(outcome.stdout.splitlines())}" if outcome.stdout else None


def required_containment(isolation: Isolation) -> str:
    """Return the strongest mechanism to contain programs that this machine supports and `isolation` allows.

    The result is NAMESPACES or LANDLOCK of contain.py. With Isolation.no_network, it may also be NOTHING,
    which does not protect files. Raises UserError if the machine supports none of these.
    """
    problems = {}
    for containment in (NAMESPACES, LANDLOCK, *([NOTHING] if isolation == Isolation.no_network else [])):
        problems[containment] = problem_with(containment)
        if problems[containment] is None:
            return containment
    raise UserError(
        "this machine cannot keep model-written programs away from its files and network: "
        + "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        + "; allow users to create namespaces (sysctl user.max_user_namespaces above 0, "
        "kernel.apparmor_restrict_unprivileged_userns=0, or a container that allows unshare), or use "
        "Linux 5.13 or later with landlock in lsm=, or set reward.code.isolation=no_network, which "
        "does not protect files"
    )

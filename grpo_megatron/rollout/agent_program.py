"""Programs as agents (rollout.agent.command): each episode runs one, in the sandbox or bare."""

import asyncio
import json
import os
import shlex
import sys
from collections import deque
from collections.abc import MutableMapping
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_megatron.config.agent import AgentConfig, AgentIsolation
from grpo_megatron.config.options import LONGEST_WAIT
from grpo_megatron.config.sandbox import SandboxLimits
from grpo_megatron.errors import UserError, printable
from grpo_megatron.files import json_text
from grpo_megatron.rollout.agent_task import AgentResult, AgentTask
from grpo_megatron.sandbox.contain import BARE, LANDLOCK, NAMESPACES, SYSTEM_FOLDERS
from grpo_megatron.sandbox.landlock import bounds_connections
from grpo_megatron.sandbox.program import Ended, Outcome, ShellCommand
from grpo_megatron.sandbox.run import Sandbox, clean_environment, problem_with, readable_by_command

# The engine and the trainer go first, if there are not enough processors.
_NICE = 5
# What a program may have many of.
_MANY = 100_000
_KEPT_OUTPUT_KIB = 64
# Each holds about 10 MB of memory.
_MOST_IDLE = 64
# Characters of an error message that come from a failed program.
_SHOWN = 2000
# Maximum bytes of an environment variable. Linux refuses 128 KiB.
_LONGEST_VARIABLE = 100_000


class ProgramFailed(UserError):
    """A program ended with an exit status other than 0, or exceeded a limit."""


class AgentProgram:
    """A shell command that plays an episode, with the endpoint in its environment and the task on stdin."""

    def __init__(self, config: AgentConfig):
        """Choose how the command is contained.

        Raises UserError if a file does not exist, if the command names a file that it could not find, or if
        this machine cannot isolate programs.
        """
        self._config, self._containment = config, _containment(config.isolation)
        self._running: set[int] = set()
        # Started sandboxes without a command. The start of one takes as long as that of a small program.
        self._idle: deque[Sandbox] = deque()
        self._links: dict[str, str] = {}
        for name in config.files:
            path = Path(name).resolve()
            if not path.exists():
                raise UserError(f"rollout.agent.files: {name} does not exist")
            if path.name in self._links:
                raise UserError(f"rollout.agent.files has two entries with the name {path.name}")
            self._links[path.name] = str(path)
        self._check_files_of_command()
        self._limits = SandboxLimits(
            seconds=LONGEST_WAIT,
            cpu_seconds=LONGEST_WAIT,
            memory_mib=config.memory_mib,
            threads=_MANY,
            files_mib=config.files_mib,
            files=_MANY,
            output_kib=_KEPT_OUTPUT_KIB,
        )

    def _check_files_of_command(self) -> None:
        """Raise UserError if the command names a file of the working directory that it could not find.

        A command with `cd` may name files of another folder, and is not checked.
        """
        words = shlex.shlex(self._config.command, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        try:
            found = list(words)
        except ValueError:  # the shell may read these quotes otherwise
            return
        for path in map(Path, found if "cd" not in found else ()):
            if os.path.isfile(path) and not self._is_found(path):
                raise UserError(
                    f"rollout.agent.command names {path}, but it runs in an empty folder"
                    + (", from which it cannot read this file" if path.is_absolute() else "")
                    + f"; add {path} to rollout.agent.files, and write {path.name} in the command"
                )

    def _is_found(self, path: Path) -> bool:
        """Return True if the command finds the file at this path, which exists in the working directory."""
        if not path.is_absolute():
            return path.parts[0] in self._links
        readable = [*SYSTEM_FOLDERS, "/proc", *readable_by_command(self._links)]
        return self._containment == BARE or any(map(path.is_relative_to, readable))

    async def run(self, task: AgentTask, threads: Executor) -> AgentResult:
        """Run the command until it ends. The result is the object in its last line of output with a reward.

        If this call is cancelled, the command's processes are killed before it returns.

        threads: runs the command in one of its threads.

        Raises ProgramFailed if the command fails, and RuntimeError if it could not be started.
        """
        stop = os.eventfd(0)
        self._running.add(stop)
        running = asyncio.get_running_loop().run_in_executor(threads, self._outcome, task, stop)
        running.add_done_callback(lambda _: self._forget(stop))
        try:
            outcome = await asyncio.shield(running)
        except asyncio.CancelledError:
            if stop in self._running:
                os.eventfd_write(stop, 1)
            await asyncio.wait([running])
            running.exception()  # otherwise asyncio logs it
            raise
        if not outcome.succeeded:
            raise ProgramFailed(self._why(outcome))
        return AgentResult(_last_object(outcome.stdout), _end_of_output(outcome))

    def _forget(self, stop: int) -> None:
        self._running.remove(stop)
        os.close(stop)

    def close(self) -> None:
        """Kill the processes of all commands that still run, and end the sandboxes."""
        for stop in self._running:
            os.eventfd_write(stop, 1)
        while self._idle:
            self._idle.pop().close()

    def _outcome(self, task: AgentTask, stop: int) -> Outcome:
        command = ShellCommand(
            self._config.command,
            json_text(asdict(task), default=str) + "\n",
            self._environment(task),
            self._links,
            urlsplit(task.base_url).port,
            self._config.processes,
        )
        sandbox = self._sandbox()
        try:
            outcome = sandbox.run_command(command, stop)
        except BaseException:
            sandbox.close()
            raise
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(sandbox)
        else:
            sandbox.close()
        return outcome

    def _sandbox(self) -> Sandbox:
        """Return a sandbox that runs no command."""
        while self._idle:
            try:
                sandbox = self._idle.pop()
            except IndexError:  # another thread has taken it
                break
            if sandbox.is_alive:  # the kernel may have killed it when memory ran out
                return sandbox
            sandbox.close()
        sandbox = Sandbox(self._limits, containment=self._containment, nice=_NICE)
        sandbox.start()
        return sandbox

    def _environment(self, task: AgentTask) -> dict[str, str]:
        """Return the environment variables of the command.

        With isolation=full, those of this process are not passed on, because they may contain keys.
        """
        if self._containment == BARE:
            found = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
        else:
            found = clean_environment()
        found["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), found.get("PATH", "/usr/bin:/bin")])
        bypass_proxies(found, urlsplit(task.base_url).hostname)
        found.pop("ANTHROPIC_AUTH_TOKEN", None)  # clients would send it in place of the key
        found |= {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_BASE": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_MODEL": task.model,
            "ANTHROPIC_BASE_URL": task.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": task.api_key,
            "ANTHROPIC_MODEL": task.model,
        }
        text = task.messages[-1]["content"] if task.messages else ""
        if isinstance(text, str) and len(text.encode()) <= _LONGEST_VARIABLE and "\0" not in text:
            found["TASK"] = text
        return found

    def _why(self, outcome: Outcome) -> str:
        """Return why a command failed, with the end of what it has written."""
        config = self._config
        why = {
            Ended.itself: f"ended with exit status {outcome.status}",
            Ended.memory: f"needed more than rollout.agent.memory_mib={config.memory_mib}",
            Ended.processes: f"had more than rollout.agent.processes={config.processes}",
            Ended.files: f"wrote more than rollout.agent.files_mib={config.files_mib}",
        }.get(outcome.ended, f"exceeded a limit ({outcome.ended.value})")
        if outcome.status < 0 and outcome.ended == Ended.itself:
            why = f"was ended by signal {-outcome.status}"
        text = _end_of_output(outcome)
        return f"the command {why}: {text}" if text else f"the command {why}, without an error message"


def bypass_proxies(environment: MutableMapping[str, str], address: str) -> None:
    """Change environment variables such that clients connect to loopback and to `address` without a proxy."""
    hosts = (environment.get("no_proxy") or environment.get("NO_PROXY", "")).split(",")
    hosts += [host for host in dict.fromkeys(("127.0.0.1", "localhost", address)) if host not in hosts]
    for name in ("no_proxy", "NO_PROXY"):
        environment[name] = ",".join(filter(None, hosts))


def _end_of_output(outcome: Outcome) -> str:
    """Return the end of what a command has written to stderr, or else to stdout, for a message."""
    return printable((outcome.stderr.strip() or outcome.stdout.strip())[-_SHOWN:])


def _last_object(stdout: str) -> dict[str, Any] | None:
    """Return the JSON object in the last line of a program's output, if it has a reward; else None."""
    lines = stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and "reward" in found else None


def _containment(isolation: AgentIsolation) -> str:
    """Return the mechanism with which this machine contains commands, see contain.py.

    Raises UserError if it has none that keeps all of the network but the endpoint from a command.
    """
    if isolation == AgentIsolation.none:
        return BARE
    problems = {}
    for containment in (NAMESPACES, LANDLOCK):
        problem = problem_with(containment)
        if problem is None and containment == LANDLOCK and not bounds_connections():
            problem = "this kernel cannot bound a program's connections (Linux 6.7 or later can)"
        if problem is None:
            return containment
        problems[containment] = problem
    raise UserError(
        "this machine cannot isolate rollout.agent.command: "
        + "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        + "; allow users to create namespaces (docs/security.md), or set rollout.agent.isolation=none, with "
        "which the program can do whatever the run can"
    )

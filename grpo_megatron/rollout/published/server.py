"""The process of verifiers' environment server: its settings, start, end, and what happens when it dies."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_megatron.cluster.last_words import last_words
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import json_text
from grpo_megatron.rollout.agent_task import AgentUnusable
from grpo_megatron.rollout.published.wire import AgentTrace, Opened, Wire, answers

INSTALL = "pip install verifiers==0.4.0 uv"
# Environment variable with the key of the gateway. verifiers hides it from the programs that it starts, as it
# does with all variables whose names contain API_KEY.
KEY_VARIABLE = "GRPO_MEGATRON_API_KEY"

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("program.py")
_START_SECONDS = 300.0
_CHECK_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 5.0
# How often the server may die, one after the other, without finishing an episode.
_MOST_DEATHS = 2
_ERROR = "error: "
# What has been checked: (rollout.environment, Python, settings).
_RIGHT: set[tuple[str, str, str]] = set()


def python_of(rollout: RolloutConfig) -> str:
    """Return the path of the Python that has verifiers. Raises UserError if it does not exist."""
    given = rollout.verifiers.python
    path = Path(given) if given else Path(sys.prefix).parent / ".venv-verifiers/bin/python"
    if not os.access(path, os.X_OK):
        raise UserError(
            f"rollout.environment={rollout.environment} needs verifiers in a Python environment of its own, "
            f"but there is no {path}; run `python -m venv {path.parent.parent}` and "
            f"`{path.parent}/{INSTALL}`, or set rollout.verifiers.python"
        )
    return str(path.absolute())


def settings_of(rollout: RolloutConfig, **further: Any) -> str:
    """Return the settings of program.py as JSON text.

    further: settings that only some actions of program.py have.

    Raises UserError if rollout.verifiers.env contradicts rollout.environment, or has an unquoted null as the
    id of a harness, which would mean the harness `bash`.
    """
    id, env = rollout.task_set, dict(rollout.verifiers.env)
    tasks = dict(env.get("taskset") or {})
    if not id:
        raise UserError("rollout.environment must name a task set, as in verifiers:textarena")
    if tasks.setdefault("id", id) != id:
        raise UserError(
            f"rollout.environment={rollout.environment}, but rollout.verifiers.env has the task set "
            f"{tasks['id']!r}; leave it out there"
        )
    for role, agent in env.items():
        harness = agent.get("harness") if isinstance(agent, dict) else None
        if isinstance(harness, dict) and "id" in harness and harness["id"] is None:
            raise UserError(
                f"rollout.verifiers.env: {role}.harness.id is null, which verifiers takes for the harness "
                'bash; write "null" in quotes for the harness of this name'
            )
    return json_text({"env": env | {"taskset": tasks}, "max_turns": rollout.max_turns} | further)


def run_program(rollout: RolloutConfig, action: str, seconds: float | None = None, **further: Any) -> None:
    """Run program.py to its end. Raises UserError with its error message if it fails.

    action: `check` or `tasks`.
    seconds: time limit; None: no limit.
    further: further settings.
    """
    python, what = python_of(rollout), f"rollout.environment={rollout.environment}"
    try:
        done = subprocess.run(
            [python, "-P", str(_PROGRAM), action],
            input=settings_of(rollout, **further) + "\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=_variables(python),
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{what} was not loaded within {seconds:g} s; if it downloads data, run the command again"
        ) from error
    if done.returncode:
        raise UserError(f"{what}: {_complaint(done.stderr)}")


def check_environment(rollout: RolloutConfig) -> None:
    """Check that verifiers can load the environment that rollout.environment names.

    An environment that was found right is not checked again by this process.

    Raises UserError if it cannot be loaded.
    """
    known = (rollout.environment, python_of(rollout), settings_of(rollout))
    if known not in _RIGHT:
        run_program(rollout, "check", _CHECK_SECONDS)
        _RIGHT.add(known)


def _complaint(text: str) -> str:
    """Return the error message that program.py has written last, or else the end of what it has written."""
    _, found, message = text.rpartition(f"\n{_ERROR}")
    return shortened((message if found else text.removeprefix(_ERROR)[-2000:]).strip(), 2000)


def _variables(python: str) -> dict[str, str]:
    """Return the environment variables of program.py. Programs such as uv come from its own environment."""
    return os.environ | {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYTHONUNBUFFERED": "1",
    }


class ServerLost(AgentUnusable):
    """The environment server has died while it played an episode."""


class VerifiersServer:
    """The process of the environment server. It is started again if it dies, and ends with this process.

    It listens on a socket in a folder that only this user can read.
    """

    def __init__(self, rollout: RolloutConfig, key: str, log: str):
        """Start the server, and wait until it answers.

        key: key of the gateway.
        log: path of its log file.

        Raises UserError if it does not start.
        """
        self._rollout, self._key, self._log = rollout, key, log
        self._python = python_of(rollout)
        self._folder = tempfile.mkdtemp(prefix="grpo-verifiers-")
        self._starts, self._closed = 0, False
        self._deaths = 0  # since an episode was finished
        self._wire: Wire | None = None
        self._process: subprocess.Popen | None = None
        self._starting = asyncio.Lock()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def play(self, task: dict[str, Any], url: str, model: str, opened: Opened) -> list[AgentTrace]:
        """Play one episode, and return its traces. A server that has died is started again before.

        task: data of the task.
        url: base URL of the gateway.
        model: name of the model in requests.
        opened: called when a trace begins, before its agent makes a request.

        Raises wire.EpisodeFailed if the episode fails, and ServerLost if the server dies meanwhile. Raises
        AgentUnusable if the server cannot be started again, or has died twice without finishing an episode.
        """
        async with self._starting:
            if self._process.poll() is not None:
                await self._again()
            if self._wire is None:
                self._wire = Wire(self._address)
                self._watching = asyncio.create_task(self._watch(self._process, self._wire))
            wire = self._wire
        # The same for all episodes, because verifiers keeps an HTTP client for each endpoint that it sees.
        endpoint = {"type": "eval", "base_url": url, "api_key_var": KEY_VARIABLE}
        traces = await wire.play(task, endpoint, model, opened)
        self._deaths = 0
        return traces

    async def _again(self) -> None:
        self._deaths += 1
        if self._deaths >= _MOST_DEATHS:
            raise AgentUnusable(
                f"{self._death()}\n  | It is not started again, as it has finished no episode."
            )
        if self._wire:
            await self._watching
            self._wire.close()
        self._wire = None
        try:
            await asyncio.to_thread(self._start)
        except UserError as error:
            raise AgentUnusable(str(error)) from error

    async def _watch(self, process: subprocess.Popen, wire: Wire) -> None:
        """Let the episodes in progress fail when the process ends."""
        while process.poll() is None:
            await asyncio.sleep(_LOOK_SECONDS)
        if not self._closed:
            logger.warning(self._death())
        wire.fail(ServerLost(self._death()))

    def _death(self) -> str:
        """Return a message about the end of the process, with the end of its log."""
        status = self._process.returncode
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        _, lines = last_words(self._log)
        first = (
            f"the environment server of rollout.environment={self._rollout.environment} (pid {self.pid}) has "
            f"ended with {how}; its log is {self._log}"
        )
        return "\n  | ".join([first, *lines])

    def _start(self) -> None:
        self._starts += 1
        self._address = f"ipc://{self._folder}/{self._starts}"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-P", str(_PROGRAM), "serve"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_variables(self._python) | {KEY_VARIABLE: self._key},
                start_new_session=True,  # Ctrl-C should only reach the run itself
            )
        settings = settings_of(self._rollout, address=self._address)
        with contextlib.suppress(BrokenPipeError):  # it has died already
            self._process.stdin.write(f"{settings}\n".encode())
            self._process.stdin.flush()
        deadline = time.monotonic() + _START_SECONDS
        while not answers(self._address, _LOOK_SECONDS):
            if self._process.poll() is not None:
                raise UserError(self._death())
            if time.monotonic() > deadline:
                raise UserError(
                    f"the environment server of rollout.environment={self._rollout.environment} has not "
                    f"answered within {_START_SECONDS:g} s; its log is {self._log}"
                )

    def close(self) -> None:
        """End the process. It may take some seconds to end what its episodes have started."""
        process, self._closed = self._process, True
        if process and process.poll() is None:
            process.terminate()
            try:
                process.wait(_LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

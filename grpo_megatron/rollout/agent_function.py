"""Functions as agents (rollout.agent.function): each episode calls one."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from concurrent.futures import Executor
from typing import Any

from grpo_megatron.errors import UserError, described
from grpo_megatron.rollout.agent_task import AgentResult, AgentTask, agent


class FunctionExited(UserError):
    """A function raised an error that must not reach an event loop, such as that of sys.exit()."""


class AgentFunction:
    """A user's function that plays an episode.

    It never runs in the event loop that serves its requests, because it may block. A normal function runs in
    a thread. All async functions run in one event loop, which has a thread of its own.
    """

    def __init__(self, name: str):
        """Look up the function. Raises UserError if it does not exist or does not accept a task.

        name: rollout.agent.function.
        """
        self._function = agent.get(name)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="async agents", daemon=True).start()

    async def run(self, task: AgentTask, threads: Executor) -> AgentResult:
        """Call the function, and return its result. Raises the function's errors, and FunctionExited.

        threads: runs a normal function in one of its threads.
        """
        result = await asyncio.get_running_loop().run_in_executor(threads, self._called, task)
        if inspect.isawaitable(result):
            awaiting = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop)
            result = await asyncio.wrap_future(awaiting)
        return AgentResult(result)

    def _called(self, task: AgentTask) -> Any:
        try:
            return self._function(task)
        except (SystemExit, StopIteration) as error:  # futures cannot carry a StopIteration
            raise FunctionExited(described(error)) from error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except SystemExit as error:  # it would end the event loop
        raise FunctionExited(described(error)) from error

"""The object in a worker process that runs environments. environment_workers.py has the other side."""

import asyncio
import inspect
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.cluster.worker_pool import WorkerDied
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError, described
from grpo_megatron.rewards.limits import interruptible_loop, time_limit
from grpo_megatron.rewards.values import NoReward, read_components, read_reward, shown
from grpo_megatron.rollout.environments import EnvironmentFailed, StepResult, resolve_environment

Decode = Callable[[np.ndarray], str]

_NOT_BEGUN = object()
# Time that code gets to leave its `finally` blocks after its time limit.
_LEAST_SECONDS = 0.001


class EnvironmentHost:
    """Holds the environments that run in one worker process, and calls their methods.

    Each environment belongs to one episode, whose number, from 0, is the first argument of the methods. While
    an async method awaits something, the methods of other episodes run.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        reward: RewardConfig,
        decode: Decode,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, str] | None = None,
    ):
        """Look up the environment. With rollout.environment=tools, start the servers of its tools.

        tools: schemas of the tools that prompts show to the model. None: they are not compared with those
            that the servers list here.
        variables: environment variables of the driver that the servers need.

        Raises UserError if the environment cannot be used, or if the tools here differ from `tools`.
        """
        self._name, self._timeout, self._decode = rollout.environment, reward.timeout, decode
        self._make = resolve_environment(rollout, reward)
        os.environ.update(variables or {})
        if rollout.environment == "tools":
            self._make.start(tools)
        self._loop = interruptible_loop()
        self._alive: dict[int, tuple[Any, int]] = {}  # (instance, uid of the prompt)

    def work(self, calls: Sequence[tuple[str, int, tuple]], seconds: float) -> list[Any]:
        """Call methods of this object. Return the result of each call, or the UserError it raised.

        Calls begin in order. The calls of one episode run one after the other.

        calls: for each call (name of the method, number of the episode, further arguments).
        seconds: time after which no further call begins. If calls are left at that time, the returned list is
            shorter than `calls`.
        """
        found = self._loop.run_until_complete(self._work(calls, time.monotonic() + seconds))
        return list(itertools.takewhile(lambda result: result is not _NOT_BEGUN, found))

    async def _work(self, calls: Sequence[tuple[str, int, tuple]], until: float) -> list[Any]:
        async def answer(number: int, call: tuple[str, int, tuple], earlier: asyncio.Task | None) -> Any:
            if number and time.monotonic() > until:
                return _NOT_BEGUN
            if earlier:
                await asyncio.wait([earlier])
            method, episode, arguments = call
            try:
                return await getattr(self, method)(episode, *arguments)
            except UserError as error:
                return error

        tasks: list[asyncio.Task] = []
        last: dict[int, asyncio.Task] = {}  # {episode: task of its last call}
        for number, call in enumerate(calls):
            tasks.append(asyncio.create_task(answer(number, call, last.get(call[1]))))
            last[call[1]] = tasks[-1]
        return await asyncio.gather(*tasks)

    async def text(self, episode: int, ids: np.ndarray) -> str:
        return self._decode(ids)

    async def reset(self, episode: int, prompt: Prompt, seed: int) -> str | list[dict[str, Any]]:
        where = f"environment {self._name}: reset() on record {prompt.uid}"

        async def make_and_reset():
            instance = self._make(prompt)
            self._alive[episode] = instance, prompt.uid  # from now on it has to be closed
            return await _called(instance.reset, seed)

        observation = await self._limited(where, make_and_reset)
        if observation is not None and not _is_observation(observation):
            raise EnvironmentFailed(
                f"{where} returned {shown(observation)}; it must return text, chat messages with role and "
                "content, or None"
            )
        return observation or ""

    async def step(
        self, episode: int, response_ids: np.ndarray, *parts: WrittenTurn
    ) -> tuple[str, StepResult]:
        if episode not in self._alive:
            # A new process has replaced the one with this episode. A call whose result is ignored, such as
            # `close` of another episode, may have been the first to notice that the old process was dead.
            raise WorkerDied(
                f"environment {self._name}: the process of an episode died between two turns, so the "
                "episode is lost"
            )
        instance, uid = self._alive[episode]
        response = self._decode(response_ids)
        where = f"environment {self._name}: step({response[:80]!r}) on record {uid}"
        answer = await self._limited(where, lambda: _called(instance.step, response, *parts))
        return response, _checked(answer, where)

    async def close(self, episode: int) -> None:
        instance, uid = self._alive.pop(episode, (None, None))  # the instance may not even exist
        if hasattr(instance, "close"):
            where = f"environment {self._name}: close() on record {uid}"
            await self._limited(where, lambda: _called(instance.close))

    async def _limited(self, where: str, call: Callable[[], Coroutine]) -> Any:
        """Run a coroutine with the time limit reward.timeout, and return its result.

        where: environment, method and record, for the error message.
        call: function that returns the coroutine.

        Raises EnvironmentFailed if the coroutine raises an error or exceeds the time limit.
        """
        try:
            async with asyncio.timeout(self._timeout) as limit:
                return await _Interruptible(call(), time.monotonic() + self._timeout)
        except UserError as error:
            raise EnvironmentFailed(f"{where} failed: {error}") from error
        except (Exception, SystemExit) as error:
            if not (limit.expired() or isinstance(error, _TooLong)):
                raise EnvironmentFailed(f"{where} failed: {described(error)}") from error
        raise EnvironmentFailed(f"{where} took longer than reward.timeout={self._timeout} s")


class _TooLong(Exception):
    """Error: code exceeded its time limit between two awaits."""


class _Interruptible:
    """Awaitable that runs a coroutine, and interrupts it at the deadline, even if its code does not await.

    `await _Interruptible(coroutine, deadline)` returns the coroutine's result. It raises _TooLong if the code
    of the coroutine runs at the deadline. A coroutine that waits for something at the deadline is not
    interrupted. This works only in the main thread of a process.

    deadline: as a value of time.monotonic()
    """

    def __init__(self, coroutine: Coroutine, deadline: float):
        self._coroutine, self._deadline = coroutine, deadline

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self._coroutine.send, None
        while True:
            with time_limit(max(self._deadline - time.monotonic(), _LEAST_SECONDS)) as limit:
                try:
                    awaited = resume(value)
                except StopIteration as end:
                    return end.value
            if limit.reached:
                raise _TooLong
            try:
                resume, value = self._coroutine.send, (yield awaited)
            except BaseException as error:  # such as the cancellation at the end of a time limit
                resume, value = self._coroutine.throw, error


async def _called(function: Callable, *arguments: Any) -> Any:
    """Call a function, and return its result. The result of an async function is awaited."""
    value = function(*arguments)
    return await value if inspect.isawaitable(value) else value


def _is_observation(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in value
    )


def _checked(result: Any, where: str) -> StepResult:
    """Check the result of an environment's step(), and return it with plain Python numbers.

    where: environment, method and record, for the error message.

    Raises EnvironmentFailed if the result is not a valid StepResult.
    """
    if not isinstance(result, StepResult):
        raise EnvironmentFailed(f"{where} returned {shown(result)}; it must return a StepResult")
    legal = isinstance(result.done, (bool, np.bool_)) and isinstance(result.components, dict)
    if not legal or not _is_observation(result.observation):
        raise EnvironmentFailed(
            f"{where} returned {shown(result)}; observation must be text or chat messages, done must be true "
            "or false, and components must be a dict"
        )
    try:
        reward = read_reward({"reward": result.reward})["reward"]
        components = read_components(result.components)
    except NoReward as error:
        raise EnvironmentFailed(f"{where} returned {shown(result)}; {error}") from None
    return StepResult(result.observation, reward, bool(result.done), components)

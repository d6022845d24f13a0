"""Scoring in the reward workers: the tasks, their results, and the Scorer that computes them.

This module is light to import, because each worker starts with it.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.errors import described
from grpo_megatron.rewards.base import Reward, resolve_rewards
from grpo_megatron.rewards.limits import FreeMemory, interruptible_loop, time_limit
from grpo_megatron.rewards.values import NoReward, read_reward, read_rewards, shown


@dataclass(frozen=True)
class RewardTask:
    """A task for a reward worker: score one response with all rewards of single responses."""

    uid: int
    """Unique id (uid) of the prompt, for messages."""
    prompt: str
    """Text of the prompt."""
    response_ids: np.ndarray
    """int32 [R], token ids of the response. The worker decodes them to text."""
    answer: str | list[str]
    """Reference answer, or a list of accepted answers."""
    record: dict
    """The other fields of the data record."""


@dataclass(frozen=True)
class GroupTask:
    """A task for a reward worker: score all responses to one prompt together with the group rewards."""

    uid: int
    """Unique id (uid) of the prompt, for messages."""
    prompt: str
    """Text of the prompt."""
    responses: list[str]
    """Text of each response."""
    answer: str | list[str]
    """Reference answer, or a list of accepted answers."""
    record: dict
    """The other fields of the data record."""
    tokens: list[int]
    """Length of each response in tokens."""
    components: list[dict[str, float]]
    """Reward components of each response, {name: value}, as the rewards of single responses computed them."""


@dataclass(frozen=True)
class Scored:
    """The result of a RewardTask whose rewards all succeeded."""

    text: str
    """Text of the response."""
    components: dict[str, float]
    """{name of a term: value}, and {name: value} of the further numbers that reward functions returned."""


@dataclass(frozen=True)
class GroupScored:
    """The result of a GroupTask whose rewards all succeeded."""

    values: dict[str, list[float]]
    """{name of a term with a group reward: its value for each response}."""


@dataclass(frozen=True)
class Failed:
    """The result of a task whose reward raised an error, took too long, or returned no valid reward."""

    why: str
    """Message to the user that names the reward, the record and the error."""
    text: str = ""
    """Text of the response. Empty if the task was a GroupTask."""
    no_memory: bool = False
    """True if the reward ran out of memory."""


@dataclass(frozen=True)
class ScorerSpec:
    """Recipe for the Scorer, the object that computes rewards in a worker process.

    The recipe is sent to the worker processes. Each process calls it to make its own Scorer.
    """

    config: RewardConfig
    decode: Callable[[np.ndarray], str]
    """Function from int32 token ids to text."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """{environment variable that the rewards read: its value}, such as the token of a server."""

    def __call__(self) -> "Scorer":
        return Scorer(self.config, self.decode, self.secrets)


class _Failure(Exception):
    """Error: a reward failed. The text of the exception is the complete message to the user."""

    def failed(self, text: str = "") -> Failed:
        return Failed(str(self), text, isinstance(self.__cause__, MemoryError))


class _TooLong(Exception):
    """Error: a reward took too long. It is not a TimeoutError, because a reward function may raise that."""


class Scorer:
    """The object that computes rewards in a worker process. Async rewards of many tasks run concurrently.

    is_worn: True if reward calls have left so much memory allocated that further calls fail. The pool of
        workers then replaces the process.
    """

    def __init__(
        self,
        config: RewardConfig,
        decode: Callable[[np.ndarray], str],
        secrets: Mapping[str, str] | None = None,
    ):
        self._timeout, self._decode = config.timeout, decode
        rewards = resolve_rewards(config, secrets)
        self._of_responses = [reward for reward in rewards if not reward.of_group]
        self._of_groups = [reward for reward in rewards if reward.of_group]
        self._loop, self.is_worn = interruptible_loop(), False
        self._memory: FreeMemory | None = None  # created at the first call, when the process has its limits

    def work(
        self, tasks: Sequence[RewardTask | GroupTask], seconds: float
    ) -> list[Scored | GroupScored | Failed]:
        """Score tasks, and return the results in the order of the tasks.

        After `seconds`, or once the object's `is_worn` is True, no further task begins. The list then has
        only the results of the first tasks. The pool of workers (cluster.worker_pool) sends the other tasks
        again.

        seconds: time in which tasks may begin. The first task begins in any case, except while `is_worn` is
            True.
        """
        return self._loop.run_until_complete(self._score_all(tasks, time.monotonic() + seconds))

    async def _score_all(
        self, tasks: Sequence[RewardTask | GroupTask], deadline: float
    ) -> list[Scored | GroupScored | Failed]:
        async def score(index: int, task: RewardTask | GroupTask) -> Scored | GroupScored | Failed | None:
            if self.is_worn or (index and time.monotonic() > deadline):
                return None
            is_first, self._memory = self._memory is None, self._memory or FreeMemory()
            found = await (self._score_group(task) if isinstance(task, GroupTask) else self._score(task))
            if isinstance(found, Failed) and found.no_memory and self._memory.is_kept():
                self.is_worn = True
                # Earlier calls may have left the memory allocated. The pool then tries this task again, in a
                # new process.
                return found if is_first else None
            return found

        found = await asyncio.gather(*(score(index, task) for index, task in enumerate(tasks)))
        return found[: found.index(None)] if None in found else found

    async def _score(self, task: RewardTask) -> Scored | Failed:
        text, deadline = self._decode(task.response_ids), time.monotonic() + self._timeout
        where = f"record {task.uid} (response {text[:80]!r})"
        values: dict[str, float] = {}
        others: dict[str, float] = {}
        given = {"prompt": task.prompt, "response": text, "answer": task.answer, "record": task.record}
        try:
            for reward in self._of_responses:
                options = {"tokens": len(task.response_ids), "components": values}
                found = await self._call(reward, deadline, where, given, options)
                try:
                    own = read_reward(found)
                except NoReward as error:
                    raise _invalid_reward(found, reward, where, error) from None
                prefix = "" if reward.term.is_whole else f"{reward.term.name}/"
                values[reward.term.name] = own.pop("reward")
                others |= {prefix + name: number for name, number in own.items()}
        except _Failure as failure:
            return failure.failed(text)
        return Scored(text, values | others)

    async def _score_group(self, task: GroupTask) -> GroupScored | Failed:
        deadline, where = time.monotonic() + self._timeout, f"the group of record {task.uid}"
        components = [dict(found) for found in task.components]
        values: dict[str, list[float]] = {}
        given = {
            "prompt": task.prompt,
            "responses": task.responses,
            "answer": task.answer,
            "record": task.record,
        }
        try:
            for reward in self._of_groups:
                options = {"tokens": task.tokens, "components": components}
                found = await self._call(reward, deadline, where, given, options)
                try:
                    values[reward.term.name] = own = read_rewards(found, len(task.responses))
                except NoReward as error:
                    raise _invalid_reward(found, reward, where, error) from None
                for one, number in zip(components, own, strict=True):
                    one[reward.term.name] = number
        except _Failure as failure:
            return failure.failed()
        return GroupScored(values)

    async def _call(
        self, reward: Reward, deadline: float, where: str, given: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        options["args"] = dict(reward.term.args)
        failed = f"reward {reward.name} failed on {where}"
        try:
            return await _limited(
                deadline, reward.function, given | {name: options[name] for name in reward.wants}
            )
        except _TooLong:
            raise _Failure(f"{failed}: it took longer than reward.timeout={self._timeout} s") from None
        except (Exception, SystemExit) as error:
            raise _Failure(f"{failed}: {described(error)}") from error


async def _limited(deadline: float, function: Callable, arguments: dict[str, Any]) -> Any:
    """Call a function within a time limit, and return its result. The result of an async function is awaited.

    deadline: end of the time limit, as a value of time.monotonic().
    arguments: the function's keyword arguments.

    Raises _TooLong if the function has not returned at the deadline. Errors of the function are passed on;
    SystemExit raised in an awaited result becomes RuntimeError.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise _TooLong
    with time_limit(left) as limit:  # interrupts Python code; this is the main thread of its process
        value = function(**arguments)
    if limit.reached:
        raise _TooLong
    if inspect.isawaitable(value):
        task = asyncio.ensure_future(_without_exit(value))
        done, _ = await asyncio.wait([task], timeout=max(deadline - time.monotonic(), 0.0))
        if not done:
            task.cancel()
            raise _TooLong
        value = task.result()
    return value


async def _without_exit(value: Awaitable) -> Any:
    """Await a value, and return the result. Raise RuntimeError if the awaited code raises SystemExit."""
    try:
        return await value
    except SystemExit as error:  # it would end the event loop, and with it the scoring of all other tasks
        raise RuntimeError(f"SystemExit: {error}") from error


def _invalid_reward(value: Any, reward: Reward, where: str, error: NoReward) -> _Failure:
    """Return the exception for a reward function that returned an invalid value.

    value: what the function returned.
    reward: reward whose function was called.
    where: the response or group that was scored, for the message.
    error: says what a valid value is.
    """
    return _Failure(f"reward {reward.name} returned {shown(value)} for {where}; {error}")

"""Scoring in the reward workers: what a task is, and what comes of it. Light to import, because each worker starts with it."""

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
    """A response to be scored. uid: of the prompt, for messages. response_ids: int32 [R]."""

    uid: int
    prompt: str
    response_ids: np.ndarray
    answer: str | list[str]
    record: dict


@dataclass(frozen=True)
class GroupTask:
    """All responses to a prompt, to be scored together. tokens: the lengths of the responses. components: of each."""

    uid: int
    prompt: str
    responses: list[str]
    answer: str | list[str]
    record: dict
    tokens: list[int]
    components: list[dict[str, float]]


@dataclass(frozen=True)
class Scored:
    """text: of the response. components: the values of the terms, by their names, and what else their functions returned."""

    text: str
    components: dict[str, float]


@dataclass(frozen=True)
class GroupScored:
    """values: of each term, one number for each response."""

    values: dict[str, list[float]]


@dataclass(frozen=True)
class Failed:
    """A reward has failed; why is a sentence. text: of the response. no_memory: for want of it."""

    why: str
    text: str = ""
    no_memory: bool = False


@dataclass(frozen=True)
class ScorerSpec:
    """Makes a Scorer, in the process that shall have it. decode: int32 ids -> text. secrets: see base.resolve_rewards."""

    config: RewardConfig
    decode: Callable[[np.ndarray], str]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __call__(self) -> "Scorer":
        return Scorer(self.config, self.decode, self.secrets)


class _Failure(Exception):
    """Of one reward; its text says all that is to be said."""

    def failed(self, text: str = "") -> Failed:
        return Failed(str(self), text, isinstance(self.__cause__, MemoryError))


class _TooLong(Exception):
    """Not TimeoutError, which may be of the reward itself."""


class Scorer:
    """Scores tasks by the rewards that the configuration names; those of async functions all at once.

    is_worn: earlier calls keep so much memory that later ones fail; another process is to take the place of this one.
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
        self._memory: FreeMemory | None = None  # from the first call on, when the process has its limits

    def work(
        self, tasks: Sequence[RewardTask | GroupTask], seconds: float
    ) -> list[Scored | GroupScored | Failed]:
        """Of the first tasks: as many as could be begun within these seconds, but at least one, unless it is worn."""
        return self._loop.run_until_complete(self._score_all(tasks, time.monotonic() + seconds))

    async def _score_all(
        self, tasks: Sequence[RewardTask | GroupTask], until: float
    ) -> list[Scored | GroupScored | Failed]:
        async def score(number: int, task: RewardTask | GroupTask) -> Scored | GroupScored | Failed | None:
            if self.is_worn or (number and time.monotonic() > until):
                return None
            is_first, self._memory = self._memory is None, self._memory or FreeMemory()
            found = await (self._score_group(task) if isinstance(task, GroupTask) else self._score(task))
            if isinstance(found, Failed) and found.no_memory and self._memory.is_kept():
                self.is_worn = True
                return found if is_first else None  # what others keep is no fault of this one
            return found

        found = await asyncio.gather(*(score(number, task) for number, task in enumerate(tasks)))
        return found[: found.index(None)] if None in found else found

    async def _score(self, task: RewardTask) -> Scored | Failed:
        text, until = self._decode(task.response_ids), time.monotonic() + self._timeout
        where = f"record {task.uid} (response {text[:80]!r})"
        values: dict[str, float] = {}
        others: dict[str, float] = {}
        given = {"prompt": task.prompt, "response": text, "answer": task.answer, "record": task.record}
        try:
            for reward in self._of_responses:
                options = {"tokens": len(task.response_ids), "components": values}
                found = await self._call(reward, until, where, given, options)
                try:
                    own = read_reward(found)
                except NoReward as error:
                    raise _returned(found, reward, where, error) from None
                prefix = "" if reward.term.is_whole else f"{reward.term.name}/"
                values[reward.term.name] = own.pop("reward")
                others |= {prefix + name: number for name, number in own.items()}
        except _Failure as failure:
            return failure.failed(text)
        return Scored(text, values | others)

    async def _score_group(self, task: GroupTask) -> GroupScored | Failed:
        until, where = time.monotonic() + self._timeout, f"the group of record {task.uid}"
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
                found = await self._call(reward, until, where, given, options)
                try:
                    values[reward.term.name] = own = read_rewards(found, len(task.responses))
                except NoReward as error:
                    raise _returned(found, reward, where, error) from None
                for one, number in zip(components, own, strict=True):
                    one[reward.term.name] = number
        except _Failure as failure:
            return failure.failed()
        return GroupScored(values)

    async def _call(
        self, reward: Reward, until: float, where: str, given: dict[str, Any], options: dict[str, Any]
    ) -> Any:
        options["args"] = dict(reward.term.args)
        failed = f"reward {reward.name} failed on {where}"
        try:
            return await _limited(
                until, reward.function, given | {name: options[name] for name in reward.wants}
            )
        except _TooLong:
            raise _Failure(f"{failed}: took longer than reward.timeout={self._timeout} s") from None
        except (Exception, SystemExit) as error:
            raise _Failure(f"{failed}: {described(error)}") from error


async def _limited(until: float, function: Callable, arguments: dict[str, Any]) -> Any:
    """What it returns, of an async function what it comes to. until: by time.monotonic(). Raises _TooLong."""
    left = until - time.monotonic()
    if left <= 0:
        raise _TooLong
    with time_limit(left) as limit:  # interrupts Python code; this is the main thread of its process
        value = function(**arguments)
    if limit.reached:
        raise _TooLong
    if inspect.isawaitable(value):
        task = asyncio.ensure_future(_without_exit(value))
        done, _ = await asyncio.wait([task], timeout=max(until - time.monotonic(), 0.0))
        if not done:
            task.cancel()
            raise _TooLong
        value = task.result()
    return value


async def _without_exit(value: Awaitable) -> Any:
    try:
        return await value
    except SystemExit as error:  # would end the event loop, and with it the scoring of all others
        raise RuntimeError(f"SystemExit: {error}") from error


def _returned(value: Any, reward: Reward, where: str, error: NoReward) -> _Failure:
    return _Failure(f"reward {reward.name} returned {shown(value)} for {where}; {error}")

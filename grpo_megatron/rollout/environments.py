"""Environments: they answer the model over several turns, and run in separate worker processes.

An environment is a class (or a function that makes an instance) registered by `@environment("name")`. One
instance plays one episode. All its methods run one after the other in one process, each within reward.timeout
seconds. This module is light to import, because the worker processes import only it when they start.
"""

import asyncio
import inspect
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.worker_pool import WorkerDied, WorkerHangs, WorkerPool
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import ProcessLost, UserError, described
from grpo_megatron.logs import Rarely
from grpo_megatron.plugins import Call, Registry
from grpo_megatron.rewards.limits import interruptible_loop, time_limit
from grpo_megatron.rewards.values import NoReward, read_components, read_reward, shown
from grpo_megatron.rewards.workers import bounds

logger = logging.getLogger(__name__)

Decode = Callable[[np.ndarray], str]

BUILT_IN = ("gymnasium", "tools")


class EnvironmentFailed(UserError):
    """A method of an environment raised an error, exceeded its time limit, or returned an invalid value."""


# Errors that cost only the episode, if reward.on_failure allows it. All other errors end the run.
FAILURES = (EnvironmentFailed, WorkerDied, WorkerHangs)

# Methods of an environment, with the names of their arguments.
_METHODS = {"reset": ("seed",), "step": ("response",), "close": ()}

# The registry holds environments from plugins. The built-in ones are made from the configuration.
environment = Registry("environment", "rollout.environment", BUILT_IN, Call(("prompt",)))


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one turn of the model."""

    observation: str | list[dict[str, Any]] = ""
    """Text or chat messages (dicts with role and content) that the model reads next."""
    reward: float = 0.0
    """Reward of this turn. The reward of the whole episode is the sum over its turns."""
    done: bool = False
    """True if the episode is over. `observation` is then not used."""
    components: dict[str, float] = field(default_factory=dict)
    """Further numbers for the logs, by name. Each is summed over the turns of the episode."""


class Environment(Protocol):
    """The interface of an environment. One instance plays one episode.

    The methods may also be plain functions, without `async`. The class or function that is registered by
    `@environment` may have two attributes:

    - tools: a list of JSON schemas of functions, which the chat template shows to the model.
    - asks_reward_function: if True, reward.function scores the text of the last turn. This score is added to
      the rewards of the turns.
    """

    def __init__(self, prompt: Prompt): ...

    async def reset(self, seed: int) -> str | list[dict[str, Any]] | None:
        """Begin the episode, and return the first observation, which the model reads after the prompt.

        The observation is a text or a list of chat messages. None means that the model reads the prompt only.

        seed: seed of the initial state. All episodes of a group (one prompt) get the same seed, so that they
            start in the same state.
        """

    async def step(self, response: str) -> StepResult:
        """Process one turn of the model, and return the environment's answer.

        response: the text of the turn, without end and padding tokens.
        """

    async def close(self) -> None:
        """Release the environment's resources. A class may omit this method.

        It is the last call that an instance gets, even if the episode failed.
        """


def resolve_environment(rollout: RolloutConfig, reward: RewardConfig) -> Callable[[Prompt], Environment]:
    """Return the class or function that rollout.environment names. It makes an environment from a prompt.

    reward: configuration whose time limit and sandbox settings the environment `tools` uses.

    Raises UserError if the name is unknown, or if the environment cannot be used, for example because a
    method is missing.
    """
    if rollout.environment == "gymnasium":
        from grpo_megatron.rollout.gymnasium_environment import gymnasium_environment

        return gymnasium_environment(rollout.gymnasium)
    if rollout.environment == "tools":
        from grpo_megatron.rollout.tool_environment import ToolEnvironment

        return ToolEnvironment(rollout.tools, reward)
    made = environment.get(rollout.environment)
    if inspect.isclass(made):
        _check_methods(made, f"rollout.environment={rollout.environment}")
    return made


def _check_methods(made: type, setting: str) -> None:
    """Raise UserError if an environment's class lacks `reset` or `step`, or a method has wrong parameters.

    made: the environment's class.
    setting: configuration key and value that name the class, for the error message.
    """
    for name, arguments in _METHODS.items():
        method = inspect.getattr_static(made, name, None)
        if method is None and name != "close":
            raise UserError(
                f"{setting}: the environment has no method {name} (docs/plugins.md shows an example)"
            )
        if not inspect.isfunction(method):
            continue
        problem = Call(("self", *arguments), may_be_async=True).problem(method)
        if problem:
            raise UserError(
                f"{setting}: the environment's method {name} {problem} (docs/plugins.md shows an example)"
            )


def asks_reward_function(rollout: RolloutConfig, reward: RewardConfig) -> bool:
    """Return True if a run calls the reward functions of reward.function.

    This is the case if the run has no environment, or if the environment's class has the attribute
    `asks_reward_function` with the value True.

    Raises UserError if rollout.environment is unknown or cannot be used.
    """
    return rollout.environment is None or _asks(resolve_environment(rollout, reward))


def _asks(made: Callable[[Prompt], Environment]) -> bool:
    return bool(getattr(made, "asks_reward_function", False))


def offered_tools(rollout: RolloutConfig, reward: RewardConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of the functions that the environment lets the model call; [] if none.

    Raises UserError if rollout.environment is unknown or cannot be used.
    """
    return list(getattr(resolve_environment(rollout, reward), "tools", ())) if rollout.environment else []


class Environments:
    """The worker processes that run environments. Each process runs many instances (episodes) at a time.

    asks_reward_function: True if reward.function scores the last turn of each episode
    reads_calls: True if the environment also gets the tool calls of each turn, in the model's own format
    """

    def __init__(self, rollout: RolloutConfig, reward: RewardConfig, decode: Decode, places: Sequence[Place]):
        """Start the worker processes of the environment that rollout.environment names.

        decode: function from int32 token ids to text. A copy of the function runs in the worker processes.
        places: node, process name and log file of each worker process.

        Raises UserError if rollout.environment is unknown or cannot be used.
        """
        made = resolve_environment(rollout, reward)  # errors in the setup are raised before any work is done
        self.asks_reward_function, self.reads_calls = _asks(made), bool(getattr(made, "reads_calls", False))
        what, build = f"environment {rollout.environment}", partial(_Host, rollout, reward, decode)
        # One pool per worker, because all calls of an episode must go to the process that holds its instance.
        # If that process dies, the episode is lost.
        self._pools = [WorkerPool(what, build, bounds(reward), [place], again=False) for place in places]
        self._timeout, self._episodes = reward.timeout, itertools.count()
        self._warn = Rarely(logger, once=True)

    def episode(self, prompt: Prompt) -> "RemoteEnvironment":
        """Return the handle of a new episode. The handle's `reset` makes the environment in a worker process.

        prompt: the prompt from which the environment is made.
        """
        episode = next(self._episodes)
        pool = self._pools[episode % len(self._pools)]
        return RemoteEnvironment(pool, episode, prompt, self._timeout, self._could_not_close)

    def _could_not_close(self, problem: str) -> None:
        """Log a warning that an environment could not be closed. Only the first call logs.

        problem: why the environment could not be closed.
        """
        self._warn(f"{problem}; the run continues and reports no further episodes that cannot be closed")

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


class RemoteEnvironment:
    """Handle of one episode's environment, which runs in a worker process. A rollout worker has the handle.

    If the environment or its process fails, all methods except `close` raise EnvironmentFailed, WorkerDied or
    WorkerHangs.
    """

    def __init__(
        self,
        pool: WorkerPool,
        episode: int,
        prompt: Prompt,
        timeout: float,
        could_not_close: Callable[[str], None],
    ):
        self._pool, self._episode, self._prompt = pool, episode, prompt
        self._timeout, self._could_not_close = timeout, could_not_close

    async def reset(self, seed: int) -> str | list[dict[str, Any]]:
        """Make the environment and begin the episode. Return the first observation; "" if there is none.

        seed: seed of the environment's initial state.
        """
        return await self._call("reset", self._prompt, seed)

    async def step(self, response_ids: np.ndarray, *parts: WrittenTurn) -> tuple[str, StepResult]:
        """Pass one turn of the model to the environment. Return (text of the turn, environment's answer).

        response_ids: int32 token ids of the turn. The worker process decodes them.
        parts: the parts of the turn, only for an environment that reads calls.
        """
        return await self._call("step", response_ids, *parts)

    async def text(self, ids: np.ndarray) -> str:
        """Decode int32 token ids to text in the worker process, which spares CPU time of the caller."""
        return await self._call("text", ids)

    async def close(self) -> None:
        """Close the environment, and remove it from its worker process. Errors are logged, not raised."""
        try:
            closing = asyncio.ensure_future(self._call("close"))
            # If the generation is aborted, it waits here. The time is enough for a running step and for the
            # closing itself, but not for everything else that a busy process does first.
            await asyncio.wait({closing}, timeout=2 * self._timeout)
            if closing.done():
                closing.result()
            else:
                # The close must outlive this event loop: an environment that is never closed stays in its
                # process for as long as the process lives.
                closing.cancel()
                self._pool.tell(("close", self._episode, ()))
        except ProcessLost:
            pass  # the worker process is gone, with its environments; its next episode reports that
        except UserError as error:
            self._could_not_close(str(error))

    async def _call(self, method: str, *arguments) -> Any:
        result = await self._pool.call((method, self._episode, arguments))
        if isinstance(result, UserError):
            raise result
        return result


# -- in the processes ---------------------------------------------------------------------------


class _Host:
    """Holds the environments that run in one worker process, and calls their methods.

    Each environment belongs to one episode. Environments.episode numbers the episodes, from 0.
    """

    def __init__(self, rollout: RolloutConfig, reward: RewardConfig, decode: Decode):
        self._name, self._timeout, self._decode = rollout.environment, reward.timeout, decode
        self._make = resolve_environment(rollout, reward)
        self._loop = interruptible_loop()
        self._alive: dict[int, tuple[Any, int]] = {}  # (instance, uid of the prompt)

    def work(self, calls: Sequence[tuple[str, int, tuple]], seconds: float) -> list[Any]:
        """Call methods of this object in order. Return the result of each call, or the UserError it raised.

        calls: for each call (name of the method, number of the episode, further arguments).
        seconds: time after which no further call begins. If calls are left at that time, the returned list is
            shorter than `calls`.
        """
        until, results = time.monotonic() + seconds, []
        for method, episode, arguments in calls:
            try:
                results.append(getattr(self, method)(episode, *arguments))
            except UserError as error:
                results.append(error)
            if time.monotonic() > until:
                break
        return results

    def text(self, episode: int, ids: np.ndarray) -> str:
        return self._decode(ids)

    def reset(self, episode: int, prompt: Prompt, seed: int) -> str | list[dict[str, Any]]:
        where = f"environment {self._name}: reset() on record {prompt.uid}"

        async def make_and_reset():
            instance = self._make(prompt)
            self._alive[episode] = instance, prompt.uid  # from now on it has to be closed
            return await _awaited(instance.reset(seed))

        observation = self._limited(where, make_and_reset)
        if observation is not None and not _is_observation(observation):
            raise EnvironmentFailed(
                f"{where} returned {shown(observation)}; it must return text, chat messages with role and "
                "content, or None"
            )
        return observation or ""

    def step(self, episode: int, response_ids: np.ndarray, *parts: WrittenTurn) -> tuple[str, StepResult]:
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
        step = partial(instance.step, response, *parts)
        return response, _checked(self._limited(where, lambda: _awaited(step())), where)

    def close(self, episode: int) -> None:
        instance, uid = self._alive.pop(episode, (None, None))  # the instance may not even exist
        if hasattr(instance, "close"):
            where = f"environment {self._name}: close() on record {uid}"
            self._limited(where, lambda: _awaited(instance.close()))

    def _limited(self, where: str, call: Callable) -> Any:
        """Run a coroutine with the time limit reward.timeout, and return its result.

        where: environment, method and record, for the error message.
        call: function that returns the coroutine.

        Raises EnvironmentFailed if the coroutine raises an error or exceeds the time limit.
        """
        try:
            # This also interrupts Python code that does not await. It works because this is the process's
            # main thread.
            with time_limit(self._timeout):
                return self._loop.run_until_complete(call())
        except UserError as error:
            raise EnvironmentFailed(f"{where} failed: {error}") from error
        except (Exception, SystemExit) as error:
            raise EnvironmentFailed(f"{where} failed: {described(error)}") from error
        raise EnvironmentFailed(f"{where} took longer than reward.timeout={self._timeout} s")


async def _awaited(value):
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

"""Processes that run environments, and the handles by which a rollout worker plays episodes in them."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.cluster.pool_worker import Place
from grpo_megatron.cluster.worker_pool import WorkerDied, WorkerHangs, WorkerPool
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.logs import Rarely
from grpo_megatron.rewards.workers import bounds
from grpo_megatron.rollout.environment_host import Decode, EnvironmentHost
from grpo_megatron.rollout.environments import EnvironmentFailed, StepResult, asks, resolve_environment
from grpo_megatron.rollout.tool_servers.settings import server_variables

logger = logging.getLogger(__name__)

# Errors that cost only the episode, if reward.on_failure allows it. All other errors end the run.
FAILURES = (EnvironmentFailed, WorkerDied, WorkerHangs)


class Environments:
    """The worker processes that run environments. Each process runs many instances (episodes) at a time.

    asks_reward_function: True if reward.function scores the last turn of each episode
    reads_calls: True if the environment also gets the tool calls of each turn, in the model's own format
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        reward: RewardConfig,
        decode: Decode,
        places: Sequence[Place],
        tools: Sequence[dict[str, Any]] | None = None,
    ):
        """Start the worker processes of the environment that rollout.environment names.

        decode: function from int32 token ids to text. A copy of the function runs in the worker processes.
        places: node, process name and log file of each worker process.
        tools: schemas of the tools that prompts show to the model. With rollout.environment=tools, a worker
            process whose tools differ raises UserError. None: they are not compared.

        Raises UserError if rollout.environment is unknown or cannot be used, and if an environment variable
        that a tool server needs is not set.
        """
        made = resolve_environment(rollout, reward)  # errors in the setup are raised before any work is done
        self.asks_reward_function, self.reads_calls = asks(made), bool(getattr(made, "reads_calls", False))
        what = f"environment {rollout.environment}"
        build = partial(EnvironmentHost, rollout, reward, decode, tools, server_variables(rollout, reward))
        # One pool per worker, because all calls of an episode must go to the process that holds its instance.
        # If that process dies, the episode is lost.
        self._pools = [WorkerPool(what, build, bounds(reward), [place], again=False) for place in places]
        self._timeout, self._episodes, self._warn = (
            reward.timeout,
            itertools.count(),
            Rarely(logger, once=True),
        )

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

"""Agents: a user's function or program plays the episodes by requests to the gateway (rollout.agent)."""

import asyncio
import logging
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import ray

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.agent import NODE
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError, described, printable, shortened
from grpo_megatron.logs import Rarely
from grpo_megatron.rewards import RewardWorkers
from grpo_megatron.rewards.values import NoReward, read_reward
from grpo_megatron.rollout.agent_function import AgentFunction, FunctionExited
from grpo_megatron.rollout.agent_program import AgentProgram, ProgramFailed, bypass_proxies
from grpo_megatron.rollout.agent_task import AgentResult, AgentTask, AgentUnusable
from grpo_megatron.rollout.episode_time import EpisodeTooLong, in_time
from grpo_megatron.rollout.gateway.server import Gateway, Ticket
from grpo_megatron.rollout.gateway.session import AgentSession
from grpo_megatron.rollout.trajectory import Episode, Respond
from grpo_megatron.sglang.request import Completion

logger = logging.getLogger(__name__)

# Maximum number of agents that are programs or normal functions and run at the same time in a process.
_MOST_THREADS = 1024
# An agent without a time limit that makes no request for so long may hang. The run would wait for it forever.
_QUIET_SECONDS = 600.0


class AgentFailed(UserError):
    """An agent raised an error, took too long, made no request, or returned no valid reward."""


class _LeaveOut(Exception):
    """An agent has asked for its episode to be left out."""


class _Requests:
    """Passes the requests of an agent on to the engine.

    made: number of requests so far
    waiting: number of requests that wait for the engine's answer
    """

    def __init__(self, respond: Respond):
        self._respond, self.made, self.waiting = respond, 0, 0

    async def __call__(self, ids: list[int], limit: int, **options: Any) -> Completion:
        self.made, self.waiting = self.made + 1, self.waiting + 1
        try:
            return await self._respond(ids, limit, **options)
        finally:
            self.waiting -= 1


class AgentEpisodes:
    """Plays episodes in which a user's agent asks the model by OpenAI's API, as often as it likes.

    The result of the agent, a function or a program, is the reward. If it is None, the body of the agent's
    request to end its session has the reward; without such a request, reward.function scores the last turn.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        reward: RewardConfig,
        tokenizer: PromptTokenizer,
        rewards: RewardWorkers | None,
    ):
        """Look up the agent that rollout.agent names. Raises UserError if it cannot be used.

        rewards: scores the last turn of an episode with reward.function; None if the agent always gives the
            reward.
        """
        chosen = rollout.agent
        named = chosen.function or chosen.command
        name = f"rollout.agent={named}" if named else f"rollout.environment={rollout.environment}"
        self._name = shortened(" ".join(name.split()), 80)
        self._agent: AgentFunction | AgentProgram | None = None
        if chosen.function is not None:
            self._agent = AgentFunction(chosen.function)
        elif chosen.command is not None:
            self._agent = AgentProgram(chosen)
        address = ray.util.get_node_ip_address() if chosen.address == NODE else chosen.address
        bypass_proxies(os.environ, address)  # for functions, which run in this process
        # Each program takes up to five descriptors: three of its helper, and connections to the gateway.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        self._tokenizer, self._rewards = tokenizer, rewards
        self._max_turns, self._timeout = rollout.max_turns, rollout.episode_timeout
        self._stops = list(rollout.stop)
        self._on_failure, self._failure_value = reward.on_failure, reward.failure_value
        self._warn, self._warn_of_quiet, self._starting = Rarely(logger), Rarely(logger), asyncio.Lock()
        self._gateway = Gateway(address=address)
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "agent")

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Play an episode until the agent has returned, and return its paths as samples with rewards.

        Raises the engine's errors. If the agent or the reward fails, reward.on_failure decides: the error is
        raised (error), the result is () (leave_out), or the samples get reward.failure_value (value). An
        agent that made no request has no samples. AgentUnusable is always raised.

        respond: asks the engine for a turn. Its argument `part` is the number of the request in the episode.
        """
        gateway = await self._served()
        requests = _Requests(respond)
        session = AgentSession(episode, self._tokenizer, requests, self._max_turns, self._stops)
        ticket, who = gateway.open(session), f"{self._name}, record {episode.prompt.uid}"
        try:
            async with self._watched(requests, who):
                found, failed = await self._played(who, episode.prompt, gateway, ticket), False
        except _LeaveOut:
            return ()
        except AgentFailed as error:
            if self._on_failure == OnFailure.error:
                raise
            left_out = self._on_failure == OnFailure.leave_out or not session.trajectory.turns
            self._warn(f"{error}; " + ("it is left out" if left_out else "it gets reward.failure_value"))
            if left_out:
                return ()
            found, failed = {"reward": self._failure_value}, True
        finally:
            await gateway.close(ticket)
            if session.error:
                raise session.error
        decode = self._tokenizer.decoder
        samples = tuple(
            replace(sample, reward_failed=failed).with_texts(decode(sample.arrays.response_ids))
            for sample in session.trajectory.samples(session.finish_reason)
        )
        if found is None:
            scored = await self._rewards.score(episode.prompt, session.trajectory.last_turn())
            if scored.is_left_out:
                return ()
            samples = tuple(replace(sample, reward_failed=scored.reward_failed) for sample in samples)
            found = {"reward": scored.reward} | scored.reward_components
        components = {name: value for name, value in found.items() if name != "reward"}
        return tuple(sample.scored(found["reward"], components) for sample in samples)

    async def complete(self, prompt: Prompt, samples: Sequence[Sample]) -> tuple[Sample, ...]:
        """Return the samples unchanged, because `play` has already set all rewards."""
        return tuple(samples)

    async def _served(self) -> Gateway:
        """Return the gateway of this process. The first call starts it."""
        async with self._starting:
            if not self._gateway.port:
                await self._gateway.start()
        return self._gateway

    @asynccontextmanager
    async def _watched(self, requests: _Requests, who: str):
        """Warn, while the context is open, if an agent without a time limit makes no request for long.

        who: names the agent and the record, for the warning.
        """

        async def watch() -> None:
            while True:
                made = requests.made
                await asyncio.sleep(_QUIET_SECONDS)
                if requests.made == made and not requests.waiting:
                    self._warn_of_quiet(
                        f"{who}: no request for {_QUIET_SECONDS:g} s, and the run waits for this agent; set "
                        "rollout.episode_timeout, so that an episode that takes too long fails"
                    )

        watching = asyncio.create_task(watch()) if self._timeout is None else None
        try:
            yield
        finally:
            if watching:
                watching.cancel()

    async def _played(
        self, who: str, prompt: Prompt, gateway: Gateway, ticket: Ticket
    ) -> dict[str, float] | None:
        """Call the agent. Return {"reward": number, name: further number, ..}, or None if it gave no reward.

        who: names the agent and the record, for messages.

        Raises AgentFailed if the agent fails, and _LeaveOut if it wants the episode to be left out.
        """
        asked, url = prompt.messages or [], gateway.url(ticket)
        task = AgentTask(url, ticket.key, gateway.model, asked, prompt.answer, prompt.fields)
        try:
            played = await in_time(self._call(task), self._timeout, prompt.uid)
        except AgentUnusable:
            raise
        except (EpisodeTooLong, ProgramFailed, FunctionExited) as error:
            raise AgentFailed(f"{who}: {printable(str(error))}") from error
        except Exception as error:
            raise AgentFailed(f"{who}: {described(error)}") from error
        ended = ticket.ended.result() if played.value is None and ticket.ended.done() else {}
        if ended.get("leave_out"):
            raise _LeaveOut
        if "failed" in ended:
            raise AgentFailed(
                f"{who}: says that it failed: {printable(shortened(str(ended['failed']), 2000))}"
            )
        if not ticket.session.trajectory.turns:
            said = f"; its output ends with: {played.output}" if played.output else ""
            raise AgentFailed(f"{who}: returned without a request to {task.base_url}{said}")
        result = ended if "reward" in ended else played.value
        if result is None:
            return None
        try:
            return read_reward(result)
        except NoReward as error:
            raise AgentFailed(f"{who}: {error}") from error

    async def _call(self, task: AgentTask) -> AgentResult:
        """Call the agent, and return its result."""
        return await self._agent.run(task, self._threads)

    def close(self) -> None:
        if self._agent:
            self._agent.close()
        if self._rewards:
            self._rewards.close()

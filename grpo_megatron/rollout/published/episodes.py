"""Episodes that verifiers' environment server plays. It asks the model at the gateway."""

from contextlib import suppress
from itertools import count
from typing import Any

from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import ProcessLost
from grpo_megatron.rollout.agent_task import AgentResult, AgentTask, AgentUnusable
from grpo_megatron.rollout.agents import AgentEpisodes
from grpo_megatron.rollout.published.server import ServerLost, VerifiersServer
from grpo_megatron.rollout.published.tasks import TASK_FIELD
from grpo_megatron.rollout.published.wire import AgentTrace, EpisodeFailed
from grpo_megatron.rollout.trajectory import Episode, Respond
from grpo_megatron.sglang.request import Completion


class PublishedEpisodes(AgentEpisodes):
    """Plays episodes in which verifiers' environment server is the agent.

    Rewards and metrics come from the server, and tokens from the gateway's session. An episode whose server
    dies is played once more, from its beginning, because all episodes of a node share the server.
    """

    def __init__(self, rollout: RolloutConfig, reward: RewardConfig, tokenizer: PromptTokenizer, log: str):
        """Start the environment server. Raises UserError if it does not start.

        log: path of its log file.
        """
        super().__init__(rollout, reward, tokenizer, None)
        self.server = VerifiersServer(rollout, self._gateway.shared.key, log)

    async def play(self, episode: Episode, respond: Respond) -> tuple[Sample, ...]:
        """Play an episode as AgentEpisodes does.

        If the server dies in it twice, reward.on_failure decides: ProcessLost is raised (error), or the
        result is () (otherwise).
        """
        numbers = count()

        async def numbered(ids: list[int], limit: int, **options: Any) -> Completion:
            # The engine may not know yet that the requests of the first attempt have ended.
            return await respond(ids, limit, **options | {"part": next(numbers)})

        with suppress(ServerLost):
            return await super().play(episode, numbered)
        try:
            return await super().play(episode, numbered)
        except ServerLost as error:
            if self._on_failure == OnFailure.error:
                raise ProcessLost(str(error)) from error
            self._warn(
                f"{error}\n  | record {episode.prompt.uid}: this was its second attempt; it is left out"
            )
            return ()

    async def _call(self, task: AgentTask) -> AgentResult:
        """Play an episode, and return its reward, with the single rewards and metrics as further numbers."""
        gateway, policy = self._gateway, []

        def opened(trace: AgentTrace) -> None:
            if _client(trace).get("base_url") != gateway.shared_url:
                return  # the configuration gives this agent another model
            if policy:
                raise AgentUnusable(
                    f"two agents of an episode, {policy[0]} and {_name(trace)}, ask the model that is "
                    "trained, which only one can do; give the other a client in rollout.verifiers.env"
                )
            policy.append(_name(trace))
            gateway.shared.name(trace.id, task.api_key)

        try:
            traces = await self.server.play(task.record[TASK_FIELD], gateway.shared_url, task.model, opened)
        finally:
            gateway.shared.forget(task.api_key)
        trained = [trace for trace in traces if _client(trace).get("base_url") == gateway.shared_url]
        if not trained:
            raise EpisodeFailed("no agent has asked the model that is trained")
        return AgentResult(_numbers(trained[0]))

    def close(self) -> None:
        self.server.close()


def _client(trace: AgentTrace) -> dict[str, Any]:
    return trace.values["agent"]["config"].get("client") or {}


def _name(trace: AgentTrace) -> str:
    return trace.values["agent"]["name"]


def _numbers(trace: AgentTrace) -> dict[str, float]:
    """Return {"reward": weighted sum of a trace's rewards, name of a reward or metric: its value}.

    A reward named `reward`, or a metric with the name of a reward, gets a prefix.
    """
    rewards = {name: one for name, one in (trace.values.get("rewards") or {}).items() if one is not None}
    if not rewards:
        raise EpisodeFailed("the task has no reward")
    found = {"reward": sum(one["score"] * one["weight"] for one in rewards.values())}
    numbers = [(name, one["score"]) for name, one in rewards.items()]
    numbers += [(name, one) for name, one in (trace.values.get("metrics") or {}).items() if one is not None]
    for name, value in numbers:
        found[f"of_task_{name}" if name in found else name] = value
    return found

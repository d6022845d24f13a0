"""Task and result of an agent, and the lookup of agents (rollout.agent)."""

from dataclasses import dataclass
from typing import Any

from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry

agent = Registry("agent", "rollout.agent.function", (), Call(("task",), may_be_async=True))


class AgentUnusable(UserError):
    """The agent could play no other episode either, so that the run ends, whatever reward.on_failure is."""


@dataclass(frozen=True)
class AgentTask:
    """The task of one episode and the endpoint of the model, as an agent gets them."""

    base_url: str
    """Base URL for OpenAI's client."""
    api_key: str
    """Key for this client. It is valid for this episode only."""
    model: str
    """Name of the model in requests."""
    messages: list[dict[str, Any]]
    """The prompt as chat messages."""
    answer: str | list[str]
    """The record's reference answer, or a list of accepted answers."""
    record: dict[str, Any]
    """The record's other fields."""


@dataclass(frozen=True)
class AgentResult:
    """The end of an agent's episode.

    value: the reward, a dict with the key "reward", or None; not checked yet
    output: the end of what a program has written, for messages
    """

    value: Any
    output: str = ""

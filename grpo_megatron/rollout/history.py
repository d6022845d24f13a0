"""Histories: what the model reads before each of its turns (rollout.history).

A history object belongs to one episode. An observation is a text, or a list of chat messages (dicts with role
and content).
"""

from collections.abc import Sequence
from typing import Any, Protocol

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.rollout import HistoryKind
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError

Observation = str | list[dict[str, Any]]


class History(Protocol):
    """Interface of an object that decides what the model reads before each turn of one episode."""

    def begin(self, observation: Observation) -> list[int]:
        """Return the token ids that the model reads before its first turn: prompt and first observation.

        observation: the environment's first observation, possibly empty.
        """

    def go_on(
        self,
        ids: list[int],
        turn: str,
        observation: Observation,
        begun: int | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return all token ids that the model reads before its next turn, from the start of the episode.

        ids: token ids that the model read before its last turn, followed by the token ids of that turn.
        turn: text of the model's last turn.
        observation: the environment's answer to that turn.
        begun: number of token ids before that turn; None if it is unknown.
        calls: tool calls of that turn, in the form that chat templates expect.
        """


class AppendedHistory:
    """A history that keeps all earlier tokens and appends each observation (rollout.history=append).

    An observation that is a text is appended verbatim. Chat messages are appended as the chat template
    renders them. If the prompt is not a chat, only the contents of the messages are appended, verbatim.
    """

    def __init__(self, prompt: Prompt, tokenizer: PromptTokenizer):
        self._prompt, self._tokenizer = prompt, tokenizer

    def begin(self, observation: Observation) -> list[int]:
        messages, tools = self._prompt.messages, self._prompt.tools
        if observation and messages and not isinstance(observation, str):
            return self._tokenizer.encode(
                self._tokenizer.chat(_joined(self._prompt, observation), tools=tools)
            ).tolist()
        return [*self._prompt.ids.tolist(), *self._encode(observation)]

    def go_on(
        self,
        ids: list[int],
        turn: str,
        observation: Observation,
        begun: int | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        if isinstance(observation, str) or self._prompt.messages is None:
            return [*ids, *self._encode(observation)]
        return self._tokenizer.turn_format.continued(ids, observation, self._prompt.tools, begun, calls)

    def _encode(self, observation: Observation) -> list[int]:
        text = (
            observation
            if isinstance(observation, str)
            else "".join(message["content"] for message in observation)
        )
        return self._tokenizer.encode(text).tolist()


class TemplateHistory:
    """A history that renders all messages with the chat template before each turn (rollout.history=template).

    The chat template may drop parts of earlier turns, such as the reasoning. The model then does not read
    these parts again. The constructor raises UserError if the prompt has no chat messages.
    """

    def __init__(self, prompt: Prompt, tokenizer: PromptTokenizer):
        if prompt.messages is None:
            raise UserError(
                f"record {prompt.uid}: rollout.history=template needs a chat template, so the prompt must "
                "not be token ids, and data.chat_template must not be none"
            )
        self._prompt, self._messages, self._tokenizer = prompt, prompt.messages, tokenizer
        # True if the model's next turn continues the last message.
        self._is_begun = prompt.messages[-1]["role"] == "assistant"

    def begin(self, observation: Observation) -> list[int]:
        self._messages = _joined(self._prompt, _as_messages(observation))
        return self._ids() if observation else self._prompt.ids.tolist()

    def go_on(
        self,
        ids: list[int],
        turn: str,
        observation: Observation,
        begun: int | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        earlier = self._messages
        if self._is_begun:
            turn, earlier = earlier[-1]["content"] + turn, earlier[:-1]
            self._is_begun = False
        self._messages = [*earlier, {"role": "assistant", "content": turn}, *_as_messages(observation)]
        return self._ids()

    def _ids(self) -> list[int]:
        return self._tokenizer.encode(
            self._tokenizer.chat(self._messages, "an episode", self._prompt.tools)
        ).tolist()


HISTORIES = {HistoryKind.append: AppendedHistory, HistoryKind.template: TemplateHistory}


def _as_messages(observation: Observation) -> list[dict[str, Any]]:
    """Return an observation as a list of chat messages.

    A text becomes one message with the role `user`. An empty text becomes an empty list.
    """
    if not isinstance(observation, str):
        return observation
    return [{"role": "user", "content": observation}] if observation else []


def _joined(prompt: Prompt, observation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the prompt's chat messages, followed by those of an environment's first observation.

    If the observation's first message has the same role as the prompt's last message, the two are merged,
    because many templates require alternating roles.

    Raises UserError if the prompt ends with an assistant message and the observation is not empty: the model
    should continue the assistant message, so no observation can follow it.
    """
    messages = prompt.messages
    if observation and messages[-1]["role"] == "assistant":
        raise UserError(
            f"record {prompt.uid}: the prompt ends with the beginning of an assistant message, so the "
            "environment's first observation cannot follow; end the prompt with a user message"
        )
    if not observation or observation[0]["role"] != messages[-1]["role"]:
        return [*messages, *observation]
    one = {**messages[-1], "content": f"{messages[-1]['content']}\n{observation[0]['content']}"}
    return [*messages[:-1], one, *observation[1:]]

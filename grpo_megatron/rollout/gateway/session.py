"""AgentSession: one trajectory, which an agent makes by requests with chat messages or token ids."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grpo_megatron.data import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.logs import Rarely
from grpo_megatron.rollout.gateway.messages import (
    ConversationTree,
    request_messages,
    said_by,
    said_in,
    written_message,
)
from grpo_megatron.rollout.trajectory import Episode, Node, Respond, Trajectory
from grpo_megatron.sglang.request import Completion

_warn = Rarely(logging.getLogger(__name__))

Tools = list[dict[str, Any]] | None


class RequestRefused(UserError):
    """Error of a request to a session that answers no further requests.

    status, code: status of the HTTP response and machine-readable name of the error
    """

    def __init__(self, message: str, code: str, status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class TokenAnswer:
    """The answer to a request: a turn of the model.

    node: the turn's node in the trajectory
    """

    node: Node

    @property
    def turn(self) -> Completion:
        """Token ids and log-probs of the turn."""
        return self.node.turn

    @property
    def num_read(self) -> int:
        """Number of tokens that the model read before the turn."""
        return self.node.parent.length

    @property
    def read(self) -> list[int]:
        """Token ids that the model read before the turn."""
        return self.node.parent.path_ids()


@dataclass(frozen=True)
class ChatAnswer(TokenAnswer):
    """The answer to a request with chat messages.

    message: the turn as an assistant message in the format of OpenAI's API
    stop: the stop string of the request before which the message ends; None if it ends with the turn
    decode: returns the text of token ids
    """

    message: dict[str, Any]
    stop: str | None
    decode: Callable[[np.ndarray], str]


@dataclass
class _Running:
    """An answer that is being made or has been made.

    task: makes the answer
    waiting: number of requests that wait for it
    """

    task: asyncio.Task[TokenAnswer]
    waiting: int = field(default=0)


class AgentSession:
    """One trajectory of an agent. Each answer to one of its requests is a turn of the model.

    A request has chat messages or token ids. The messages of a request that follow a known turn are appended
    to the tokens that the model has read and written, so nothing is tokenized again. A conversation that
    continues no known turn is rendered as a whole, and becomes a branch of the trajectory where its tokens
    differ.

    trajectory: the turns that are complete
    stops: stop strings of the run (rollout.stop)
    finish_reason: why the trajectory ends if no more requests are made: "stop", "length" (the last request
        exceeded the episode's token limit) or "max_turns" (it came after the last turn)
    error: the first error of the engine; None if there was none. An agent may survive it, but the run must
        not, because the engine's errors are the run's
    """

    def __init__(
        self,
        episode: Episode,
        tokenizer: PromptTokenizer,
        respond: Respond,
        max_turns: int,
        stops: Sequence[str] = (),
    ):
        """Begin a session without turns.

        respond: asks the engine for a turn.
        max_turns: maximum number of turns.
        stops: stop strings of the run.
        """
        self.trajectory, self.stops, self._max_turns = Trajectory(episode), stops, max_turns
        self._tokenizer, self._respond = tokenizer, respond
        self._conversations = ConversationTree()
        self._answers: dict[str, _Running] = {}
        self._asked = self._writing = 0
        self._is_closed = False
        self.finish_reason = "stop"
        self.error: Exception | None = None

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Arguments with which the run renders chats (data.chat_template_args)."""
        return self._tokenizer.template.arguments

    async def chat(
        self,
        key: str,
        messages: list[dict[str, Any]],
        tools: Tools = None,
        max_tokens: int | None = None,
        stops: Sequence[str] = (),
    ) -> ChatAnswer:
        """Answer a request. A request with the same key gets the same answer, without a second turn.

        If this call is cancelled, and no other request waits for the same answer, nothing is generated any
        more, and the trajectory stays as it was. The same holds if the answer fails.

        key: identifies the request. A client that retries a request sends the same key.
        messages: the conversation so far, in the format of OpenAI's API.
        tools: JSON schemas of the tools that the model may call.
        max_tokens: maximum number of tokens of the turn; None: as many as the episode's limit leaves.
        stops: those of the run's stop strings that the message must not contain.

        Raises UserError for invalid messages, RequestRefused if there is no room for the turn or the session
        has ended, and the engine's errors.
        """
        return await self._once(key, lambda: self._answer(messages, tools, max_tokens, stops))

    async def generate(self, key: str, ids: list[int], max_tokens: int | None = None) -> TokenAnswer:
        """Answer a request with token ids. In everything else, the request is like one of `chat`.

        ids: all token ids that the model reads. If they begin with an earlier turn and all that was read
            before it, the new turn continues its path.

        Raises UserError for ids that the model does not have, RequestRefused, and the engine's errors.
        """
        least, most, size = min(ids), max(ids), self._tokenizer.vocab_size
        if least < 0 or most >= size:
            raise UserError(f"token ids {least} to {most} leave the model's vocabulary (0 to {size - 1})")

        async def answer() -> TokenAnswer:
            turn, known = await self._turn(ids, max_tokens)
            return TokenAnswer(self.trajectory.add(ids, turn, known))

        return await self._once(key, answer)

    def count(self, messages: list[dict[str, Any]], tools: Tools = None) -> int:
        """Return the number of tokens that the model would read for a request. Raises UserError."""
        return len(self._read(messages, tools)[0])

    async def _once(self, key: str, answer: Callable[[], Coroutine[Any, Any, TokenAnswer]]) -> Any:
        """Return the answer to the request with this key. The first request makes it by calling `answer`."""
        running = self._answers.get(key)
        if running is None:
            if self._is_closed:
                raise RequestRefused("the session has ended", "session_ended", 410)
            running = self._answers[key] = _Running(asyncio.create_task(answer()))
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        except BaseException:
            # An answer that is complete stays, even if its client is gone by now: its turn is trained.
            if not _has_result(running.task) and (running.task.done() or running.waiting == 1):
                running.task.cancel()
                if self._answers.get(key) is running:
                    del self._answers[key]  # a retry makes another answer
            raise
        finally:
            running.waiting -= 1

    async def _answer(
        self, messages: list[dict[str, Any]], tools: Tools, max_tokens: int | None, stops: Sequence[str]
    ) -> ChatAnswer:
        read, said = self._read(messages, tools)
        turn, known = await self._turn(read, max_tokens)
        written = self._tokenizer.turn_format.written_turn(turn.response_ids, read, tools)
        message, stop = written_message(written, stops)
        said = [*said, said_by(message)]
        # Nothing may fail from here on, because a request that fails must leave no turn.
        node = self.trajectory.add(read, turn, known)
        answer = ChatAnswer(node, message, stop, self._tokenizer.decode_all)
        # A turn without the end of its thinking cannot go on in any template, so it is the last of its path.
        if not written.is_cut:
            self._conversations.add(said, answer)
        return answer

    async def _turn(self, read: list[int], max_tokens: int | None) -> tuple[Completion, Node]:
        """Ask the engine for a turn after these token ids. Return the turn, and `known` for adding it."""
        room = self.trajectory.room_after(len(read))
        if room <= 0:
            self.finish_reason = "length"
            raise RequestRefused(
                f"the conversation has {len(read)} tokens, which leaves none of the episode's limit for an "
                "answer (rollout.max_response_length)",
                "context_length_exceeded",
            )
        # Turns that are being written count, or requests at the same time would exceed the limit.
        if self.trajectory.turns + self._writing >= self._max_turns:
            self.finish_reason = "max_turns"
            raise RequestRefused(
                f"the session has had rollout.max_turns={self._max_turns} turns", "max_turns_exceeded"
            )
        limit, known = min(room, max_tokens or room), self.trajectory.known(read)
        number, self._asked = self._asked, self._asked + 1
        self._writing += 1
        try:
            turn = await self._respond(read, limit, routed=known.routed, part=number)
        except Exception as error:
            self.error = self.error or error
            raise
        finally:
            self._writing -= 1
        self.finish_reason = "length" if turn.finish_reason == "length" and limit == room else "stop"
        return turn, known

    def _read(self, given: list[dict[str, Any]], tools: Tools) -> tuple[list[int], list[Hashable]]:
        """Return (token ids that the model reads for a conversation, what is said in it)."""
        if tools and not self._tokenizer.template.shows_tools:
            raise UserError(
                "tools: the chat template does not show them to the model; set data.chat_template to one "
                "that reads `tools`"
            )
        messages = request_messages(given, self._tokenizer)
        said = said_in(messages, tools)
        known, length = self._conversations.longest(said)
        if known:
            rest = messages[length - 1 :]  # the first item of `said` is the tools
            ids, calls = known.node.path_ids(), known.message.get("tool_calls", ())
            try:
                return self._tokenizer.turn_format.continued(ids, rest, tools, known.num_read, calls), said
            except UserError as error:
                _warn(f"a turn of the model cannot be continued, so a branch begins: {error}")
        ids = self._tokenizer.encode(self._tokenizer.chat(messages, "the request", tools)).tolist()
        if not ids:
            raise UserError("the request: the chat template shows nothing of it to the model")
        return ids, said

    async def close(self) -> None:
        """Begin no more answers, and end those that are being made."""
        self._is_closed = True
        tasks = [running.task for running in self._answers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _has_result(task: asyncio.Task) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None

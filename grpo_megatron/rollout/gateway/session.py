"""AgentSession: one trajectory, which an agent makes by requests with chat messages or token ids."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.messages import chat_messages
from grpo_megatron.errors import UserError
from grpo_megatron.logs import Rarely
from grpo_megatron.rollout.gateway.messages import conversation_keys, key_after, written_message
from grpo_megatron.rollout.trajectory import Episode, Respond, Trajectory
from grpo_megatron.sglang.request import Completion

_warn = Rarely(logging.getLogger(__name__))


class NoRoom(UserError):
    """The error of a request that leaves no token for its answer, or that comes after the last turn."""


@dataclass(frozen=True)
class TokenAnswer:
    """The answer to a request: a turn of the model.

    read: token ids that the model read before the turn
    turn: token ids and log-probs of the turn
    """

    read: list[int]
    turn: Completion


@dataclass(frozen=True)
class ChatAnswer(TokenAnswer):
    """The answer to a request with chat messages.

    message: the turn as an assistant message in the format of OpenAI's API
    """

    message: dict[str, Any]


@dataclass(frozen=True)
class _KnownTurn:
    """A turn of the model that a conversation may continue.

    ids: all token ids that the model read before the turn, and those of the turn
    begun: number of ids before the turn
    calls: tool calls of the turn, in the form that chat templates expect
    """

    ids: list[int]
    begun: int
    calls: list[dict[str, Any]]


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
    error: the first error of the engine; None if there was none. An agent may survive it, but the run must
        not, because the engine's errors are the run's
    """

    def __init__(self, episode: Episode, tokenizer: PromptTokenizer, respond: Respond, max_turns: int):
        """Begin a session without turns.

        respond: asks the engine for a turn.
        max_turns: maximum number of turns.
        """
        self.trajectory, self._max_turns = Trajectory(episode), max_turns
        self._tokenizer, self._respond = tokenizer, respond
        # {key of a conversation that ends with a turn: this turn}
        self._after: dict[bytes, _KnownTurn] = {}
        self._answers: dict[str, _Running] = {}
        self._asked = self._writing = 0
        self.error: Exception | None = None

    async def chat(
        self,
        key: str,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> ChatAnswer:
        """Answer a request. A request with the same key gets the same answer, without a second turn.

        If this call is cancelled, and no other request waits for the same answer, nothing is generated any
        more, and the trajectory stays as it was. The same holds if the answer fails.

        key: identifies the request. A client that retries a request sends the same key.
        messages: the conversation so far, in the format of OpenAI's API.
        tools: JSON schemas of the tools that the model may call.
        max_tokens: maximum number of tokens of the turn; None: as many as the episode's limit leaves.

        Raises UserError for invalid messages, NoRoom if no token is left for the turn, and the engine's
        errors.
        """
        return await self._once(key, lambda: self._answer(messages, tools or None, max_tokens))

    async def generate(self, key: str, ids: list[int], max_tokens: int | None = None) -> TokenAnswer:
        """Answer a request with token ids. In everything else, the request is like one of `chat`.

        ids: all token ids that the model reads. If they begin with an earlier turn and all that was read
            before it, the new turn continues its path.

        Raises UserError for ids that the model does not have, NoRoom, and the engine's errors.
        """
        wrong = [one for one in ids if not 0 <= one < self._tokenizer.vocab_size]
        if wrong:
            most = self._tokenizer.vocab_size - 1
            raise UserError(f"token id {wrong[0]} is outside the model's vocabulary (0 to {most})")

        async def answer() -> TokenAnswer:
            return TokenAnswer(ids, await self._turn(ids, max_tokens))

        return await self._once(key, answer)

    async def _once(self, key: str, answer: Callable[[], Coroutine[Any, Any, TokenAnswer]]) -> Any:
        """Return the answer to the request with this key. The first request makes it by calling `answer`."""
        running = self._answers.get(key)
        if running is None:
            running = self._answers[key] = _Running(asyncio.create_task(answer()))
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        except BaseException:
            # A retry makes another answer, unless this request was cancelled and another one still waits.
            is_last = running.waiting == 1
            if self._answers.get(key) is running and (is_last or running.task.done()):
                del self._answers[key]
            if is_last:
                running.task.cancel()
            raise
        finally:
            running.waiting -= 1

    async def _answer(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> ChatAnswer:
        messages = chat_messages(messages, "the request")
        keys = conversation_keys(messages, tools)
        read = self._read(messages, tools, keys)
        turn = await self._turn(read, max_tokens)
        written = self._tokenizer.turn_format.written_turn(turn.response_ids, read, tools)
        message = written_message(written)
        # A turn without the end of its thinking cannot go on in any template, so it is the last of its path.
        if not written.is_cut:
            [said] = chat_messages([message], "the answer")
            ids = [*read, *turn.response_ids.tolist()]
            known = _KnownTurn(ids, len(read), written.call_messages)
            self._after[key_after(keys[-1], said)] = known
        return ChatAnswer(read, turn, message)

    async def _turn(self, read: list[int], max_tokens: int | None) -> Completion:
        """Ask the engine for a turn after these token ids, and add it to the trajectory."""
        room = self.trajectory.room_after(len(read))
        if room <= 0:
            raise NoRoom(
                f"the conversation has {len(read)} tokens, which leaves none of the episode's limit for an "
                "answer (rollout.max_response_length)"
            )
        # Turns that are being written count, or requests at the same time would exceed the limit.
        if self.trajectory.turns + self._writing >= self._max_turns:
            raise NoRoom(f"the session has had rollout.max_turns={self._max_turns} turns")
        limit = min(room, max_tokens or room)
        number, self._asked = self._asked, self._asked + 1
        self._writing += 1
        try:
            turn = await self._respond(read, limit, routed=self.trajectory.routed_of(read), part=number)
        except Exception as error:
            self.error = self.error or error
            raise
        finally:
            self._writing -= 1
        self.trajectory.add(read, turn)
        return turn

    def _read(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, keys: list[bytes]
    ) -> list[int]:
        """Return the token ids that the model reads for a conversation. keys: its conversation_keys."""
        for end in range(len(messages) - 1, 0, -1):
            if messages[end - 1]["role"] != "assistant":
                continue
            known = self._after.get(keys[end])
            if known is None:
                continue
            try:
                return self._tokenizer.turn_format.continued(
                    known.ids, messages[end:], tools, known.begun, known.calls
                )
            except UserError as error:
                _warn(f"a turn of the model cannot be continued, so a branch begins: {error}")
                break
        return self._tokenizer.chat_prompt(messages, "the request", tools)[1].tolist()

    async def close(self) -> None:
        """End the requests that are still being answered."""
        tasks = [running.task for running in self._answers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Chat messages at the gateway: what the model wrote as a message, and conversations to compare."""

import json
from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any

from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.messages import called_function
from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

_ROLES = ("system", "developer", "user", "assistant", "tool")


def _number(text: str) -> float | int:
    """Return the number that a JSON text means. Clients in JavaScript send 1 for 1.0."""
    value = float(text)
    return int(value) if value.is_integer() else value


# One encoder and one decoder for all messages, because json.dumps and json.loads make one for each call.
_sorted_text = json.JSONEncoder(sort_keys=True).encode
_read_arguments = json.JSONDecoder(parse_float=_number).decode


def request_messages(given: list[dict[str, Any]], tokenizer: PromptTokenizer) -> list[dict[str, Any]]:
    """Return the messages of a request in the form that the chat template expects.

    The results of tool calls get the order of the calls, because many templates show no ids: only the order
    tells the model which result belongs to which call.

    Raises UserError if a message is invalid.
    """
    for index, message in enumerate(given):
        if (role := message.get("role", "user")) not in _ROLES:
            raise UserError(
                f"the request: message {index} has the role {shown(role)}; use {', '.join(_ROLES)}"
            )
    # An answer without a word has no content in the histories of some clients.
    whole = [
        one | {"content": ""} if one.get("role") == "assistant" and one.get("content") is None else one
        for one in given
    ]
    messages: list[dict[str, Any]] = []
    for role, group in groupby(tokenizer.chat_messages(whole, "the request"), lambda one: one["role"]):
        results = list(group)
        if role == "tool" and len(results) > 1 and messages:
            ids = [call.get("id") for call in messages[-1].get("tool_calls", ())]
            places = {id: place for place, id in enumerate(ids)}
            results.sort(key=lambda one: places.get(one.get("tool_call_id"), len(places)))
        messages += results
    return messages


def written_message(turn: WrittenTurn, stops: Sequence[str] = ()) -> tuple[dict[str, Any], str | None]:
    """Return (message, stop): a turn as an assistant message in the format of OpenAI's API.

    Reasoning becomes `reasoning_content`. The calls become `tool_calls` if all of them are valid; otherwise
    they stay in the content. Text around the calls stays in the content, too. The content ends before the
    first of the texts in `stops`, as clients that ask for stops expect it. `stop` is this text, or None.
    """
    calls = turn.call_messages
    text = turn.content if calls else turn.text
    place, stop = min(((text.find(one), one) for one in stops if one in text), default=(len(text), None))
    message = {"role": "assistant", "content": text[:place] or (None if calls else "")}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [_in_json(call) for call in calls]
    return message, stop


def _in_json(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text, as OpenAI's API has them."""
    function = call["function"]
    arguments = json_text(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


class ConversationTree:
    """Conversations as a tree, by what was said in them: two of them share what they begin with.

    A conversation may have an answer, which is the turn of the model with which it ends.
    """

    def __init__(self):
        # {(number of a conversation, what is said next): number of the conversation that goes on with it}
        self._next: dict[tuple[int, Hashable], int] = {}
        self._answers: dict[int, Any] = {}

    def add(self, said: Iterable[Hashable], answer: Any) -> None:
        """Keep a conversation and its answer. said: what `said_in` returns."""
        number = 0
        for one in said:
            number = self._next.setdefault((number, one), len(self._next) + 1)
        self._answers[number] = answer

    def longest(self, said: Iterable[Hashable]) -> tuple[Any, int]:
        """Return (answer, length) of the longest known conversation with which this one begins.

        The answer is None if there is no such conversation. length: number of items of `said`.
        """
        number, found = 0, (None, 0)
        for length, one in enumerate(said, 1):
            number = self._next.get((number, one))
            if number is None:
                break
            if number in self._answers:
                found = self._answers[number], length
        return found


def said_in(messages: Iterable[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[Hashable]:
    """Return what is said in a conversation: an item for the tools, and one for each message.

    The items of two conversations are equal if they mean the same. Of the model's turns, clients send back
    what they like: the reasoning, the white space around the content and a name for the author are left out.
    An absent content equals an empty one, and the arguments of calls are compared as values.

    messages: messages as `request_messages` returns them.
    tools: JSON schemas of the tools.
    """
    return [_sorted_text(tools or []), *map(said_by, messages)]


def said_by(message: dict[str, Any]) -> tuple[Hashable, ...]:
    """Return the item of `said_in` for one message."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        return "assistant", content.strip(), *map(_called, message.get("tool_calls", ()))
    # Clients may send any value as an id or a name. A list could not be a key of a dict, but its text can.
    return message["role"], content, repr(message.get("tool_call_id")), repr(message.get("name"))


def _called(call: dict[str, Any]) -> tuple[str, str, str]:
    function = called_function(call)
    arguments = function.get("arguments", {})
    try:
        text = _sorted_text(_read_arguments(arguments) if isinstance(arguments, str) else arguments)
    except (ValueError, RecursionError):
        text = repr(arguments)
    return repr(call.get("id")), function["name"], text

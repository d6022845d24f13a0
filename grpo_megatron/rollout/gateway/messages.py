"""Chat messages at the gateway: what the model wrote as a message, and conversations to compare."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.data.messages import called_function
from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

_ROLES = ("system", "developer", "user", "assistant", "tool")
# One encoder for all messages of all requests, because json.dumps makes one for each call.
_sorted_text = json.JSONEncoder(sort_keys=True).encode


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


def conversation_keys(messages: Iterable[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[bytes]:
    """Return keys of a conversation's beginnings: the key at index n is that of the first n messages.

    Two beginnings have the same key if they mean the same. Of the model's turns, clients send back what they
    like: the reasoning, the white space around the content and a name for the author are left out. An absent
    content equals an empty one, and the arguments of calls are compared as values.

    messages: messages as `request_messages` returns them.
    tools: JSON schemas of the tools.
    """
    keys = [hashlib.sha256(_sorted_text(tools or []).encode()).digest()]
    for message in messages:
        keys.append(key_after(keys[-1], message))
    return keys


def key_after(key: bytes, message: dict[str, Any]) -> bytes:
    """Return the key of a conversation that goes on with a message. key: that of the conversation so far."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        said = "assistant", content.strip(), [_call(one) for one in message.get("tool_calls", ())]
    else:
        said = message["role"], content, message.get("tool_call_id"), message.get("name")
    return hashlib.sha256(key + repr(said).encode()).digest()


def _call(call: dict[str, Any]) -> tuple[Any, str, str]:
    function = called_function(call)
    arguments = function.get("arguments", {})
    try:
        given = json.loads(arguments, parse_float=_number) if isinstance(arguments, str) else arguments
        return call.get("id"), function["name"], _sorted_text(given)
    except (ValueError, RecursionError):
        return call.get("id"), function["name"], repr(arguments)


def _number(text: str) -> float | int:
    """Return the number that a JSON text means. Clients in JavaScript send 1 for 1.0."""
    value = float(text)
    return int(value) if value.is_integer() else value

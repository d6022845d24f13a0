"""Chat messages at the gateway: what the model wrote as a message, and conversations to compare."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.data.messages import call_arguments, called_function
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

# One encoder for all messages of all requests, because json.dumps makes one for each call.
_text = json.JSONEncoder(sort_keys=True).encode


def written_message(turn: WrittenTurn) -> dict[str, Any]:
    """Return a turn as an assistant message in the format of OpenAI's API.

    Reasoning becomes `reasoning_content`. The calls become `tool_calls` if all of them are valid; otherwise
    they stay in the content. Text around the calls stays in the content, too.
    """
    calls = turn.call_messages
    message = {"role": "assistant", "content": (turn.content or None) if calls else turn.text}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if calls:
        message["tool_calls"] = [_in_json(call) for call in calls]
    return message


def _in_json(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as JSON text, as OpenAI's API has them."""
    function = call["function"]
    arguments = json_text(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def conversation_keys(messages: Iterable[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[bytes]:
    """Return keys of a conversation's beginnings: the key at index n is that of the first n messages.

    Two beginnings have the same key if they mean the same. Reasoning is left out, because many clients do not
    send it back. An absent content equals an empty one, and the arguments of calls are compared as values.

    messages: messages as data.messages.chat_messages returns them.
    tools: JSON schemas of the tools.
    """
    keys = [hashlib.sha256(_text(tools or []).encode()).digest()]
    for message in messages:
        keys.append(key_after(keys[-1], message))
    return keys


def key_after(key: bytes, message: dict[str, Any]) -> bytes:
    """Return the key of a conversation that goes on with a message. key: that of the conversation so far."""
    return hashlib.sha256(key + _text(_comparable(message)).encode()).digest()


def _comparable(message: dict[str, Any]) -> list[Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        function = called_function(call)
        try:
            arguments = call_arguments(function.get("arguments", {}), dict)
        except UserError:
            arguments = function.get("arguments")
        calls.append([call.get("id"), function["name"], arguments])
    others = [message.get("tool_call_id"), message.get("name")]
    return [message["role"], message.get("content") or "", calls, *others]

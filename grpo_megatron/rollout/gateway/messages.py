"""Chat messages at the gateway: what the model wrote as a message, and conversations to compare."""

from collections.abc import Iterable
from typing import Any

from grpo_megatron.batch.written_turn import WrittenTurn
from grpo_megatron.data.messages import call_arguments, called_function
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text


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


def conversation_key(messages: Iterable[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Return a text that is equal for two conversations if they mean the same.

    Reasoning is left out, because many clients do not send it back. An absent content equals an empty one,
    and the arguments of calls are compared as values.

    messages: messages as data.messages.chat_messages returns them.
    tools: JSON schemas of the tools.
    """
    return json_text([tools or [], [_comparable(message) for message in messages]], sort_keys=True)


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

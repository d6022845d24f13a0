"""Chat messages at the gateway: what the model wrote as a message, and conversations to compare."""

import re
import uuid
from collections.abc import Iterable
from typing import Any

from grpo_megatron.data.messages import call_arguments, called_function
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.tool_environment import parsed_call

# The format that the templates of Hermes and Qwen ask for.
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_THINK, _END_THINK = "<think>", "</think>"


def written_message(text: str, is_cut: bool) -> dict[str, Any]:
    """Return the text of a turn as an assistant message in the format of OpenAI's API.

    What stands before `</think>` becomes `reasoning_content`. If the thinking has no end, the whole text
    does, and the content is empty. Calls `<tool_call>{"name": .., "arguments": ..}</tool_call>` become
    `tool_calls`, if all of them are valid; otherwise they stay in the content. Text around the calls stays in
    the content, too.

    is_cut: True if the thinking has no end, see `ends_in_thinking`.
    """
    if is_cut:
        thought = text.lstrip().removeprefix(_THINK).strip()
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    before, found, after = text.rpartition(_END_THINK)
    if found:
        message |= {"reasoning_content": before.removeprefix(_THINK).strip(), "content": after.lstrip("\n")}
    calls = [_call(match) for match in _CALL.findall(message["content"])]
    if calls and None not in calls:
        message["tool_calls"] = calls
        message["content"] = _CALL.sub("", message["content"]).strip() or None
    return message


def ends_in_thinking(text: str, read: str) -> bool:
    """Return True if a turn was cut off before it had ended its thinking.

    text: text of the turn.
    read: text that the model read before the turn, which may end with the beginning of the thinking.
    """
    begun = text.lstrip().startswith(_THINK) or read.rstrip().endswith(_THINK)
    return begun and _END_THINK not in text


def _call(text: str) -> dict[str, Any] | None:
    """Return a tool call in the format of OpenAI's API, or None if it is malformed."""
    try:
        name, arguments = parsed_call(text)
    except ValueError:
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    function = {"name": name, "arguments": json_text(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


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

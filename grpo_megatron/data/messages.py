"""Chat messages and tools: converts what records contain into the plain form that chat templates expect."""

import ast
import json
from typing import Any

from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text

# Keys of an assistant message, besides its content, that hold what the model wrote.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "function_call")


def chat_messages(prompt: Any, where: str, name: str = "prompt") -> list[dict[str, Any]]:
    """Check a record's chat messages, and return them in the form that chat templates expect.

    In this form, contents are plain text, and keys whose value is null are removed: many libraries write null
    for keys that a message lacks, but templates test whether a key is present. The content of an assistant
    message is None if the message consists only of tool calls or reasoning.

    prompt: value of the record's field, which must be a list of messages.
    where: place of the record, for error messages.
    name: what the messages are, for error messages, such as "prompt" or "response".

    Raises UserError if `prompt` is not a list of valid messages.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        raise UserError(
            f"{where}: the {name} must be a string, a list of messages with role and content, or a list of "
            f"token ids, but it is {shown(prompt)}"
        )
    if not prompt:
        raise UserError(f"{where}: the {name} is an empty list; it must contain at least one message")
    return [
        _message(message, f"{where}: message {index} of the {name}") for index, message in enumerate(prompt)
    ]


def _message(given: dict[str, Any], where: str) -> dict[str, Any]:
    """Check a chat message, and return it in the form that chat templates expect.

    where: place of the message, for error messages.

    Raises UserError if the message is invalid.
    """
    message = _without_nulls(given)
    role = message.get("role")
    if not isinstance(role, str) or not role.strip():
        raise UserError(f"{where} has no role (its keys are {shown(list(message))}); add one")
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # some templates take an empty list for calls
    else:
        message["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return {**message, "content": _content(message, where)}


def _without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _tool_calls(given: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message as a list of dicts, without keys whose value is null.

    given: the list of tool calls or its JSON text.
    where: place of the message, for error messages.

    Raises UserError if `given` is anything else, or if a call does not name its tool.
    """
    calls = _json_value(given) if isinstance(given, str) else given
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(
            f"{where} has the tool_calls {shown(given)}; they must be a list of objects with name and "
            "arguments"
        )
    calls = [_without_nulls(call) for call in calls]
    for call in calls:
        if isinstance(call.get("function"), dict):
            call["function"] = _without_nulls(call["function"])
        if not isinstance(called_function(call).get("name"), str):
            raise UserError(f"{where} has a tool call without a name: {shown(call)}; add one")
    return calls


def called_function(call: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a tool call that has the keys `name` and `arguments`.

    This part is `call["function"]`. In some data sets, calls have no key `function`; then it is the whole
    call.
    """
    return call.get("function", call)


def call_arguments(given: Any, kind: type) -> Any:
    """Return the arguments of a tool call as a dict or as JSON text, as `kind` says.

    given: the arguments in the record: a dict or its JSON text. If they already have the type `kind`, they
        are returned unchanged.
    kind: dict, or str for JSON text.

    Raises UserError if `kind` is dict, and the arguments are neither a dict nor the JSON text of one.
    """
    if type(given) is kind:
        return given
    if kind is str:
        return json_text(given, ensure_ascii=False)
    try:
        value = json.loads(given)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UserError(
            f"the arguments of a tool call are {shown(given)}; they must be a JSON object or the text of one"
        )
    return value


def _content(message: dict[str, Any], where: str) -> str | None:
    """Return the content of a message as text. A list of parts `{"type": "text", "text": ...}` is joined.

    Returns None for an assistant message that has only tool calls or reasoning.

    where: place of the message, for error messages.

    Raises UserError if the content or a part of it is not text, or if the content is missing.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant" and written_beside_content(message):
        return None
    if not isinstance(content, list):
        raise UserError(
            f"{where} has no content; add it"
            if content is None
            else f"{where} has the content {shown(content)}, which is not text; give a string"
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where} has a part of type {shown(kind)}; only text can be used")
    return "".join(part["text"] for part in content)


def written_beside_content(message: dict[str, Any]) -> list[str]:
    """Return the keys, other than `content`, under which an assistant message has text that the model wrote.

    These are the keys for reasoning and tool calls (REASONING_KEYS and CALL_KEYS) whose value is not empty.
    """
    return [key for key in (*REASONING_KEYS, *CALL_KEYS) if message.get(key)]


def chat_in_text(text: str, where: str) -> list[dict[str, Any]] | None:
    """Return the messages of a chat that a record contains as JSON text, as records from CSV files do.

    text: text in the record, which may also be ordinary text.
    where: place of the record, for error messages.

    Returns None if the text is not a chat. Raises UserError if the text is a list of messages in Python
    syntax instead of JSON.
    """
    if not text.lstrip().startswith("[") or "role" not in text:
        return None
    if _is_chat(value := _json_value(text)):
        return value
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if _is_chat(value):
        raise UserError(
            f"{where}: the text is a list of messages in Python syntax, not JSON: {shown(text)}; write it "
            "with json.dumps, or store the list itself"
        )
    return None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and "role" in item for item in value)
    )


def _json_value(text: str) -> Any:
    """Return the value that a JSON text encodes, or None if the text is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def offered_tools(given: Any, where: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of the tools that a record offers to the model.

    given: value of the record's field: the list of schemas or its JSON text.
    where: place of the record and its field, for error messages.

    Raises UserError if `given` is anything else.
    """
    tools = _json_value(given) if isinstance(given, str) else given
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where} must be a list of JSON schemas, one for each tool, or the JSON text of such a list, "
            f"but is {shown(given)}; set data.tools_key=null if the field contains something else"
        )
    return tools

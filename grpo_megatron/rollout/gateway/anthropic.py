"""Anthropic's messages: requests, answers, events of a stream, and errors."""

import uuid
from collections.abc import Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from grpo_megatron.data.messages import call_arguments, called_function
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.session import AgentSession, ChatAnswer
from grpo_megatron.rollout.gateway.wire import WireRequest, check_stops, server_sent

# Anthropic signs its thinking. Ours has no signature, but clients refuse thinking without one.
_SIGNATURE = "unsigned"
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
}


class _Text(BaseModel):
    type: Literal["text"]
    text: str


class _Thinking(BaseModel):
    type: Literal["thinking"]
    thinking: str


class _ToolUse(BaseModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(BaseModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_Text] = ""


_Block = Annotated[_Text | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(BaseModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(BaseModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]


class _ToolChoice(BaseModel):
    type: str
    disable_parallel_tool_use: bool | None = None


class MessagesRequest(WireRequest):
    """Body of a request to `/v1/messages`. Marks of what to cache are left out, as they change nothing."""

    messages: list[_Message] = Field(min_length=1)
    max_tokens: int = Field(gt=0)
    system: str | list[_Text] = ""
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None

    def check(self, session: AgentSession) -> None:
        choice = self.tool_choice or _ToolChoice(type="auto")
        if choice.type not in ("auto", "none"):
            raise UserError("tool_choice: the model decides whether it calls a tool; use auto or none")
        if choice.disable_parallel_tool_use and self.offered_tools:
            raise UserError(
                "disable_parallel_tool_use: the model decides how many tools it calls; leave it out"
            )
        check_stops("stop_sequences", self.stop_sequences or (), session)
        if (self.output_config or {}).get("format"):
            raise UserError("output_config.format: only text can be generated; leave it out")
        if self.messages[-1].role == "assistant":
            raise UserError("messages: the last one must not be the assistant's; a turn cannot be prefilled")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, in the format of OpenAI's API."""
        if not self.tools or (self.tool_choice and self.tool_choice.type == "none"):
            return None
        functions = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in self.tools
        ]
        return [
            {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}
            for function in functions
        ]

    def chat(self) -> list[dict[str, Any]]:
        """Return the conversation in the format of OpenAI's API.

        Each result of a tool becomes a message of its own. Whether a result is an error is left out, as
        OpenAI's API cannot say it.
        """
        system = _joined(self.system)
        chat = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            blocks = message.content
            if isinstance(blocks, str):
                blocks = [_Text(type="text", text=blocks)]
            chat += [_written(blocks)] if message.role == "assistant" else _read(message.role, blocks)
        return chat

    async def answer(self, session: AgentSession, key: str) -> ChatAnswer:
        stops = self.stop_sequences or ()
        return await session.chat(key, self.chat(), self.offered_tools, self.max_tokens, stops)

    def body(self, answer: ChatAnswer, model: str) -> dict[str, Any]:
        reason = "stop_sequence" if answer.stop is not None else "end_turn"
        reason = "tool_use" if "tool_calls" in answer.message else reason
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self.model or model,
            "content": _content(answer.message),
            "stop_reason": "max_tokens" if answer.turn.finish_reason == "length" else reason,
            "stop_sequence": answer.stop,
            "usage": {"input_tokens": answer.num_read, "output_tokens": len(answer.turn.response_ids)},
        }

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        begun = {"content": [], "stop_reason": None, "usage": body["usage"] | {"output_tokens": 0}}
        yield _event("message_start", message=body | begun)
        for index, block in enumerate(body["content"]):
            start, deltas = _parts(block)
            yield _event("content_block_start", index=index, content_block=start)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {name: body[name] for name in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=end, usage=body["usage"])
        yield _event("message_stop")

    @staticmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}


class CountRequest(MessagesRequest):
    """Body of a request to `/v1/messages/count_tokens`, whose answer is a number of tokens and no turn."""

    max_tokens: Any = None
    stream: Literal[False] | None = None

    async def answer(self, session: AgentSession, key: str) -> int:
        return session.count(self.chat(), self.offered_tools)

    def body(self, answer: int, model: str) -> dict[str, Any]:
        return {"input_tokens": answer}


def _event(name: str, **data: Any) -> str:
    return server_sent(json_text({"type": name} | data), name)


def _joined(text: str | list[_Text]) -> str:
    return text if isinstance(text, str) else "".join(part.text for part in text)


def _read(role: str, blocks: list[_Block]) -> list[dict[str, Any]]:
    """Return what the model reads between two of its turns, as messages in the format of OpenAI's API.

    role: role of the text that is no result of a tool.
    """
    messages = []
    for kind, group in groupby(blocks, lambda block: block.type):
        if kind == "text":
            messages.append({"role": role, "content": _joined(list(group))})
        elif kind == "tool_result":
            messages += [
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _joined(block.content)}
                for block in group
            ]
        else:
            raise UserError(f"messages: a {role}'s message has a block {kind}; only the assistant's may")
    return messages or [{"role": role, "content": ""}]


def _written(blocks: list[_Block]) -> dict[str, Any]:
    """Return a turn of the model as an assistant message in the format of OpenAI's API."""
    message: dict[str, Any] = {"role": "assistant"}
    if any(block.type == "tool_result" for block in blocks):
        raise UserError("messages: an assistant's message has a block tool_result; only a user's may")
    if thought := "".join(block.thinking for block in blocks if block.type == "thinking"):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json_text(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    content = "".join(block.text for block in blocks if block.type == "text")
    return message | {"content": content or (None if calls else "")}


def _content(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an assistant message in the format of OpenAI's API as blocks."""
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = called_function(call)
        arguments = call_arguments(function["arguments"], dict)
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _parts(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (beginning, deltas) of a block, which a client adds up to the block."""
    match block["type"]:
        case "text":
            return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            thought = {"type": "thinking_delta", "thinking": block["thinking"]}
            signed = {"type": "signature_delta", "signature": block["signature"]}
            return block | {"thinking": "", "signature": ""}, [thought, signed]
        case _:
            given = {"type": "input_json_delta", "partial_json": json_text(block["input"])}
            return block | {"input": {}}, [given]

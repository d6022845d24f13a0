"""OpenAI's chat completions: requests, answers, events of a stream, and errors."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.session import AgentSession, ChatAnswer, TokenAnswer
from grpo_megatron.rollout.gateway.wire import WireRequest, server_sent


class ChatRequest(WireRequest):
    """Body of a request for a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    n: int | None = None
    stop: Any = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    form_fields: ClassVar[set[str]] = {"stream", "stream_options", "return_token_ids"}

    def check(self) -> None:
        if self.n not in (None, 1):
            raise UserError(f"n={self.n}: a request gets one answer; send several requests")
        if self.tool_choice not in (None, "auto", "none"):
            raise UserError("tool_choice: the model decides whether it calls a tool; use auto or none")
        if self.parallel_tool_calls is False and self.offered_tools:
            raise UserError("parallel_tool_calls: the model decides how many tools it calls; leave it out")
        if self.stop:
            raise UserError("stop: the run decides what ends a turn; set rollout.stop in its configuration")
        if self.response_format and self.response_format.get("type") != "text":
            raise UserError("response_format: only text can be generated; leave it out")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    async def answer(self, session: AgentSession, key: str) -> ChatAnswer:
        limit = self.max_completion_tokens or self.max_tokens
        return await session.chat(key, self.messages, self.offered_tools, limit)

    def body(self, answer: ChatAnswer, model: str) -> dict[str, Any]:
        """Return an answer as a chat completion. If token ids are asked for, they are where vLLM has them."""
        reason = answer.turn.finish_reason
        if "tool_calls" in answer.message and reason != "length":
            reason = "tool_calls"
        choice = {"index": 0, "message": answer.message, "logprobs": None, "finish_reason": reason}
        body = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model or model,
            "choices": [choice],
            "usage": usage(answer),
        }
        if self.return_token_ids:
            body["prompt_token_ids"] = answer.read
            choice["token_ids"] = answer.turn.response_ids.tolist()
        return body

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        (choice,) = body["choices"]
        head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        calls = [
            {"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))
        ]
        delta = choice["message"] | ({"tool_calls": calls} if calls else {})
        tokens = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
        for content, reason in ((delta, None), ({}, choice["finish_reason"])):
            part = {"index": 0, "delta": content, "logprobs": None, "finish_reason": reason}
            yield server_sent(json_text(head | {"choices": [part | (tokens if reason is None else {})]}))
        if (self.stream_options or {}).get("include_usage"):
            yield server_sent(json_text(head | {"choices": [], "usage": body["usage"]}))
        yield server_sent("[DONE]")

    @staticmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "api_error"
        if status == 401:
            kind = "authentication_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def usage(answer: TokenAnswer) -> dict[str, int]:
    """Return the number of tokens that an answer has read and written, as OpenAI's API tells it."""
    read, written = len(answer.read), len(answer.turn.response_ids)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

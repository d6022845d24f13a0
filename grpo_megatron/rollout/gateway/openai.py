"""OpenAI's chat completions: requests, answers, and events of a stream."""

import time
import uuid
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.session import ChatAnswer


class ChatRequest(BaseModel):
    """Body of a request for a chat completion. Unknown fields are kept, as part of what the request asks."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    n: int | None = None
    stop: Any = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    def check(self) -> None:
        """Raise UserError if the request asks for something that the gateway cannot do."""
        if self.n not in (None, 1):
            raise UserError(f"n={self.n}: a request gets one answer; send several requests")
        if self.tool_choice not in (None, "auto", "none"):
            raise UserError("tool_choice: the model decides whether it calls a tool; use auto or none")
        if self.stop:
            raise UserError("stop: the run decides what ends a turn; set rollout.stop in its configuration")
        if self.response_format and self.response_format.get("type") != "text":
            raise UserError("response_format: only text can be generated")

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens of the answer, or None."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def key(self) -> str:
        """Text that is equal for two requests that ask for the same, whatever the form of the answer."""
        form = {"stream", "stream_options", "return_token_ids"}
        return json_text(self.model_dump(exclude=form, exclude_none=True), sort_keys=True)


def completion(answer: ChatAnswer, model: str, token_ids: bool) -> dict[str, Any]:
    """Return an answer as the body of OpenAI's chat completion.

    model: name of the model in the answer.
    token_ids: True if the answer also has the token ids that the model read and wrote, as vLLM returns them.
    """
    written = answer.turn.response_ids.tolist()
    choice = {
        "index": 0,
        "message": answer.message,
        "logprobs": None,
        "finish_reason": "tool_calls"
        if "tool_calls" in answer.message and answer.turn.finish_reason != "length"
        else answer.turn.finish_reason,
    }
    body = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(answer.read),
            "completion_tokens": len(written),
            "total_tokens": len(answer.read) + len(written),
        },
    }
    if token_ids:
        body["prompt_token_ids"], choice["token_ids"] = answer.read, written
    return body


def events(body: dict[str, Any], with_usage: bool) -> Iterator[str]:
    """Yield a chat completion as server-sent events, as a client that asked for a stream expects it.

    body: the completion.
    with_usage: True if the last event must tell the number of tokens.
    """
    (choice,) = body["choices"]
    head = {name: body[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = choice["message"] | ({"tool_calls": calls} if calls else {})
    tokens = {"token_ids": choice["token_ids"]} if "token_ids" in choice else {}
    for content, reason in ((delta, None), ({}, choice["finish_reason"])):
        part = {"index": 0, "delta": content, "logprobs": None, "finish_reason": reason}
        yield f"data: {json_text(head | {'choices': [part | (tokens if reason is None else {})]})}\n\n"
    if with_usage:
        yield f"data: {json_text(head | {'choices': [], 'usage': body['usage']})}\n\n"
    yield "data: [DONE]\n\n"

"""OpenAI's chat completions: requests, answers, events of a stream, and errors."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from grpo_megatron.data.values import shown
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.session import AgentSession, ChatAnswer, TokenAnswer
from grpo_megatron.rollout.gateway.wire import WireRequest, check_number, check_stops, server_sent

# Fields that would change what the model reads or writes, and what to do instead.
_REFUSED = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text can be generated",
    "web_search_options": "the agent calls tools itself",
    "chat_template": "the run decides how chats are rendered; set data.chat_template in its configuration",
    "continue_final_message": "each answer is a message of its own",
}


class ChatRequest(WireRequest):
    """Body of a request for a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = Field(None, gt=0)
    max_completion_tokens: int | None = Field(None, gt=0)
    n: int | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    form_fields: ClassVar[set[str]] = {
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
    }

    def check(self, session: AgentSession) -> None:
        check_number(self.n)
        check_stops("stop", self.stops, session)
        for tool in self.tools or ():
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise UserError(f"tools: {shown(tool)} is not a function with a name")
        if self.tool_choice not in (None, "auto", "none"):
            raise UserError("tool_choice: the model decides whether it calls a tool; use auto or none")
        if self.parallel_tool_calls is False and self.offered_tools:
            raise UserError("parallel_tool_calls: the model decides how many tools it calls; leave it out")
        if self.top_logprobs:
            raise UserError("top_logprobs: only the log-probs of the sampled tokens are known; use 0")
        arguments = session.template_arguments
        if any(arguments.get(name) != value for name, value in (self.chat_template_kwargs or {}).items()):
            raise UserError(
                "chat_template_kwargs: the run decides how chats are rendered; set data.chat_template_args "
                "in its configuration"
            )
        for name, instead in _REFUSED.items():
            if self.model_extra.get(name):
                raise UserError(f"{name}: {instead}")
        if self.response_format and self.response_format.get("type") != "text":
            raise UserError("response_format: only text can be generated; leave it out")

    @property
    def stops(self) -> list[str]:
        """Texts before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools

    async def answer(self, session: AgentSession, key: str) -> ChatAnswer:
        limit = self.max_completion_tokens or self.max_tokens
        return await session.chat(key, self.messages, self.offered_tools, limit, self.stops)

    def body(self, answer: ChatAnswer, model: str) -> dict[str, Any]:
        """Return an answer as a chat completion. If token ids are asked for, they are where vLLM has them."""
        reason = answer.turn.finish_reason
        if "tool_calls" in answer.message and reason != "length":
            reason = "tool_calls"
        logprobs = {"content": _logprobs(answer), "refusal": None} if self.logprobs else None
        choice = {"index": 0, "message": answer.message, "logprobs": logprobs, "finish_reason": reason}
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
        first = {name: value for name, value in choice.items() if name != "message"}
        first |= {"delta": delta, "finish_reason": None}
        prompt = {name: body[name] for name in ("prompt_token_ids",) if name in body}
        yield server_sent(json_text(head | prompt | {"choices": [first]}))
        last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
        yield server_sent(json_text(head | {"choices": [last]}))
        if (self.stream_options or {}).get("include_usage"):
            yield server_sent(json_text(head | {"choices": [], "usage": body["usage"]}))
        yield server_sent("[DONE]")

    @staticmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "api_error"
        if status == 401:
            kind = "authentication_error"
        return {"error": {"message": message, "type": kind, "code": code, "param": None}}


def _logprobs(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Return the log-probs of an answer's tokens, without bytes, as a token may be part of a character."""
    ids, logprobs = answer.turn.response_ids, answer.turn.logprobs.tolist()
    return [
        {"token": answer.decode(ids[at : at + 1]), "logprob": logprob, "bytes": None, "top_logprobs": []}
        for at, logprob in enumerate(logprobs)
    ]


def usage(answer: TokenAnswer) -> dict[str, int]:
    """Return the number of tokens that an answer has read and written, as OpenAI's API tells it."""
    read, written = answer.num_read, len(answer.turn.response_ids)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

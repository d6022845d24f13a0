"""vLLM's `/inference/v1/generate`: token ids in, token ids with log-probs out."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.openai import ChatRequest, usage
from grpo_megatron.rollout.gateway.session import AgentSession, TokenAnswer
from grpo_megatron.rollout.gateway.wire import WireRequest, check_number, check_stops, server_sent


class _SamplingParams(BaseModel):
    model_config = ConfigDict(extra="allow")

    max_tokens: int | None = Field(None, gt=0)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    structured_outputs: dict[str, Any] | None = None


class GenerateRequest(WireRequest):
    """Body of a request for a turn after given token ids.

    The run's sampling parameters apply, as they do to a chat. `stop_token_ids` are among the parameters that
    are ignored, because clients of this protocol always send those of the model.
    """

    token_ids: list[int] = Field(min_length=1)
    sampling_params: _SamplingParams
    request_id: str | None = None
    features: Any = None
    content_parts: Any = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool | None = None
    stream_options: dict[str, Any] | None = None

    form_fields: ClassVar[set[str]] = {"stream", "stream_options", "return_token_ids"}

    def check(self, session: AgentSession) -> None:
        asked = self.sampling_params
        check_number(asked.n)
        check_stops("stop", [asked.stop] if isinstance(asked.stop, str) else asked.stop or [], session)
        if asked.structured_outputs:
            raise UserError("structured_outputs: only text can be generated")
        if asked.logprobs not in (None, 0, 1) or asked.prompt_logprobs is not None:
            raise UserError("logprobs: only those of the sampled tokens are known; use logprobs=0")
        if self.features or self.content_parts:
            raise UserError("features, content_parts: only text can be read")
        if self.output_mode != "tokens":
            raise UserError("output_mode: only token ids are returned; use /v1/chat/completions for text")

    async def answer(self, session: AgentSession, key: str) -> TokenAnswer:
        return await session.generate(key, self.token_ids, self.sampling_params.max_tokens)

    def body(self, answer: TokenAnswer, model: str) -> dict[str, Any]:
        turn, ids = answer.turn, answer.turn.response_ids.tolist()
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": None,
            "finish_reason": turn.finish_reason,
            "weight_versions": [
                {"version": span.version, "start": span.start, "end": span.end} for span in turn.weight_spans
            ],
        }
        if self.sampling_params.logprobs is not None:
            choice["logprobs"] = {"content": [*map(_logprob, ids, turn.logprobs.tolist())]}
        body = {
            "request_id": self.request_id or uuid.uuid4().hex,
            "output_mode": "tokens",
            "created": int(time.time()),
            "model": self.model or model,
            "choices": [choice],
            "usage": usage(answer),
        }
        return body | ({"prompt_token_ids": answer.read} if self.return_token_ids else {})

    def events(self, body: dict[str, Any]) -> Iterator[str]:
        yield server_sent(json_text({key: value for key, value in body.items() if key != "usage"}))
        if (self.stream_options or {}).get("include_usage"):
            yield server_sent(json_text(body | {"choices": []}))
        yield server_sent("[DONE]")

    @staticmethod
    def error(status: int, message: str, code: str | None) -> dict[str, Any]:
        return ChatRequest.error(status, message, code)


def _logprob(token_id: int, logprob: float) -> dict[str, Any]:
    """Return the log-prob of a sampled token. Older clients read the id from `token`."""
    return {"token_id": token_id, "token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": []}

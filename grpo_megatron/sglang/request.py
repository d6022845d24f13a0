"""A request to an engine, and the completion that is made of SGLang's answer."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.model.architecture import MoE
from grpo_megatron.sglang.kv_pressure import EngineLoad
from grpo_megatron.sglang.release import weight_spans


@dataclass(frozen=True)
class Request:
    """A request to sample one response."""

    key: tuple[int, int]
    """Identifier of the request, chosen by the caller; the completion has the same key."""
    prompt_ids: list[int]
    """Token ids of the prompt."""
    sampling: dict[str, Any]
    """SGLang's sampling parameters."""
    routed: int = 0
    """Number of leading tokens whose experts (MoE routing) the caller already has. The completion leaves out
    the experts of these tokens."""
    top: int = 0
    """Number of most likely tokens to return for each token of the response; 0: none."""
    cache: str = ""
    """Name of the prefix cache that the request uses: it reuses only prefixes of requests with this name."""


class NewTokens(NamedTuple):
    """Tokens of a response that an engine has sampled since its last report.

    ids: their token ids
    logprobs: their log-probs (after temperature)
    version: the weight version that sampled them. If the weights changed since the last report, it is the
        older version.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    version: int


@dataclass(frozen=True)
class Completion:
    """An engine's answer to a request: a finished response of R tokens to a prompt of P tokens."""

    key: tuple[int, int]
    """Request.key of the request that is completed."""
    response_ids: np.ndarray
    """int32 [R], token ids of the response."""
    logprobs: np.ndarray
    """float32 [R], log-probs of the response (after temperature)."""
    finish_reason: str
    """SGLang's finish reason, such as "stop" or "length"."""
    weight_spans: tuple[WeightSpan, ...]
    """Spans of the response's tokens with the weight version that sampled them."""
    routing: np.ndarray | None = None
    """uint8 or int16 [P + R - 1 - Request.routed, L, k], the k experts of each token in each of the L layers
    with experts, without the first `Request.routed` tokens and the last token; None unless requested."""
    top_ids: np.ndarray | None = None
    """int32 [R, Request.top], the most likely tokens at each position, best first; None unless requested."""
    top_logprobs: np.ndarray | None = None
    """float32 [R, Request.top], log-probs of `top_ids` (after temperature); None unless requested."""
    load: EngineLoad | None = None
    """Number of requests that the engine had when it finished this one; None if it is unknown."""


def _routing(request: Request, answer: dict, experts: MoE) -> np.ndarray:
    """Return the experts that each token was routed to, as in Completion.routing, from SGLang's answer.

    The result is uint8 or int16 [tokens, layers with experts, experts per token]. SGLang reports all layers
    of the model, so layers without experts are left out here.
    """
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    tokens = len(request.prompt_ids) + len(answer["output_ids"]) - 1 - request.routed
    routing = flat.reshape(tokens, len(experts.layers), -1)[:, np.array(experts.layers)]
    return routing.astype(experts.index_dtype)


def completion_of(request: Request, answer: dict, experts: MoE | None) -> Completion:
    """Return the completion that SGLang's answer to a request contains.

    experts: the model's experts. None: the request did not ask which experts its tokens used.

    Raises RuntimeError if the log-probs in the answer belong to other tokens than its output.
    """
    key, meta = request.key, answer["meta_info"]
    logprobs = meta["output_token_logprobs"]
    ids = np.array([token for _, token, _ in logprobs], dtype=np.int32)
    if not np.array_equal(ids, answer["output_ids"]):
        raise RuntimeError(f"engine answer {key}: the log-probs do not belong to the output tokens")
    return Completion(
        key=key,
        response_ids=ids,
        logprobs=np.array([logprob for logprob, _, _ in logprobs], dtype=np.float32),
        finish_reason=meta["finish_reason"]["type"],
        weight_spans=weight_spans(meta, len(ids)),
        routing=_routing(request, answer, experts) if experts else None,
        **(_top_tokens(meta["output_top_logprobs"]) if request.top else {}),
    )


def _top_tokens(positions: list[list[tuple[float, int, str | None]]]) -> dict[str, np.ndarray]:
    """Return Completion.top_ids and Completion.top_logprobs, as keyword arguments of Completion.

    The keys are "top_ids" (int32 [R, k]) and "top_logprobs" (float32 [R, k]), for R tokens of the response.

    positions: for each token of the response, SGLang's (log-prob, id, text) of the k most likely tokens, best
        first.
    """
    return {
        "top_ids": np.array([[token for _, token, _ in position] for position in positions], dtype=np.int32),
        "top_logprobs": np.array(
            [[logprob for logprob, _, _ in position] for position in positions], dtype=np.float32
        ),
    }

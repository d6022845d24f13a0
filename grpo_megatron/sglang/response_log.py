"""ResponseLog: the tokens of a response that its engine has reported before the response is complete."""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.sglang.request import Completion, NewTokens, Request

# Minimum number of tokens that are left to sample. SGLang refuses prompts that end closer to the model's
# context length (6 tokens in both releases).
_LEAST_REST = 8


class ResponseLog:
    """Record of the tokens that an engine reports of one unfinished response.

    If the engine is lost, another engine continues the response after these tokens. Tokens that were sampled
    but not reported are sampled again. This makes responses slightly shorter: the lost tokens did not end the
    response, but the new ones may. On average, a response loses at most as many tokens as are sampled again.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[WeightSpan] = []
        self._kept = 0  # number of tokens that the newest request continues

    def append(self, tokens: NewTokens) -> None:
        start = len(self._ids)
        self._ids += tokens.ids
        self._logprobs += tokens.logprobs
        self._spans.append(WeightSpan(tokens.version, start, len(self._ids)))

    def rest_of(self, request: Request) -> Request:
        """Return the request for the rest of a response: its prompt ends with the tokens reported so far.

        At least 8 tokens are left to sample, so reported tokens near the length limit are forgotten. If no
        reported token is left, the result is `request` itself.

        If there are stop strings, the last reported tokens are forgotten too. SGLang looks for a stop string
        only in what it samples for the new request, so it would not find one that begins before it. As each
        token has at least one byte, a stop string has at most as many tokens as bytes.

        request: the request for the whole response.
        """
        limit = request.sampling["max_new_tokens"]
        longest_stop = max((len(stop.encode()) for stop in request.sampling.get("stop", ())), default=1)
        self._keep(max(min(len(self._ids) - (longest_stop - 1), limit - _LEAST_REST), 0))
        if not self._kept:
            return request
        return replace(
            request,
            prompt_ids=request.prompt_ids + self._ids,
            sampling=request.sampling | {"max_new_tokens": limit - self._kept},
        )

    def _keep(self, length: int) -> None:
        """Forget the logged tokens after the first `length` tokens."""
        self._kept = length
        del self._ids[length:], self._logprobs[length:]
        self._spans = [
            WeightSpan(span.version, span.start, min(span.end, length))
            for span in self._spans
            if span.start < length
        ]

    def complete(self, completion: Completion) -> Completion:
        """Return the completion of the whole response: the logged tokens, followed by those of `completion`.

        completion: the answer to the request that `rest_of` returned last. Its routing already covers the
            logged tokens, because they are the end of its prompt. Its `top_ids` and `top_logprobs` are passed
            on as they are, so they do not cover the logged tokens.
        """
        kept = self._kept
        if not kept:
            return completion
        logged = [span for span in self._spans if span.end <= kept]  # without those after `rest_of`
        continued = [
            WeightSpan(span.version, span.start + kept, span.end + kept) for span in completion.weight_spans
        ]
        return replace(
            completion,
            response_ids=np.concatenate([np.array(self._ids[:kept], np.int32), completion.response_ids]),
            logprobs=np.concatenate([np.array(self._logprobs[:kept], np.float32), completion.logprobs]),
            weight_spans=_joined([*logged, *continued]),
        )


def _joined(spans: list[WeightSpan]) -> tuple[WeightSpan, ...]:
    """Return the spans, with neighbouring spans of the same weight version merged into one.

    spans: spans in the order of the tokens.
    """
    joined = spans[:1]
    for span in spans[1:]:
        if span.version == joined[-1].version:
            joined[-1] = WeightSpan(span.version, joined[-1].start, span.end)
        else:
            joined.append(span)
    return tuple(joined)

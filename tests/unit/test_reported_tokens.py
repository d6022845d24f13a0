"""ResponseLog: how a response goes on after the tokens that a lost engine has reported."""

import numpy as np
import pytest

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.sglang.request import Completion, NewTokens, Request
from grpo_megatron.sglang.response_log import ResponseLog


def test_tokens_of_two_versions_are_in_spans_of_their_own():
    log, request = ResponseLog(), Request((0, 0), [7], {"max_new_tokens": 20})
    assert log.rest_of(request) is request
    log.append(NewTokens([1, 2], [-1.0, -2.0], 3))
    log.append(NewTokens([3], [-3.0], 4))
    assert log.rest_of(request) == Request((0, 0), [7, 1, 2, 3], {"max_new_tokens": 17})
    log.append(NewTokens([4], [-4.0], 4))  # reported by the second engine, and part of its answer
    spans = (WeightSpan(4, 0, 1), WeightSpan(5, 1, 2))
    rest = Completion((0, 0), np.array([4, 5], np.int32), np.array([-4.0, -5.0], np.float32), "stop", spans)
    whole = log.complete(rest)
    assert whole.response_ids.tolist() == [1, 2, 3, 4, 5]
    assert whole.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert whole.weight_spans == (WeightSpan(3, 0, 2), WeightSpan(4, 2, 4), WeightSpan(5, 4, 5))


@pytest.mark.parametrize(("limit", "kept"), [(30, 20), (28, 20), (25, 17), (9, 1), (8, 0), (3, 0)])
def test_a_continuation_leaves_room_for_some_tokens(limit, kept):
    """SGLang refuses prompts that fill the model's context, which the response alone would not."""
    log, request = ResponseLog(), Request((0, 0), [7], {"max_new_tokens": limit})
    log.append(NewTokens(range(10), [0.0] * 10, 3))
    log.append(NewTokens(range(10, 20), [0.0] * 10, 4))
    rest = log.rest_of(request)
    assert rest.prompt_ids == [7, *range(kept)]
    assert rest.sampling["max_new_tokens"] == limit - kept
    done = Completion(
        (0, 0), np.array([5], np.int32), np.zeros(1, np.float32), "stop", (WeightSpan(4, 0, 1),)
    )
    whole = log.complete(done)
    assert whole.response_ids.tolist() == [*range(kept), 5]
    lengths = [(span.version, span.end - span.start) for span in whole.weight_spans]
    assert lengths == [(3, min(kept, 10)), (4, max(kept - 10, 0) + 1)][kept == 0 :]


def test_a_stop_string_may_begin_before_the_continuation():
    """SGLang looks for stop strings only in new tokens, so the response would have gone on to its limit."""
    log, request = ResponseLog(), Request((0, 0), [7], {"max_new_tokens": 30, "stop": ["##", "\u4e2d#"]})
    log.append(NewTokens(range(10), [0.0] * 10, 3))
    assert log.rest_of(request).prompt_ids == [7, *range(7)]  # the second string has four bytes
    log.append(NewTokens([1], [0.0], 4))
    assert log.rest_of(request).prompt_ids == [7, *range(5)]

"""Mapping of RLinf's keys to those of grpo_megatron: sampling of training responses."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Convert,
    Source,
    becomes,
    only,
    same,
    trains,
    truth,
)


def _greedy(value: Any, source: Source) -> dict[str, Any]:
    if truth(value):
        raise CannotCarry("training samples are never greedy here")
    return {}


def _sampled(value: Any, source: Source) -> dict[str, Any]:
    return _greedy(value is not None and not truth(value), source)


def _must_be_off(neutral: Any) -> Convert:
    """Return a function that checks that a sampling filter, such as top-p, is switched off.

    With a filter, the recorded log-probs would not be those of the distribution that is sampled from. The
    function returns `neutral` for the values `neutral` and null, and raises CannotCarry for any other value.

    neutral: the value that switches the filter off.
    """

    def convert(value: Any, source: Source) -> Any:
        if value is not None and value != neutral:
            raise CannotCarry(
                f"{value}: log-probs would not be those of the distribution that is sampled from"
            )
        return neutral

    return convert


def _top_k(value: Any, source: Source) -> int:
    return _must_be_off(-1)(value if value is not None and 0 < value < 500_000 else -1, source)


SAMPLING = trains(
    same("algorithm.sampling_params.temperature", "rollout.temperature", default=1.0),
    becomes("algorithm.sampling_params.top_p", "rollout.top_p", _must_be_off(1), "only 1: see rollout.top_k"),
    becomes(
        "algorithm.sampling_params.top_k",
        "rollout.top_k",
        _top_k,
        "only -1 (off); 0 and numbers above any vocabulary mean the same",
    ),
    becomes(
        "algorithm.sampling_params.max_new_tokens",
        "rollout.max_response_length",
        lambda value, source: value,
        "seq_length - max_prompt_length if not set",
    ),
    same("algorithm.sampling_params.stop", "rollout.stop"),
    same("algorithm.sampling_params.stop_token_ids", "rollout.stop_token_ids"),
    becomes("algorithm.sampling_params.use_greedy", (), _greedy, "only false"),
    becomes("algorithm.sampling_params.do_sample", (), _sampled, "only true"),
    becomes(
        "algorithm.sampling_params.repetition_penalty",
        (),
        only((1, 1.0), "this would change the distribution that is sampled from"),
        "only 1",
    ),
    becomes(
        "algorithm.sampling_params.min_new_tokens",
        (),
        only((None, 0, 1), "no lower limit of a response here"),
        "only 0 and 1",
    ),
)

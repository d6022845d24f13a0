"""Mapping of RLinf's keys to those of grpo_megatron: sampling of training responses."""

from grpo_megatron.importers.converters import fixed, must_be_off, top_k_off
from grpo_megatron.importers.mapping import becomes, same, trains

_NEVER_GREEDY = "training samples are never greedy here"

SAMPLING = trains(
    same("algorithm.sampling_params.temperature", "rollout.temperature", default=1.0),
    becomes("algorithm.sampling_params.top_p", "rollout.top_p", must_be_off(1), "only 1: see rollout.top_k"),
    becomes(
        "algorithm.sampling_params.top_k",
        "rollout.top_k",
        top_k_off,
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
    fixed("algorithm.sampling_params.use_greedy", (False, None), _NEVER_GREEDY),
    fixed("algorithm.sampling_params.do_sample", (True, None), _NEVER_GREEDY),
    fixed(
        "algorithm.sampling_params.repetition_penalty",
        (1, 1.0),
        "this would change the distribution that is sampled from",
    ),
    fixed(
        "algorithm.sampling_params.min_new_tokens",
        (None, 0, 1),
        "no lower limit of a response here",
        note="only 0 and 1",
    ),
)

"""Rules about the engines: their parallel sizes, the weights they load, and the length of a request."""

from collections.abc import Iterator

from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.rule import (
    ENGINE_COMMANDS,
    RuleBook,
    at_most,
    divides,
    excludes,
    refuses,
    shown,
)

# SGLang 0.5.17 and 0.5.23 cut a response so that prompt and response are _SPARE tokens shorter than the KV
# cache. They refuse a prompt that is not at least _PROMPT_SPARE tokens shorter than the cache.
_SPARE, _PROMPT_SPARE = 2, 7

# Each check takes a Config.
ENGINE = RuleBook(
    divides("rollout.engine.expert_parallel", "rollout.engine.tensor_parallel", ENGINE_COMMANDS),
    divides("rollout.engine.data_parallel_attention", "rollout.engine.tensor_parallel", ENGINE_COMMANDS),
    at_most("rollout.engine.num_engines", "rollout.engine.max_engines", ("train",)),
    excludes(
        "rollout.engine.max_engines",
        "cluster.placement=colocated",
        "further engines need devices of their own; set cluster.placement=separate or "
        "rollout.engine.max_engines=null",
        ("train",),
    ),
    excludes(
        "rollout.engine.max_engines",
        "weight_sync.transport=shared_memory",
        "a node that joins has no trainer rank; set weight_sync.transport=auto",
        ("train",),
    ),
    refuses(
        "rollout.engine.load_format=dummy",
        "random weights would be evaluated; set rollout.engine.load_format=auto",
        ("eval",),
    ),
    refuses(
        "rollout.engine.quantization=fp8",
        "only the trainer quantizes weights for the engines, and there is no trainer here; set "
        "rollout.engine.quantization=none",
        ("eval",),
    ),
    excludes(
        "rollout.engine.quantization=fp8",
        "rollout.engine.load_format=dummy",
        "SGLang would also draw random scales for the KV cache, which no weight sync replaces; set "
        "rollout.engine.load_format=auto",
        ("train",),
    ),
)


@ENGINE.rule(
    "rollout.engine.max_total_tokens must be large enough for the longest request: a prompt of "
    "data.max_prompt_length, a response of rollout.max_response_length or eval.max_response_length, and a "
    "few spare tokens.",
    "rollout.engine.max_total_tokens",
    "data.max_prompt_length",
    "rollout.max_response_length",
    "rollout.replay",
    "eval.max_response_length",
    "data.eval",
    commands=ENGINE_COMMANDS,
)
def longest_request_fits(config: Config) -> Iterator[str]:
    total, prompt = config.rollout.engine.max_total_tokens, config.data.max_prompt_length
    if total is None or config.rollout.replay:
        return
    lengths = {"rollout.max_response_length": config.rollout.max_response_length}
    if config.data.eval and config.eval.max_response_length:
        lengths["eval.max_response_length"] = config.eval.max_response_length
    for key, response in lengths.items():
        least = prompt + max(response + _SPARE, _PROMPT_SPARE)
        if total < least:
            values = shown(config, "rollout.engine.max_total_tokens", "data.max_prompt_length", key)
            yield f"{values}; at least {least} are needed"

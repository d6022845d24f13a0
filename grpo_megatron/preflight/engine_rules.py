"""Rules about the engines: their parallel sizes, the weights they load, and the length of a request."""

from collections.abc import Iterator

from grpo_megatron.config.engine import LoadFormat, Quantization
from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.rule import ENGINE_COMMANDS, RuleBook

# Each check takes a Config.
ENGINE = RuleBook()

_TRAIN = ("train",)
# SGLang 0.5.17 and 0.5.23 cut a response so that prompt and response are _SPARE tokens shorter than the KV
# cache. They refuse a prompt that is not at least _PROMPT_SPARE tokens shorter than the cache.
_SPARE, _PROMPT_SPARE = 2, 7


@ENGINE.rule(
    "An engine's ranks are divided evenly, for its experts and into attention groups.",
    "rollout.engine.tensor_parallel",
    "rollout.engine.expert_parallel",
    "rollout.engine.data_parallel_attention",
    commands=ENGINE_COMMANDS,
)
def engine_ranks_divide(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    for key in ("expert_parallel", "data_parallel_attention"):
        if engine.tensor_parallel % getattr(engine, key):
            yield (
                f"rollout.engine.{key}={getattr(engine, key)} does not divide the "
                f"rollout.engine.tensor_parallel={engine.tensor_parallel} ranks of an engine"
            )


@ENGINE.rule(
    "An evaluation is of the weights that engines load, since nobody brings others.",
    "rollout.engine.load_format",
    "rollout.engine.quantization",
    commands=("eval",),
)
def engines_load_what_is_evaluated(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    if engine.load_format == LoadFormat.dummy:
        yield "rollout.engine.load_format=dummy would evaluate random weights; use auto"
    if engine.quantization == Quantization.fp8:
        yield (
            "rollout.engine.quantization=fp8 needs a trainer, which quantises the weights as it brings them; "
            "use none"
        )


@ENGINE.rule(
    "An engine in FP8 reads a checkpoint: with random weights SGLang draws scales of the KV cache too, which "
    "no sync replaces.",
    "rollout.engine.quantization",
    "rollout.engine.load_format",
    commands=_TRAIN,
)
def scales_of_the_cache_are_not_random(config: Config) -> Iterator[str]:
    engine = config.rollout.engine
    if engine.quantization == Quantization.fp8 and engine.load_format == LoadFormat.dummy:
        yield (
            "rollout.engine.load_format=dummy would give an engine of quantization=fp8 random scales of its "
            "KV cache; use auto"
        )


@ENGINE.rule(
    "The KV cache of an engine holds the longest prompt with the longest response.",
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
            yield (
                f"rollout.engine.max_total_tokens={total} does not hold the longest request: "
                f"data.max_prompt_length={prompt} and {key}={response} need at least {least}"
            )

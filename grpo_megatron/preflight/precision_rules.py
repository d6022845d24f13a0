"""Rules about megatron.precision and megatron.fp8: which layers and recomputation each precision allows.

preflight.fp8_sizes checks that the model's sizes are suitable for FP8.
"""

from collections.abc import Iterator

from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Precision, Recompute
from grpo_megatron.preflight.rule import TRAINING_COMMANDS, RuleBook, excludes, shown

_DELAYED = "megatron.precision=fp8 and megatron.fp8.recipe=delayed"

# Each check takes a Config.
PRECISION = RuleBook(
    excludes(
        "megatron.precision=fp8",
        "megatron.transformer_impl=local",
        "only TransformerEngine's layers compute in FP8",
        commands=TRAINING_COMMANDS,
    ),
    excludes(
        "megatron.precision=fp32",
        "megatron.transformer_impl=transformer_engine",
        "TransformerEngine has no fused attention for fp32, and rounds the factors of matrix products to "
        "TF32",
        commands=TRAINING_COMMANDS,
    ),
    excludes(
        _DELAYED,
        "megatron.fp8.bf16_first_layers or megatron.fp8.bf16_last_layers",
        "delayed scaling applies to all layers; set megatron.fp8.recipe=tensorwise or "
        "megatron.fp8.recipe=blockwise",
        commands=TRAINING_COMMANDS,
    ),
)


@PRECISION.rule(
    f"{_DELAYED} cannot recompute layernorm or moe_act (megatron.recompute_modules), because scaled values "
    "cannot be computed a second time; set megatron.fp8.recipe=tensorwise or megatron.fp8.recipe=blockwise.",
    "megatron.fp8.recipe",
    "megatron.precision",
    "megatron.recompute",
    "megatron.recompute_modules",
)
def delayed_recomputes_whole_layers(config: Config) -> Iterator[str]:
    megatron = config.megatron
    delayed = megatron.precision == Precision.fp8 and megatron.fp8.recipe == FP8Recipe.delayed
    wanted = {"layernorm", "moe_act"}.intersection(megatron.recompute_modules)
    if delayed and megatron.recompute == Recompute.selective and wanted:
        yield shown(config, "megatron.recompute_modules")

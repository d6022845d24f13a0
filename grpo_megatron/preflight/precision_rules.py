"""Rules about the precision of training, and about the layers that can compute in it.

preflight.fp8_sizes checks that the model's sizes are suitable for FP8.
"""

from collections.abc import Iterator

from grpo_megatron.config.fp8 import FP8Recipe
from grpo_megatron.config.schema import Config, Precision, Recompute, TransformerImpl
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config.
PRECISION = RuleBook()

_PRECISION, _LAYERS, _RECIPE = "megatron.precision", "megatron.transformer_impl", "megatron.fp8.recipe"


@PRECISION.rule("FP8 is computed by the TransformerEngine layers.", _PRECISION, _LAYERS)
def fp8_has_its_layers(config: Config) -> Iterator[str]:
    megatron = config.megatron
    if megatron.precision == Precision.fp8 and megatron.transformer_impl == TransformerImpl.local:
        yield "megatron.precision=fp8 needs the TransformerEngine layers, but megatron.transformer_impl=local"


@PRECISION.rule("fp32 is computed by the local layers.", _PRECISION, _LAYERS)
def fp32_has_its_layers(config: Config) -> Iterator[str]:
    megatron = config.megatron
    if (
        megatron.precision == Precision.fp32
        and megatron.transformer_impl == TransformerImpl.transformer_engine
    ):
        yield (
            "megatron.precision=fp32 needs the local layers, but "
            "megatron.transformer_impl=transformer_engine: it has no fused attention for fp32, and rounds "
            "what its products multiply to TF32"
        )


@PRECISION.rule(
    "Delayed scaling is for all layers.",
    _RECIPE,
    "megatron.fp8.bf16_first_layers",
    "megatron.fp8.bf16_last_layers",
    _PRECISION,
)
def delayed_is_for_all_layers(config: Config) -> Iterator[str]:
    fp8 = config.megatron.fp8
    in_bf16 = fp8.bf16_first_layers + fp8.bf16_last_layers
    if config.megatron.precision == Precision.fp8 and fp8.recipe == FP8Recipe.delayed and in_bf16:
        yield (
            "megatron.fp8.recipe=delayed cannot leave layers in bf16, as megatron.fp8.bf16_first_layers and "
            "bf16_last_layers ask for; choose tensorwise or blockwise"
        )


@PRECISION.rule(
    "What delayed scaling has scaled is not computed a second time.",
    _RECIPE,
    _PRECISION,
    "megatron.recompute",
    "megatron.recompute_modules",
)
def delayed_recomputes_whole_layers(config: Config) -> Iterator[str]:
    megatron = config.megatron
    if megatron.precision != Precision.fp8 or megatron.fp8.recipe != FP8Recipe.delayed:
        return
    found = [name for name in ("moe_act", "layernorm") if name in megatron.recompute_modules]
    if megatron.recompute == Recompute.selective and found:
        yield (
            f"megatron.recompute_modules={found} cannot be recomputed with megatron.fp8.recipe=delayed; "
            "choose tensorwise or blockwise"
        )

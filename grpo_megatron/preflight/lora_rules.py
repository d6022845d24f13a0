"""Rules about LoRA adapters. preflight.model checks that the model has the layers to adapt."""

from collections.abc import Iterator

from grpo_megatron.config.lora import FUSED_TARGETS
from grpo_megatron.config.schema import Config, Precision, TransformerImpl
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config.
LORA = RuleBook()

_RANK, _TARGETS = "megatron.lora.rank", "megatron.lora.targets"


@LORA.rule("Adapters are somewhere.", _RANK, _TARGETS)
def adapters_have_targets(config: Config) -> Iterator[str]:
    lora = config.megatron.lora
    if lora.rank and not lora.targets:
        yield f"megatron.lora.rank={lora.rank} with empty megatron.lora.targets would train nothing"


@LORA.rule("Layers that are one in Megatron have an adapter together.", _RANK, _TARGETS)
def fused_targets_go_together(config: Config) -> Iterator[str]:
    lora = config.megatron.lora
    for fused in FUSED_TARGETS:
        absent = [name for name in fused if name not in lora.targets]
        if lora.rank and 0 < len(absent) < len(fused):
            yield (
                f"megatron.lora.targets={list(lora.targets)} is without {' and '.join(absent)}: "
                f"{', '.join(fused)} are one layer in Megatron, name all of them or none"
            )


@LORA.rule(
    "Adapters are beside Megatron's local layers.", _RANK, "megatron.transformer_impl", "megatron.precision"
)
def adapters_have_local_layers(config: Config) -> Iterator[str]:
    megatron = config.megatron
    if not megatron.lora.rank:
        return
    if megatron.transformer_impl == TransformerImpl.transformer_engine:
        yield (
            f"megatron.lora.rank={megatron.lora.rank} needs megatron.transformer_impl=local (or auto, which "
            "is local then)"
        )
    if megatron.precision == Precision.fp8:
        yield (
            f"megatron.lora.rank={megatron.lora.rank} needs local layers, which cannot compute "
            "megatron.precision=fp8; use bf16"
        )


@LORA.rule("A reward model is trained whole, with its new head.", _RANK, commands=("reward-model",))
def reward_models_are_trained_whole(config: Config) -> Iterator[str]:
    if config.megatron.lora.rank:
        yield (
            f"megatron.lora.rank={config.megatron.lora.rank}: a reward model is trained whole; set "
            "megatron.lora.rank=0"
        )

"""Rules about LoRA adapters. preflight.model checks that the model has the layers that are adapted."""

from collections.abc import Iterator

from grpo_megatron.config.lora import FUSED_TARGETS
from grpo_megatron.config.schema import Config
from grpo_megatron.preflight.rule import TRAINING_COMMANDS, RuleBook, excludes, needs, refuses

_RANK, _TARGETS = "megatron.lora.rank", "megatron.lora.targets"

# Each check takes a Config.
LORA = RuleBook(
    needs(_RANK, _TARGETS, "without a target nothing would be trained", commands=TRAINING_COMMANDS),
    excludes(
        _RANK,
        "megatron.transformer_impl=transformer_engine",
        "adapters are added to the local layers; set megatron.transformer_impl=local or "
        "megatron.transformer_impl=auto",
        commands=TRAINING_COMMANDS,
    ),
    excludes(
        _RANK,
        "megatron.precision=fp8",
        "adapters need the local layers, which cannot compute in FP8",
        commands=TRAINING_COMMANDS,
    ),
    refuses(
        _RANK, "a reward model is always trained as a whole; set megatron.lora.rank=0", ("reward-model",)
    ),
)


@LORA.rule(
    f"{_TARGETS} must list all or none of the layers that Megatron combines into one: q_proj, k_proj and "
    "v_proj; gate_proj and up_proj; in_proj_qkvz and in_proj_ba; in_proj_qkv, in_proj_z, in_proj_b and "
    "in_proj_a.",
    _RANK,
    _TARGETS,
)
def fused_targets_go_together(config: Config) -> Iterator[str]:
    lora = config.megatron.lora
    for fused in FUSED_TARGETS:
        absent = [name for name in fused if name not in lora.targets]
        if lora.rank and 0 < len(absent) < len(fused):
            yield f"{_TARGETS}={list(lora.targets)} lacks {' and '.join(absent)}"

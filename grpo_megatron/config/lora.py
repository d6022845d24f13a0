"""The section `megatron.lora` of the configuration."""

from typing import Literal

from grpo_megatron.config.options import dataclass, option

# Linear layers that can have an adapter, by the names of HF and PEFT. Each tuple is one layer in Megatron.
FUSED_TARGETS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
TARGETS = tuple(name for fused in FUSED_TARGETS for name in fused)


@dataclass
class LoraConfig:
    rank: int = option(
        0,
        "Rank of the adapters. 0: no adapters.",
        ge=0,
    )
    alpha: float = option(32.0, "What the adapters add is multiplied by alpha / rank.", gt=0)
    targets: list[Literal[TARGETS]] = option(
        list(TARGETS),
        "Layers with an adapter, by PEFT's names. q_proj, k_proj and v_proj go together, as do gate_proj "
        "and up_proj.",
    )

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
        "rank of the adapters (LoRA, arXiv:2106.09685) that are trained in place of the model, which is then "
        "frozen; 0: none, the whole model is trained",
        ge=0,
    )
    alpha: float = option(32.0, "what adapters add is multiplied by alpha / rank", gt=0)
    targets: list[Literal[TARGETS]] = option(
        list(TARGETS),
        "layers that have an adapter, by PEFT's names; q, k and v go together, as do gate and up, and share "
        "what is called A",
    )

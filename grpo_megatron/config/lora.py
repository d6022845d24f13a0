"""The section `megatron.lora` of the configuration."""

from typing import Any, Literal

from grpo_megatron.config.options import dataclass, option

# Linear layers that can have an adapter, by the names of HF and PEFT. Each tuple is one layer in Megatron.
_FUSED_BY_DEFAULT = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
_FUSED_OF_DELTA_NETWORKS = (
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("out_proj",),
)
FUSED_TARGETS = (*_FUSED_BY_DEFAULT, *_FUSED_OF_DELTA_NETWORKS)
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
        [name for fused in _FUSED_BY_DEFAULT for name in fused],
        "Layers with an adapter, by PEFT's names. q_proj, k_proj and v_proj go together, as do gate_proj "
        "and up_proj, and the in_proj_* of gated delta networks: in_proj_qkvz and in_proj_ba (Qwen3-Next), "
        "or in_proj_qkv, in_proj_z, in_proj_b and in_proj_a (Qwen3.5). Their output projection is out_proj.",
    )


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """Return the contents of PEFT's adapter_config.json.

    lora: settings with which the adapters are trained.
    base: name or path of the model that the adapters belong to.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(set(lora.targets)),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }

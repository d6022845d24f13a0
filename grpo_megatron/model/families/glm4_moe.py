"""GLM-4.5 and 4.6 (arXiv:2508.06471).

The rotary embedding rotates half of a head's channels. Some model sizes normalise queries and keys. Router
and experts work as in DeepSeek-V3.
"""

from functools import partial

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    return reading.decoder(
        config,
        "glm4_moe",
        qk_norm=config.flag("use_qk_norm", False),
        qkv_bias=config.flag("attention_bias", False),  # GLM has no bias on the output projection
        rotary_share=0.5,
        moe=reading.sigmoid_experts(config),
    )


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=blocks.attention,
        mlp=blocks.mlp,
        experts=blocks.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    has_classifier=False,
)

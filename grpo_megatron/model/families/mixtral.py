"""Mixtral (arXiv:2401.04088): Mistral with experts in every layer."""

from functools import partial

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    moe = reading.experts_in_all_layers(config)
    return reading.decoder(config, "mixtral", windows=reading.window_of_all_layers, moe=moe)


FAMILY = Family(
    "mixtral",
    "MixtralForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=blocks.attention,
        mlp=blocks.mlp,
        experts=blocks.experts("block_sparse_moe", "w1", "w3", "w2"),
    ),
    defaults={
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
    },
)

"""Qwen3-MoE (arXiv:2505.09388): Qwen3 with experts in some layers or all."""

from functools import partial

from grpo_megatron.model.architecture import Architecture, MoE
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    num_experts = config.integer("num_experts", None) or config.integer("num_local_experts")
    dense, every = set(config.integers("mlp_only_layers")), config.integer("decoder_sparse_step", 1)
    layers = range(reading.num_layers(config))
    moe = MoE(
        num_experts=num_experts,
        top_k=reading.top_k(config, num_experts),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob", False),
        layers=tuple(layer not in dense and (layer + 1) % every == 0 for layer in layers),
    )
    windows = {"windows": reading.window_of_all_layers} if config.flag("use_sliding_window", False) else {}
    return reading.decoder(config, "qwen3_moe", qk_norm=True, moe=moe, **windows)


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=blocks.attention,
        mlp=blocks.mlp,
        experts=blocks.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts_per_tok": 8,
    },
)

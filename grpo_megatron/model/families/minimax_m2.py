"""MiniMax-M2: experts with sigmoid routing in every layer, norms over all heads, partial rotary embedding."""

from functools import partial

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    # MiniMax's own code has these settings. transformers computes what is expected here, whatever they say.
    for key in ("use_qk_norm", "use_routing_bias"):
        if not config.flag(key, True):
            raise UserError(f"{key} must be true; other values are not supported")
    for key, expected in (("qk_norm_type", "per_layer"), ("scoring_func", "sigmoid")):
        if config.text(key, expected) != expected:
            raise UserError(
                f"{key}={shortened(config.text(key, None))} is not supported; only {expected} can be used"
            )
    if set(config.integers("attn_type_list")) - {1}:
        raise UserError("attn_type_list must be 1 for every layer, because linear attention is not supported")
    if config.integer("shared_intermediate_size", 0, least=0):
        raise UserError("shared_intermediate_size must be 0, because shared experts are not supported here")
    moe = reading.experts_in_all_layers(config, sigmoid=True, correction_bias=True)
    reading.refuse_one_expert(moe.top_k)
    rotated, head_dim = config.integer("rotary_dim", None), config.integer("head_dim")
    share = rotated / head_dim if rotated else 1.0
    return reading.decoder(
        config, "minimax_m2", qk_norm=True, joint_qk_norm=True, rotary_share=share, moe=moe
    )


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=blocks.attention,
        mlp=blocks.mlp,
        experts=blocks.experts("block_sparse_moe", "w1", "w3", "w2", bias="e_score_correction_bias"),
    ),
    defaults={
        "rope_theta": 5000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 196608,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_experts_per_tok": 8,
    },
    has_classifier=False,
)

"""Qwen3.5, dense and with experts: the layers of Qwen3-Next with four input projections.

Of a model that also has a vision model, only the language model is trained.
"""

from functools import partial

from grpo_megatron.model.architecture import Architecture, DeltaNet, MoE
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, delta_net, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    return delta_net.hybrid(config, reading.decoder(config, "qwen3_5", qk_norm=True, rotary_share=0.25))


def _read_with_experts(config: Fields) -> Architecture:
    count = config.integer("num_experts")
    # As in transformers: all layers have experts, and the weights of a token's experts sum to 1. The keys
    # that say otherwise for Qwen3-Next have no effect.
    moe = MoE(
        num_experts=count,
        top_k=reading.top_k(config, count),
        ffn_hidden_size=config.integer("moe_intermediate_size"),
        normalize=True,
        layers=(True,) * reading.num_layers(config),
        shared_ffn_hidden_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    arch = reading.decoder(config, "qwen3_5_moe", qk_norm=True, rotary_share=0.25, moe=moe)
    return delta_net.hybrid(config, arch)


def _projections(delta: DeltaNet, hidden: int) -> delta_net.Projections:
    values, heads = delta.value_rows, delta.value_heads
    shapes = {
        "in_proj_qkv": (2 * delta.key_rows + values, hidden),
        "in_proj_z": (values, hidden),
        "in_proj_b": (heads, hidden),
        "in_proj_a": (heads, hidden),
    }
    mixed, rest = delta_net.query_key_value(delta), [((1, 0, values),), ((2, 0, heads),), ((3, 0, heads),)]
    engine = {
        "in_proj_qkvz": (("in_proj_qkv", "in_proj_z"), (*mixed, rest[0])),
        "in_proj_ba": (("in_proj_b", "in_proj_a"), (((0, 0, heads),), ((1, 0, heads),))),
    }
    return delta_net.Projections(shapes, (*mixed, *rest), engine)


_LAYERS = {"attention": delta_net.attention, "mlp": blocks.mlp, "delta": delta_net.entries(_projections)}
_DEFAULTS = {
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "head_dim": 256,
}

DENSE = Family(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    read=_read,
    entries=partial(blocks.decoder, **_LAYERS),
    defaults=_DEFAULTS,
    has_classifier=False,
    vision_architecture="Qwen3_5ForConditionalGeneration",
)
WITH_EXPERTS = Family(
    "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM",
    read=_read_with_experts,
    entries=partial(
        blocks.decoder,
        **_LAYERS,
        experts=blocks.experts("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_expert"),
    ),
    defaults=_DEFAULTS | {"num_key_value_heads": 2, "num_experts_per_tok": 8},
    has_classifier=False,
    vision_architecture="Qwen3_5MoeForConditionalGeneration",
)

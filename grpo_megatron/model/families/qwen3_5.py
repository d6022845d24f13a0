"""Qwen3.5, dense, text only: the layers of Qwen3-Next with four input projections and without experts."""

from functools import partial

from grpo_megatron.model.architecture import Architecture, DeltaNet
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, delta_net, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    return delta_net.hybrid(config, reading.decoder(config, "qwen3_5", qk_norm=True, rotary_share=0.25))


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


FAMILY = Family(
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=delta_net.attention,
        mlp=blocks.mlp,
        delta=delta_net.entries(_projections),
    ),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
    has_classifier=False,
)

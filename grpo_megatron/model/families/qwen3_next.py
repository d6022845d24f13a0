"""Qwen3-Next: gated delta networks, gated attention in every fourth layer, experts with a shared expert."""

from functools import partial

from grpo_megatron.model.architecture import Architecture, DeltaNet
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.families import blocks, delta_net, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    moe = reading.softmax_experts(
        config,
        config.integer("num_experts"),
        normalize=True,
        shared_ffn_hidden_size=config.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    arch = reading.decoder(config, "qwen3_next", qk_norm=True, rotary_share=0.25, moe=moe)
    return delta_net.hybrid(config, arch)


def _projections(delta: DeltaNet, hidden: int) -> delta_net.Projections:
    """Return the two input projections, whose rows are ordered by key head.

    The rows of a key head are its query, its key, its values and their gates in the first projection, and the
    betas and alphas of its values in the second.
    """
    ratio = delta.value_heads // delta.key_heads
    values = ratio * delta.value_dim
    shapes = {
        "in_proj_qkvz": (2 * delta.key_rows + 2 * delta.value_rows, hidden),
        "in_proj_ba": (2 * delta.value_heads, hidden),
    }

    def by_head(tensor: int, first: int, rows: int) -> delta_net.Section:
        step = shapes["in_proj_ba" if tensor else "in_proj_qkvz"][0] // delta.key_heads
        return tuple((tensor, head * step + first, rows) for head in range(delta.key_heads))

    size = delta.key_dim
    sections = (
        by_head(0, 0, size),
        by_head(0, size, size),
        by_head(0, 2 * size, values),
        by_head(0, 2 * size + values, values),
        by_head(1, 0, ratio),
        by_head(1, ratio, ratio),
    )
    # The engine has HF's projections.
    engine = {name: ((name,), (((0, 0, rows),),)) for name, (rows, _) in shapes.items()}
    return delta_net.Projections(shapes, sections, engine)


FAMILY = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=delta_net.attention,
        mlp=blocks.mlp,
        experts=blocks.experts("mlp", "gate_proj", "up_proj", "down_proj", shared="shared_expert"),
        delta=delta_net.entries(_projections),
    ),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts_per_tok": 10,
    },
)

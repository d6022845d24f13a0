"""DeepSeek-V3 and R1 (arXiv:2412.19437): latent attention, shared and routed experts.

Kimi-K2 has the same layers.
"""

from functools import partial

from grpo_megatron.model.architecture import Architecture, Latent
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _read(config: Fields) -> Architecture:
    latent = Latent(
        query_rank=config.integer("q_lora_rank", None),
        kv_rank=config.integer("kv_lora_rank"),
        plain_dim=config.integer("qk_nope_head_dim"),
        rotated_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        interleaved=config.flag("rope_interleave", True),
    )
    return reading.decoder(config, "deepseek_v3", moe=reading.sigmoid_experts(config), latent=latent)


def _attention(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    hidden, latent = arch.hidden_size, arch.latent
    queries, values = arch.num_heads * arch.head_dim, arch.num_heads * latent.value_dim
    pairs, kv_rows = arch.num_heads * latent.plain_dim + values, latent.kv_rank + latent.rotated_dim
    theirs, ours = f"{hf}.self_attn", f"{megatron}.self_attention"

    def same(name: str, shape: tuple[int, ...], megatron_name: str, axis: int | None = None) -> Entry:
        return blocks.same(f"{theirs}.{name}.weight", shape, f"{ours}.{megatron_name}.weight", axis)

    def down(name: str, rows: int, megatron_name: str, engine_row: int) -> Entry:
        """Return the weight map entry of one of the two projections of the hidden states down to a latent.

        In the engine, the two projections lie one below the other in a single parameter.

        name, megatron_name: name of the projection in HF and in Megatron, within the layer's attention.
        rows: number of rows of the projection.
        engine_row: first row of the projection in the engine's parameter.
        """
        fused = f"{theirs}.fused_qkv_a_proj_with_mqa.weight"
        names = (f"{theirs}.{name}.weight",), ((rows, hidden),), f"{ours}.{megatron_name}.weight"
        return Entry(*names, None, fused, None, engine_row=engine_row)

    if latent.query_rank is None:
        found = [
            same("q_proj", (queries, hidden), "linear_q_proj", 0),
            same("kv_a_proj_with_mqa", (kv_rows, hidden), "linear_kv_down_proj"),
        ]
    else:
        found = [
            down("q_a_proj", latent.query_rank, "linear_q_down_proj", 0),
            same("q_a_layernorm", (latent.query_rank,), "q_layernorm"),
            same("q_b_proj", (queries, latent.query_rank), "linear_q_up_proj", 0),
            down("kv_a_proj_with_mqa", kv_rows, "linear_kv_down_proj", latent.query_rank),
        ]
    before, after = blocks.layer_norms(arch, hf, megatron)
    return [
        before,
        *found,
        same("kv_a_layernorm", (latent.kv_rank,), "kv_layernorm"),
        same("kv_b_proj", (pairs, latent.kv_rank), "linear_kv_up_proj", 0),
        same("o_proj", (hidden, values), "linear_proj", 1),
        after,
    ]


FAMILY = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read=_read,
    entries=partial(
        blocks.decoder,
        attention=_attention,
        mlp=blocks.mlp,
        experts=blocks.experts("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
    },
)

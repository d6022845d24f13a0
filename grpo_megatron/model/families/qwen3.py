"""Qwen3 (arXiv:2505.09388): queries and keys are normed."""

from functools import partial

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family

FAMILY = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    read=partial(reading.decoder, family="qwen3", qk_norm=True),
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
)

"""Qwen2 and Qwen2.5 (arXiv:2407.10671): a bias on queries, keys and values."""

from functools import partial

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family

FAMILY = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    read=partial(reading.decoder, family="qwen2", qkv_bias=True),
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
    },
)

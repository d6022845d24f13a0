"""Llama 2 and 3.x (arXiv:2407.21783)."""

from functools import partial

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family

FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    read=partial(reading.decoder, family="llama"),
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
    defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
)

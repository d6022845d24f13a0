"""Mistral (arXiv:2310.06825).

Within its sliding window it computes what Llama computes. Sequences are limited to the window's length, so
the window itself is not implemented.
"""

from functools import partial

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    read=partial(reading.decoder, family="mistral", windowed=True),
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
    defaults={
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
)

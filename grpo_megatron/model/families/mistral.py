"""Mistral (arXiv:2310.06825); within its sliding window, which bounds the positions here, it computes as Llama does."""

from functools import partial

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family

FAMILY = Family(
    "mistral",
    "MistralForCausalLM",
    read=partial(reading.decoder, family="mistral", windowed=True),
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
)

"""The training engine. Knows models, ranks and optimizers; nothing of rewards or prompts."""

from grpo_megatron.megatron import cpu

# Before anything below imports Megatron; does nothing with CUDA.
cpu.install()

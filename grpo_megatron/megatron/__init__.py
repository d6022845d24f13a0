"""The training engine. Knows models, ranks and optimizers; nothing of rewards or prompts.

Importing any module below that uses Megatron first prepares machines without CUDA.
"""

from grpo_megatron.megatron import cpu

cpu.install()

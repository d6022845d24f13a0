"""Training engine: models, ranks and optimizers. It knows nothing of rewards or prompts."""

from grpo_megatron.megatron import cpu

# This must run before any module below imports Megatron. With CUDA it only adds what a missing
# TransformerEngine leaves undefined.
cpu.install()

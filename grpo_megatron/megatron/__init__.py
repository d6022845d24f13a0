"""Training engine: what runs on one trainer rank (model, optimizer, checkpoints, weight export).

It does not depend on prompts or reward functions.
"""

from grpo_megatron.megatron.without_gpu import patches

# This must run before any module below imports Megatron. With CUDA it only adds what a missing
# TransformerEngine leaves undefined.
patches.install()

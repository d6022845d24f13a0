"""Training engine: all code that runs on one trainer rank (model, optimizer, checkpoints, weight export).

It does not depend on prompts or reward functions.
"""

from grpo_megatron.megatron.without_gpu import patches

# This must run before any module of this package imports Megatron. On a machine with CUDA, it changes only
# what Megatron needs if TransformerEngine is not installed.
patches.install()

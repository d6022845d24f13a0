"""Implementation of `grpo-megatron COMMAND`. The tools call some of it too."""

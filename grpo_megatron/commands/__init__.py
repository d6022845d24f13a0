"""Implementation of the commands of `grpo-megatron`. The programs in tools/ call some of it too."""

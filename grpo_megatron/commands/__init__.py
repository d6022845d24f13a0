"""Implementation of the commands of `grpo-megatron`. The programs in tools/ also call parts of it."""

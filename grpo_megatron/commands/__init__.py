"""What `grpo-megatron COMMAND` does; the tools call some of it too."""

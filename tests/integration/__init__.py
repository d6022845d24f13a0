# Its patches must be installed before a module of this package imports Megatron, whatever is collected
# first.
import grpo_megatron.megatron  # noqa: F401

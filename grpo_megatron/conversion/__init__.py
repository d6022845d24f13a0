"""Checkpoints between HF's format and Megatron's, tensor by tensor, by several processes, and what compares them."""

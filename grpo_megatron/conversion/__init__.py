"""Conversion of checkpoints between HF's format and Megatron's, and their comparison."""

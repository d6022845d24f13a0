"""Conversion of checkpoints between HF's and Megatron's formats and from GGUF to HF, and their comparison."""

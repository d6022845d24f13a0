"""Megatron's model, built from our own layers: attention, norms, router of experts, LoRA adapters."""

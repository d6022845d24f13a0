"""Megatron without a GPU or without TransformerEngine, for laptops and tests.

Megatron and TransformerEngine are changed while they are imported; the project holds no modified copy.
"""

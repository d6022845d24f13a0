"""Patches that let Megatron run without a GPU or without TransformerEngine, for laptops and tests.

They change Megatron and TransformerEngine while these are imported. The project holds no modified copy.
"""

"""Driver side of training: objects with which the driver process controls all trainer ranks.

The ranks' side, which computes on the GPUs, is the package `megatron`.
"""

"""Data types of training: samples, the flat batch of a step, loss weights, micro-batch schedule, layout.

This module imports nothing, so that environment processes, which use only `batch.prompt`, start without
torch.
"""

"""The data contract: samples from generation, the flat batch of a step, token weights, schedule and layout.

Nothing is imported here. Environment processes start by importing only `batch.prompt`, which does not need
torch.
"""

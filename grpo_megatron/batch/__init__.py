"""The data contract: samples from generation, the flat batch of a step, token weights, schedule, layout.

Nothing is imported here: processes with environments start with `batch.prompt` alone, which needs no torch.
"""

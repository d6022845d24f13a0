"""Planner: how much of a cluster's memory and time a run of `train` takes.

It computes both from the configuration and the model's config.json. It reads no weights and starts no
process. Memory is counted. Times come from a model, see planner.time. The user's guide is docs/planner.md.
"""

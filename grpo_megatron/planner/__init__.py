"""Planner: the memory and the time that a `train` run would take on a cluster.

It computes both from the configuration and the model's config.json. It reads no weights and starts no
process. Memory is counted item by item. Times come from a cost model (planner.time). The user's guide is
docs/planner.md.
"""

"""Planner: the memory and the time that a `train` run would take on a cluster.

It computes both from the configuration and the model's config.json. It reads no weights and starts no
process. Memory is counted item by item. Times are computed by a cost model, see planner.time. The user's
guide is docs/planner.md.
"""

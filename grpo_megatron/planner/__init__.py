"""What a run of `train` takes of a cluster's memory and time, by arithmetic on its configuration and the model's config.json.

No weights are read and no process is started. Memory is counted; times are a model, see planner.time. docs/planner.md.
"""

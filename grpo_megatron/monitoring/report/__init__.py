"""HTML page about a run, made by `grpo-megatron report` from the files in the run's folder."""

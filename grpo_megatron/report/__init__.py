"""HTML page about a run, made from the files in the run's folder (`grpo-megatron report`)."""

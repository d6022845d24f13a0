"""`grpo-megatron report`: one page about a run, from the files in its folder."""

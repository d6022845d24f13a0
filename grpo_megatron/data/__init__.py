"""Where prompts come from."""

from grpo_megatron.data.prompts import EpochOrder, PromptSource, PromptTokenizer, load_prompts, read_jsonl

__all__ = ["EpochOrder", "PromptSource", "PromptTokenizer", "load_prompts", "read_jsonl"]

"""Where prompts come from."""

from grpo_megatron.data.prompts import EpochOrder, PromptSource, PromptTokenizer, as_list, load_prompts, prompt_text
from grpo_megatron.data.records import read_jsonl, read_records

__all__ = [
    "EpochOrder",
    "PromptSource",
    "PromptTokenizer",
    "as_list",
    "load_prompts",
    "prompt_text",
    "read_jsonl",
    "read_records",
]

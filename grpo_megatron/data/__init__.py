"""Data sources: records, prompts, their tokenization, and the order in which training uses them."""

from grpo_megatron.data.order import EpochOrder, PromptSource
from grpo_megatron.data.prompts import as_list, load_prompts
from grpo_megatron.data.records import read_records
from grpo_megatron.data.tokenizer import PromptTokenizer

__all__ = ["EpochOrder", "PromptSource", "PromptTokenizer", "as_list", "load_prompts", "read_records"]

"""The section `data` of the configuration."""

from enum import Enum
from typing import Any

from pydantic import PositiveFloat

from grpo_megatron.config.options import FilledText, dataclass, option


class OverlongPrompts(str, Enum):
    error = "error"
    skip = "skip"
    truncate_left = "truncate_left"


@dataclass
class DataConfig:
    train: Any = option(
        None,
        "training prompts (sft: prompt/response pairs, reward-model: preferences): .jsonl, .json or .parquet "
        "file, hf:NAME, or a list",
    )
    train_weights: list[PositiveFloat] = option(
        [], "share of each source of data.train; none: each prompt once per epoch"
    )
    eval: Any = option(None, "held-out prompts, as data.train; null: no evaluation")
    prompt_key: FilledText = option(
        "prompt",
        "field with the prompt: a string, a list of chat messages, or a list of token ids; a.b: field b of a",
    )
    answer_key: FilledText = option(
        "answer",
        "field with the reference answer given to the reward, or with a list of those it accepts; a.b: field "
        "b of a",
    )
    response_key: FilledText = option(
        "response",
        "sft only: field with the response to learn: a string, taken as the model writes it, or the messages "
        "of the rest of a chat, which the chat template renders",
    )
    chosen_key: FilledText = option(
        "chosen",
        "reward-model only: field with the response that is preferred: text, or chat messages that end with "
        "the assistant's; if they do not begin with the assistant's, they are a whole conversation, and the "
        "record's prompt is not read",
    )
    rejected_key: FilledText = option(
        "rejected", "reward-model only: field with the other response, of the same forms"
    )
    margin_key: FilledText | None = option(
        None,
        "reward-model only: field with a margin by which the preferred one's score should be ahead "
        "(arXiv:2307.09288 eq. 2)",
    )
    tools_key: FilledText | None = option(
        "tools",
        "field with the JSON schemas of tools that the chat template offers to the model, where a record has "
        "it; null: not read",
    )
    system_prompt: str | None = option(None, "system message put before prompts that have none")
    chat_template: FilledText = option(
        "tokenizer",
        "what makes the prompt's text: tokenizer (its chat template), a file with a Jinja template, or none "
        "(for base models: the string as it is, with the BOS token if the tokenizer puts one before texts, "
        "and no end token)",
    )
    chat_template_args: dict[str, Any] = option(
        {},
        "further arguments of the chat template, such as {enable_thinking: false}; only those that it reads",
    )
    prompt_suffix: str = option(
        "",
        "text appended to every prompt, such as an instruction; in a chat to its last message of the user",
    )
    max_prompt_length: int = option(512, "longest prompt accepted", "tokens", gt=0)
    overlong_prompts: OverlongPrompts = option(
        OverlongPrompts.error,
        "what happens to longer prompts: error, skip (counted), truncate_left (counted); "
        "sft, reward-model: skip leaves out longer responses, too",
    )
    shuffle: bool = option(
        True, "new order in every epoch (from run.seed); false keeps the order of the file"
    )
    train_batch_size: int = option(
        32,
        "prompts per step (sft, reward-model: examples or preferences per optimizer step)",
        "prompts",
        gt=0,
    )

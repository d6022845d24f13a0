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
        "Training data: a .jsonl, .json or .parquet file, hf:NAME, or a list of these. The records are "
        "prompts. sft needs pairs of prompt and response, and reward-model needs preferences.",
    )
    train_weights: list[PositiveFloat] = option(
        [], "Share of each source of data.train in the prompts. []: each prompt is used once per epoch."
    )
    eval: Any = option(
        None, "Held-out data for evaluation, in the forms of data.train. null: there is no evaluation."
    )
    prompt_key: FilledText = option(
        "prompt",
        "Field of a record with the prompt: a string, a list of chat messages, or a list of token ids. a.b "
        "is the field b within the field a.",
    )
    answer_key: FilledText = option(
        "answer",
        "Field of a record with the reference answer for the reward, or with a list of accepted answers. "
        "a.b is the field b within the field a.",
    )
    response_key: FilledText = option(
        "response",
        "Field of a record with the response to learn, in sft only. A string is taken as the model writes "
        "it. Chat messages are the rest of the chat and are rendered by the chat template.",
    )
    chosen_key: FilledText = option(
        "chosen",
        "Field of a record with the preferred response, in reward-model only: text, or chat messages that "
        "end with one of the assistant. Messages that do not begin with the assistant are a whole "
        "conversation, and the record's prompt is not read.",
    )
    rejected_key: FilledText = option(
        "rejected",
        "Field of a record with the response that is not preferred, in reward-model only. It has the forms "
        "of data.chosen_key.",
    )
    margin_key: FilledText | None = option(
        None,
        "Field of a record with a margin, in reward-model only: the score of the preferred response should "
        "be ahead by this (arXiv:2307.09288 eq. 2). null: there is none.",
    )
    tools_key: FilledText | None = option(
        "tools",
        "Field of a record with the JSON schemas of tools, which the chat template offers to the model. "
        "Records may lack it. null: it is not read.",
    )
    system_prompt: str | None = option(
        None, "System message that is put before prompts that have none. null: none is added."
    )
    chat_template: FilledText = option(
        "tokenizer",
        "How the text of a prompt is made. tokenizer: with the tokenizer's chat template. A file: with the "
        "Jinja template in it. none: the string is used as it is, for base models; a BOS token is put "
        "before it if the tokenizer does so, and no end token follows.",
    )
    chat_template_args: dict[str, Any] = option(
        {},
        "Further arguments of the chat template, such as {enable_thinking: false}. The template must read "
        "them.",
    )
    prompt_suffix: str = option(
        "",
        "Text that is appended to every prompt, such as an instruction. In a chat it is appended to the "
        "last message of the user.",
    )
    max_prompt_length: int = option(512, "Length of the longest prompt that is accepted.", "tokens", gt=0)
    overlong_prompts: OverlongPrompts = option(
        OverlongPrompts.error,
        "What happens to prompts longer than max_prompt_length. error: the run is refused. skip: they are "
        "left out and counted; in sft and reward-model, records with longer responses too. truncate_left: "
        "their beginning is cut off, and they are counted.",
    )
    shuffle: bool = option(
        True, "true: every epoch has a new order, which depends on run.seed. false: the order of the file."
    )
    train_batch_size: int = option(
        32,
        "Number of prompts per step. In sft and reward-model it is the number of examples or preferences "
        "per optimizer step.",
        "prompts",
        gt=0,
    )

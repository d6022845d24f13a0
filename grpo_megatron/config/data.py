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
        "Training data: a .jsonl, .json or .parquet file, hf:NAME, or a list of these. Records are prompts; "
        "in sft, prompts with responses; in reward-model, preferences.",
    )
    train_weights: list[PositiveFloat] = option(
        [], "Share of each source of data.train. []: each prompt once per epoch."
    )
    eval: Any = option(None, "Held-out data for evaluation, in the forms of data.train.")
    prompt_key: FilledText = option(
        "prompt",
        "Field of the prompt: a string, chat messages, or token ids.",
    )
    answer_key: FilledText = option(
        "answer",
        "Field of the reference answer, or of a list of accepted answers.",
    )
    response_key: FilledText = option(
        "response",
        "Field of the response to learn in sft: a string, used as it is, or chat messages.",
    )
    chosen_key: FilledText = option(
        "chosen",
        "Field of the preferred response in reward-model: a string, or chat messages that end with the "
        "assistant's. If they begin with another's, they replace the prompt.",
    )
    rejected_key: FilledText = option(
        "rejected",
        "Field of the other response, in the forms of data.chosen_key.",
    )
    margin_key: FilledText | None = option(
        None,
        "Field of the margin by which the preferred response should score higher (arXiv:2307.09288 eq. 2).",
    )
    tools_key: FilledText | None = option(
        "tools",
        "Field of JSON schemas of tools for the chat template. Records may lack it.",
    )
    system_prompt: str | None = option(None, "System message for prompts that have none.")
    chat_template: FilledText = option(
        "tokenizer",
        "Template of prompts. tokenizer: the tokenizer's. A file: the Jinja template in it. none: prompts as "
        "they are, for base models, with a BOS token if the tokenizer adds one.",
    )
    chat_template_args: dict[str, Any] = option(
        {},
        "Further arguments of the chat template, such as {enable_thinking: false}.",
    )
    prompt_suffix: str = option(
        "",
        "Text appended to every prompt, in a chat to the user's last message.",
    )
    max_prompt_length: int = option(512, "Maximum length of a prompt.", "tokens", gt=0)
    overlong_prompts: OverlongPrompts = option(
        OverlongPrompts.error,
        "Prompts longer than max_prompt_length. error: the run is refused. skip: they are left out, as are "
        "records with longer responses in sft and reward-model. truncate_left: their beginning is cut off.",
    )
    shuffle: bool = option(True, "Use a new order in every epoch, from run.seed.")
    train_batch_size: int = option(
        32,
        "Number of prompts per step; in sft, of examples; in reward-model, of preferences.",
        "prompts",
        gt=0,
    )

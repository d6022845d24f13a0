"""Choice of the chat template: the tokenizer's own, a file, or none (data.chat_template)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.errors import UserError

FROM_TOKENIZER, NO_TEMPLATE = "tokenizer", "none"
# Arguments of apply_chat_template that this program passes itself, or that change the form of its result.
_RESERVED_ARGUMENTS = (
    "conversation",
    "messages",
    "tools",
    "chat_template",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "continue_final_message",
)


def chosen_template(
    model_path: str, tokenizer, data: DataConfig, tools: Sequence[dict[str, Any]]
) -> ChatTemplate | None:
    """Return the chat template that data.chat_template selects, or None for data.chat_template=none.

    model_path: folder of the model, for error messages.
    tokenizer: the model's tokenizer, an object of transformers.
    tools: JSON schemas of the functions that the model may call in every prompt.

    Raises UserError if the template is missing or unreadable, or if settings contradict each other.
    """
    text = _template_text(model_path, tokenizer, data)
    return (
        None
        if data.chat_template == NO_TEMPLATE
        else ChatTemplate(tokenizer, text, data.chat_template_args, tools)
    )


def check_arguments(arguments: dict[str, Any]) -> None:
    """Raise UserError if data.chat_template_args has an argument that the program passes itself."""
    if ours := sorted(set(_RESERVED_ARGUMENTS) & set(arguments)):
        raise UserError(
            f"data.chat_template_args cannot contain {', '.join(ours)}, because the program passes these to "
            "the template itself; remove them"
            + ("; tools come from rollout.tools or data.tools_key" if "tools" in ours else "")
        )


def _template_text(model_path: str, tokenizer, data: DataConfig) -> str | None:
    """Return the contents of the template file that data.chat_template names.

    Returns None for data.chat_template=tokenizer and data.chat_template=none, because no file is used.

    Raises UserError if settings contradict each other, if the tokenizer's template is missing, or if the file
    is missing, unreadable or empty.
    """
    name = data.chat_template
    check_arguments(data.chat_template_args)
    if name == NO_TEMPLATE:
        for key, value in (
            ("system_prompt", data.system_prompt),
            ("chat_template_args", data.chat_template_args or None),
        ):
            if value is not None:
                raise UserError(
                    f"data.{key} needs a chat template, but data.chat_template=none; remove data.{key}, or "
                    "set data.chat_template to a template"
                )
        return None
    if name == FROM_TOKENIZER:
        if not tokenizer.chat_template:
            raise UserError(
                f"{model_path}: the tokenizer has no chat template; set data.chat_template=none to use "
                "prompts as they are (for a base model), or set it to a file with a Jinja template"
            )
        return None
    if not Path(name).is_file():
        raise UserError(
            f"data.chat_template={name}: there is no such file; give the path of a template file, or set "
            "data.chat_template=tokenizer or data.chat_template=none"
        )
    try:
        template = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.chat_template={name} cannot be read: {error}") from error
    if not template.strip():
        raise UserError(f"data.chat_template={name} is an empty file; give a file with a Jinja template")
    return template

"""A prompt and a response as a reward model reads them: one finished conversation, whose last token is scored."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.config.schema import DataConfig
from grpo_megatron.data.tokenizer import FROM_TOKENIZER, NO_TEMPLATE, PromptTokenizer, load_tokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.json_files import read_object

_TOKENIZER = "tokenizer.json"


class Conversations:
    """pad: the token that transformers' *ForSequenceClassification takes for padding, wherever it stands: it scores the last token
    that is another one. None: it scores the last token, whatever it is."""

    def __init__(self, tokenizer: PromptTokenizer, pad: int | None):
        self.tokenizer, self.pad = tokenizer, pad
        self._ending = tokenizer.after_response()

    def finished(self, response: np.ndarray) -> np.ndarray:
        """int32 [R] -> the response with what stands behind it in a finished conversation, up to the token that is scored.

        What a response already has of that, such as the end token that the engine stopped at, is not repeated. Empty where all of it is
        padding: then the prompt's last token is scored.
        """
        have = next(
            (n for n in range(len(self._ending), 0, -1) if np.array_equal(response[-n:], self._ending[:n])), 0
        )
        whole = np.concatenate([response, self._ending[have:]]).astype(np.int32)
        counts = np.flatnonzero(whole != self.pad) if self.pad is not None else np.arange(len(whole))
        return whole[: counts[-1] + 1] if len(counts) else whole[:0]


def same_tokenizer(folder: str, other: str) -> bool:
    """Whether both have the same tokens, by their files."""
    files = Path(folder, _TOKENIZER), Path(other, _TOKENIZER)
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def conversations_of(reward_model: str, policy: str, data: DataConfig) -> Conversations:
    """As a reward model that is not trained here reads them: with the policy's tokenizer as data.chat_template says; with another, in the
    template of its own folder, unless data.chat_template=none. policy: its folder.

    Raises UserError where there is no tokenizer, or no template.
    """
    try:
        if data.chat_template != NO_TEMPLATE and not same_tokenizer(reward_model, policy):
            if not load_tokenizer(reward_model).chat_template:
                raise UserError(
                    f"{reward_model}: its tokenizer is not the policy's, so data.chat_template is not for it, and it has no chat template; "
                    "put the one that it was trained with into this folder, as chat_template.jinja"
                )
            data = replace(data, chat_template=FROM_TOKENIZER, chat_template_args={})
        # The policy's prompts come with the system prompt and the suffix.
        data = replace(data, system_prompt=None, prompt_suffix="")
        return Conversations(PromptTokenizer(reward_model, data), stated_pad_token(reward_model))
    except UserError as error:
        raise UserError(f"reward.model.path: {error}") from error


def stated_pad_token(model_path: str) -> int | None:
    """pad_token_id of config.json."""
    return read_object(Path(model_path) / "config.json").get("pad_token_id")


def pad_token(model_path: str) -> int | None:
    """Of a reward model that is made of this checkpoint: what config.json states, else the tokenizer's, else its end token.

    Where it is also the last token of a conversation, that token is left out, in training as in scoring.
    """
    stated = stated_pad_token(model_path)
    if stated is not None:
        return stated
    tokenizer = load_tokenizer(model_path)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

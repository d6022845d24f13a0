"""Conversations as a reward model reads them: a prompt and a finished response.

A reward model's score is read at the last token of the conversation.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data.model_tokenizer import load_tokenizer
from grpo_megatron.data.template_choice import FROM_TOKENIZER, NO_TEMPLATE
from grpo_megatron.data.tokenizer import PromptTokenizer
from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object
from grpo_megatron.model.text_config import text_config

_TOKENIZER = "tokenizer.json"


class Conversations:
    """The tokenizer of a reward model, and the rules by which the model reads a finished conversation.

    tokenizer: tokenizer of the reward model.
    pad: id of the model's padding token, or None if it has none. As in *ForSequenceClassification of
        transformers, the model treats this token as padding wherever it occurs, and the score is read at the
        last token that is not padding. If `pad` is None, the score is read at the very last token.
    """

    def __init__(self, tokenizer: PromptTokenizer, pad: int | None):
        self.tokenizer, self.pad = tokenizer, pad
        self._ending = tokenizer.after_response()

    def finished(self, response: np.ndarray) -> np.ndarray:
        """Append the end of a conversation to a response, so that a reward model reads its score at the end.

        The ending is the tokens that follow a response in a finished conversation, such as the end token. If
        the response already ends with the first part of the ending, only the rest is added. Padding tokens at
        the end are then removed, so the score is read at the last token of the result. If only padding would
        be left, the result is empty, and the score is read at the prompt's last token.

        response: int32 [R], token ids of the response. The result is int32 too.
        """
        have = next(
            (n for n in range(len(self._ending), 0, -1) if np.array_equal(response[-n:], self._ending[:n])), 0
        )
        whole = np.concatenate([response, self._ending[have:]]).astype(np.int32)
        counts = np.flatnonzero(whole != self.pad) if self.pad is not None else np.arange(len(whole))
        return whole[: counts[-1] + 1] if len(counts) else whole[:0]


def same_tokenizer(folder: str, other: str) -> bool:
    """Return True if both folders contain a tokenizer.json, with the same bytes."""
    files = Path(folder, _TOKENIZER), Path(other, _TOKENIZER)
    return all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes()


def conversations_of(reward_model: str, policy: str, data: DataConfig) -> Conversations:
    """Load the tokenizer of a reward model. Return it with the rules by which the model reads a conversation.

    If the reward model has the policy's tokenizer, data.chat_template is used. If it has another tokenizer,
    the chat template in the reward model's own folder is used, without data.chat_template_args, unless
    data.chat_template=none. The system prompt and the suffix of the configuration are not added, because the
    policy's prompts already contain them.

    reward_model: folder of the reward model.
    policy: folder of the policy model.
    data: section `data` of the configuration.

    Raises UserError if the reward model's tokenizer or chat template is missing.
    """
    try:
        if data.chat_template != NO_TEMPLATE and not same_tokenizer(reward_model, policy):
            if not load_tokenizer(reward_model).chat_template:
                raise UserError(
                    f"{reward_model}: the folder has no chat template, and data.chat_template does not "
                    "apply to it because its tokenizer differs from the policy's; put the template that "
                    "the reward model was trained with into the folder as chat_template.jinja"
                )
            data = replace(data, chat_template=FROM_TOKENIZER, chat_template_args={})
        # The policy's prompts already contain the system prompt and the suffix.
        data = replace(data, system_prompt=None, prompt_suffix="")
        return Conversations(PromptTokenizer(reward_model, data), stated_pad_token(reward_model))
    except UserError as error:
        raise UserError(f"reward.model.path: {error}") from error


def stated_pad_token(model_path: str) -> int | None:
    """Return pad_token_id from config.json in a model's folder, or None if the file does not state one."""
    return text_config(read_object(Path(model_path) / "config.json")).get("pad_token_id")


def pad_token(model_path: str) -> int | None:
    """Return the id of the padding token for a reward model that is trained from a checkpoint, or None.

    The id is the first of these three that exists: pad_token_id in config.json, the tokenizer's padding
    token, the tokenizer's end token. If none of them exists, the result is None. Training and scoring leave
    out this token at the end of a conversation.

    model_path: folder of the checkpoint.
    """
    stated = stated_pad_token(model_path)
    if stated is not None:
        return stated
    tokenizer = load_tokenizer(model_path)
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

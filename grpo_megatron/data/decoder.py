"""A light decoder of token ids, for processes that use a tokenizer for nothing else."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from grpo_megatron.files import read_object

# Text that transformers changes if a tokenizer is set to clean up spaces.
_UNCLEAN = "a , b . c ? d ! it 's we 're I 'm do n't"


class Decoder:
    """A decoder of token ids into text without end and padding tokens.

    Worker processes of rewards and environments get a pickled copy, which imports few modules. All other
    special tokens stay in the text: tags such as <think> or <tool_call> may be special tokens, and rewards
    look for them.
    """

    def __init__(self, tokenizer, left_out: Iterable[int]):
        """Build the decoder from a tokenizer.

        tokenizer: a tokenizer of transformers.
        left_out: ids of the end and padding tokens, which do not appear in texts.
        """
        # The compiled part of the tokenizer loads 100 times faster.
        self._tokenizer = tokenizer.backend_tokenizer if _adds_nothing(tokenizer) else tokenizer
        self._left_out = frozenset(left_out)

    def __call__(self, ids: np.ndarray) -> str:
        kept = [token_id for token_id in ids.tolist() if token_id not in self._left_out]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def end_tokens(tokenizer, model_path: str) -> set[int]:
    """Return the ids of the end and padding tokens.

    These are the tokenizer's own, and the end tokens in config.json and generation_config.json of the model's
    folder.
    """
    stated: list[int | None] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        value = read_object(path).get("eos_token_id") if path.is_file() else None
        stated += value if isinstance(value, list) else [value]
    # Some files state the id of an ordinary token by mistake. Such a token is part of the text.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id, *(special & {*stated})}
    return {token_id for token_id in found if token_id is not None}


def _adds_nothing(tokenizer) -> bool:
    """Return True if a tokenizer of transformers decodes exactly like its compiled part (`tokenizers`)."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return False
    if (
        kind.decode is not PreTrainedTokenizerFast.decode
        or kind._decode is not PreTrainedTokenizerFast._decode
    ):
        return False
    ids = [*tokenizer.encode(_UNCLEAN), *tokenizer.all_special_ids]
    return tokenizer.decode(ids) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)

"""A decoder of token ids that loads fast, for processes that only convert ids to text."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.files import read_object
from grpo_megatron.model.text_config import text_config

# Text that transformers changes if a tokenizer is set to clean up spaces.
_UNCLEAN = "a , b . c ? d ! it 's we 're I 'm do n't"


class Decoder:
    """A function that decodes token ids to text, without end and padding tokens.

    All other special tokens stay in the text, because tags such as <think> or <tool_call> may be special
    tokens, and rewards look for them. Worker processes of rewards and environments get a pickled copy of the
    decoder. It imports few modules, so the processes start fast.

    ends: ids of the end and padding tokens
    """

    def __init__(self, tokenizer, left_out: Iterable[int]):
        """Build the decoder from a tokenizer of transformers.

        left_out: ids of the end and padding tokens, which are left out of the text.
        """
        # The compiled part of the tokenizer loads 100 times faster.
        self._tokenizer = tokenizer.backend_tokenizer if _decodes_like_backend(tokenizer) else tokenizer
        self.ends = frozenset(left_out)

    def __call__(self, ids: np.ndarray) -> str:
        return self.whole([token_id for token_id in ids.tolist() if token_id not in self.ends])

    def whole(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including all special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def end_tokens(tokenizer, model_path: str) -> set[int]:
    """Return the ids of the tokens that end or pad a text.

    These are the end and padding tokens of the tokenizer, and the special tokens that config.json and
    generation_config.json in the model's folder state as end tokens (eos_token_id).
    """
    stated: list[int | None] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        value = text_config(read_object(path)).get("eos_token_id") if path.is_file() else None
        stated += value if isinstance(value, list) else [value]
    # Some files state the id of an ordinary token by mistake. Such a token is part of the text.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id, *(special & {*stated})}
    return {token_id for token_id in found if token_id is not None}


def _decodes_like_backend(tokenizer) -> bool:
    """Return True if a tokenizer decodes exactly like its compiled part, which can then be used alone.

    tokenizer: a tokenizer of transformers. Its compiled part is an object of the library `tokenizers`, and
        loads 100 times faster.
    """
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

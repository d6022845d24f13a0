"""Token ids into text, in processes that do nothing else with a tokenizer."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from grpo_megatron.json_files import read_object

# What transformers cleans up in a text, where a tokenizer is told to.
_UNCLEAN = "a , b . c ? d ! it 's we 're I 'm do n't"


class Decoder:
    """Makes text of token ids, without end and padding tokens.

    It can be sent to other processes, which then import little.

    All other special tokens stay: tags such as <think> or <tool_call> may be among them, and rewards look for
    these.
    """

    def __init__(self, tokenizer, left_out: Iterable[int]):
        """tokenizer: of transformers. left_out: ids of end and padding tokens."""
        # Its compiled part starts in a hundredth of the time.
        self._tokenizer = tokenizer.backend_tokenizer if _adds_nothing(tokenizer) else tokenizer
        self._left_out = frozenset(left_out)

    def __call__(self, ids: np.ndarray) -> str:
        kept = [number for number in ids.tolist() if number not in self._left_out]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


def end_tokens(tokenizer, model_path: str) -> set[int]:
    """Return the ids of the end and padding tokens that the tokenizer and the files of the model name."""
    stated: list[int | None] = []
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        value = read_object(path).get("eos_token_id") if path.is_file() else None
        stated += value if isinstance(value, list) else [value]
    # Some files state the id of an ordinary token by mistake, which belongs to the text.
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found = {tokenizer.eos_token_id, tokenizer.pad_token_id, *(special & {*stated})}
    return {number for number in found if number is not None}


def _adds_nothing(tokenizer) -> bool:
    """Whether the texts of this tokenizer of transformers are those of its compiled part."""
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

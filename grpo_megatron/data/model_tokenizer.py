"""Loading of the tokenizer in a model's folder, and the size of the model's vocabulary."""

from pathlib import Path

from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object
from grpo_megatron.model.text_config import text_config


def load_tokenizer(model_path: str):
    """Load the tokenizer in a model's folder. Return an object of transformers.

    Raises UserError if the folder has no tokenizer, or if the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    if not Path(model_path).is_dir():
        raise UserError(f"{model_path} is not a folder; it must be a model folder with a tokenizer")
    try:
        # Without this argument, transformers asks on the terminal whether to run a checkpoint's code.
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    except Exception as error:  # the library raises many kinds of errors
        reason = (str(error).strip().splitlines() or [""])[0]
        advice = "copy the model's tokenizer files into this folder again"
        if _is_code(model_path):
            advice = (
                "the tokenizer is Python code in the checkpoint (auto_map in tokenizer_config.json), which "
                "is never run here; make a tokenizer.json of it, see docs/adding-a-model.md#kimi-k2"
            )
        raise UserError(
            f"{model_path}: the tokenizer cannot be loaded ({type(error).__name__}: {reason}); {advice}"
        ) from error
    # If a folder has no tokenizer files, the library creates an empty tokenizer of the model's type.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise UserError(
            f"{model_path} has no tokenizer (tokenizer.json, or another tokenizer file); copy the tokenizer "
            "files of the model into this folder"
        )
    return tokenizer


def _is_code(model_path: str) -> bool:
    path = Path(model_path) / "tokenizer_config.json"
    return path.is_file() and bool(read_object(path).get("auto_map"))


def vocab_size(model_path: str, tokenizer) -> int:
    """Return the number of tokens in a model's vocabulary.

    It is vocab_size in config.json, or the size of the tokenizer's vocabulary if the folder has no
    config.json. A model may have more tokens than its tokenizer, because embeddings are padded to convenient
    sizes.

    model_path: folder of the model.
    tokenizer: the model's tokenizer, an object of transformers.

    Raises UserError if the model has fewer tokens than its tokenizer.
    """
    needed = max(tokenizer.get_vocab().values()) + 1
    config = Path(model_path) / "config.json"
    size = text_config(read_object(config)).get("vocab_size", needed) if config.is_file() else needed
    if needed > size:
        beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= size)
        names = ", ".join(repr(token) for _, token in beyond[:5]) + (", ..." if len(beyond) > 5 else "")
        raise UserError(
            f"{model_path}: the tokenizer has {needed} tokens, but the model has only {size} (vocab_size of "
            f"its config.json), so it cannot embed {names}; use the tokenizer that belongs to the model, or "
            "enlarge the model's embedding with resize_token_embeddings"
        )
    return size

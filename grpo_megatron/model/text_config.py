"""The part of a config.json that describes the language model. Nothing here imports torch."""

from typing import Any

from grpo_megatron.errors import UserError

# As in transformers, these are settings of a whole model with a vision model, not of its language model.
_OF_WHOLE_MODEL = ("tie_word_embeddings", "quantization_config")
# Settings that apply to both models, unless the language model has its own. Gemma 3's files have them there.
_OF_BOTH = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model's language model, {key: value}.

    They are the contents of config.json, unless the model also has a vision model: then they are in the
    object `text_config`.

    config: the contents of config.json.

    Raises UserError if text_config is not an object.
    """
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, dict):
        raise UserError(f"text_config must be an object, but is of type {type(text).__name__}")
    shared = {key: config[key] for key in _OF_BOTH if text.get(key) is None and key in config}
    own = {key: value for key, value in text.items() if key not in _OF_WHOLE_MODEL}
    return own | shared | {key: config[key] for key in _OF_WHOLE_MODEL if key in config}

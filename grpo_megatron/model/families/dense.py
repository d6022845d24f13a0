"""Families of dense models that differ from each other only in a few settings of the common decoder."""

from functools import partial
from typing import Any

from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _dense(name: str, architecture: str, defaults: dict[str, Any], **differences: Any) -> Family:
    """Return a family whose layers are the same as Llama's, except for `differences`.

    name: common name of the family.
    architecture: name of the transformers class.
    defaults: {key: value} for keys that config.json may lack.
    differences: keyword arguments of reading.decoder, such as qk_norm=True.
    """
    return Family(
        name,
        architecture,
        read=partial(reading.decoder, family=name, **differences),
        entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp),
        defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-6, **defaults},
    )


# Llama 2 and 3.x (arXiv:2407.21783).
LLAMA = _dense("llama", "LlamaForCausalLM", {"max_position_embeddings": 2048})

# Mistral (arXiv:2310.06825): a sliding window in every layer.
MISTRAL = _dense(
    "mistral",
    "MistralForCausalLM",
    {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    windows=reading.window_of_all_layers,
)

# Qwen2 and Qwen2.5 (arXiv:2407.10671): a bias on queries, keys and values.
QWEN2 = _dense(
    "qwen2",
    "Qwen2ForCausalLM",
    {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    windows=reading.window_by_layer,
)

# Qwen3 (arXiv:2505.09388): queries and keys are normed.
QWEN3 = _dense(
    "qwen3",
    "Qwen3ForCausalLM",
    {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qk_norm=True,
    windows=reading.window_by_layer,
)

"""Gemma 3 (arXiv:2503.19786): norms after attention and MLP, two rotary embeddings, GELU.

Of a model that also has a vision model, only the language model is trained.
"""

from dataclasses import replace
from math import sqrt

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.arrangement import UndividedVocab
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _rotary(config: Fields) -> tuple[Fields, float]:
    """Return config.json with the rotary embedding of layers without windows, and the base of the others.

    transformers 5 writes one object for each type of layers. Older versions write rope_local_base_freq for
    layers with windows.

    Raises UserError if the rotary embedding of layers with windows is scaled.
    """
    parameters = config.object("rope_parameters")
    if parameters is None or reading.FULL not in parameters.nested:
        return config, config.number("rope_local_base_freq")
    local = parameters.object(reading.SLIDING) or Fields({})
    if local.text("rope_type", "default") != "default":
        raise UserError(f"rope_parameters.{reading.SLIDING} must have the rope_type default")
    whole = {"rope_parameters": parameters.object(reading.FULL).values()}
    return config.replaced(whole), local.number("rope_theta")


def _windows(config: Fields) -> tuple[int | None, ...]:
    count, every = reading.num_layers(config), config.integer("sliding_window_pattern")
    types = [reading.SLIDING if (layer + 1) % every else reading.FULL for layer in range(count)]
    return reading.windows_by_type(config, config.integer("sliding_window"), types)


def _read(config: Fields) -> Architecture:
    activation = config.text("hidden_activation", None)
    if activation != "gelu_pytorch_tanh":
        raise UserError(f"hidden_activation={shortened(activation)} is not supported")
    for key in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.number(key, None) is not None:
            raise UserError(f"{key} is not supported; it must be absent or null")
    if config.flag("use_bidirectional_attention", False):
        raise UserError("use_bidirectional_attention must be false")
    config, local_theta = _rotary(config)
    arch = reading.decoder(config, "gemma3", qk_norm=True, windows=_windows)
    return replace(
        arch,
        engine_has_windows=True,
        local_rope_theta=local_theta,
        query_scalar=config.number("query_pre_attn_scalar"),
        output_norms=True,
        gelu=True,
        embedding_factor=sqrt(arch.hidden_size),
        zero_centred_norms=True,
    )


def _entries(arch: Architecture) -> list[Entry]:
    """Return the weight map entries of a model: how each parameter is named and sharded."""
    entries = blocks.decoder(arch, attention=blocks.attention, mlp=blocks.mlp)
    whole = {"kind": UndividedVocab(), "engine_axis": None}
    return [
        replace(entry, **whole) if entry.engine == "model.embed_tokens.weight" else entry for entry in entries
    ]


FAMILY = Family(
    "gemma3",
    "Gemma3ForCausalLM",
    read=_read,
    entries=_entries,
    defaults={
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        # The published files with a vision model lack these sizes if they are those of 4B.
        "num_attention_heads": 8,
        "vocab_size": 262208,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    has_classifier=False,
    vision_architecture="Gemma3ForConditionalGeneration",
)

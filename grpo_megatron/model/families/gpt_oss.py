"""gpt-oss (arXiv:2508.10925): sinks and alternating sliding windows in attention, experts with biases."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.model.architecture import SWIGLU_ALPHA, Architecture
from grpo_megatron.model.arrangement import InterleavedGateUp, OfFirstRank, Plain
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry, Expert
from grpo_megatron.model.families import blocks, reading
from grpo_megatron.model.families.family import Family


def _windows(config: Fields) -> tuple[int | None, ...]:
    count = reading.num_layers(config)
    alternating = [reading.FULL if layer % 2 else reading.SLIDING for layer in range(count)]
    return reading.windows_by_type(config, config.integer("sliding_window"), alternating)


def _read(config: Fields) -> Architecture:
    if not config.flag("attention_bias", True):
        raise UserError("attention_bias must be true; other values are not supported")
    alpha = config.number("swiglu_alpha", SWIGLU_ALPHA)
    if alpha != SWIGLU_ALPHA:
        raise UserError(
            f"swiglu_alpha={alpha:g} is not supported, because SGLang only computes {SWIGLU_ALPHA}"
        )
    moe = reading.experts_in_all_layers(config, swiglu_limit=config.number("swiglu_limit"))
    arch = reading.decoder(config, "gpt_oss", qkv_bias=True, windows=_windows, moe=moe)
    return replace(arch, sinks=True, linear_bias=True, engine_has_windows=True)


def _experts(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Return the weight map entries of one layer's router and experts, with their biases.

    An entry says how a parameter is named and sharded in HF, Megatron and the engine. HF's files have all
    experts of a layer in one tensor, see weights.stacked_experts.

    hf, megatron: name of the layer in HF and in Megatron.
    """
    count = arch.moe.num_experts
    router = f"{hf}.mlp.router", f"{megatron}.mlp.router"
    found = [
        blocks.same(f"{router[0]}.weight", (count, arch.hidden_size), f"{router[1]}.weight", None),
        blocks.same(f"{router[0]}.bias", (count,), f"{router[1]}.bias", None),
    ]
    for index in range(count):
        found += _expert(arch, Expert(index, count), f"{hf}.mlp.experts", f"{megatron}.mlp.experts")
    return found


def _expert(arch: Architecture, expert: Expert, hf: str, megatron: str) -> Iterator[Entry]:
    """Yield the weight map entries of one expert. hf, megatron: name of the layer's experts in each."""
    hidden, ffn = arch.hidden_size, arch.moe.ffn_hidden_size
    ours = f"{megatron}.local_experts.{expert.index}"
    of_kind = {"weight": ((ffn, hidden), (hidden, ffn)), "bias": ((ffn,), (hidden,))}
    for kind, (into, out_of) in of_kind.items():
        gate, up, down = (f"{hf}.{expert.index}.{name}_proj.{kind}" for name in ("gate", "up", "down"))
        # SGLang computes with float32 biases, whatever the dtype of the weights.
        names, dtype = ("weight", None) if kind == "weight" else ("weight_bias", torch.float32)
        yield Entry(
            hf=(gate, up),
            shapes=(into, into),
            megatron=f"{ours}.linear_fc1.{kind}",
            axis=0,
            engine=f"{hf}.w13_{names}",
            engine_axis=0,
            kind=InterleavedGateUp(),
            expert=expert,
            engine_dtype=dtype,
        )
        axis = 1 if kind == "weight" else None  # every rank has the whole bias
        yield Entry(
            hf=(down,),
            shapes=(out_of,),
            megatron=f"{ours}.linear_fc2.{kind}",
            axis=axis,
            engine=f"{hf}.w2_{names}",
            engine_axis=axis,
            kind=Plain() if kind == "weight" else OfFirstRank(),
            expert=expert,
            engine_dtype=dtype,
        )


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    read=_read,
    entries=partial(blocks.decoder, attention=blocks.attention, mlp=blocks.mlp, experts=_experts),
    defaults={
        "torch_dtype": "bfloat16",  # the published config.json names none
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
)

"""Reading and weight map of gated delta networks, which Qwen3-Next and Qwen3.5 share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.model.architecture import Architecture, DeltaNet
from grpo_megatron.model.arrangement import Sections
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import EngineShare, Entry
from grpo_megatron.model.families import blocks, reading

_RECURRENT, _FULL = "linear_attention", "full_attention"

# A section of Megatron's input projection: see entries.Sections.
Section = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Projections:
    """The input projections of a gated delta network.

    hf: {name of HF's projection: shape}.
    sections: sections of Megatron's projection, which consists of all of HF's.
    engine: {name of the engine's projection: (names of HF's projections in it, its sections of them)}.
    """

    hf: dict[str, tuple[int, int]]
    sections: tuple[Section, ...]
    engine: dict[str, tuple[tuple[str, ...], tuple[Section, ...]]]


def hybrid(config: Fields, arch: Architecture) -> Architecture:
    """Return the architecture of a model with gated delta networks in some layers.

    Its attention has an output gate, and its norms multiply by 1 + weight.

    config: the model's config.json.
    arch: what `reading.decoder` has read from it.

    Raises UserError for settings that are not supported.
    """
    if not config.flag("attn_output_gate", True):
        raise UserError("attn_output_gate=false is not supported; attention must have an output gate")
    delta = DeltaNet(
        key_heads=config.integer("linear_num_key_heads"),
        value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        layers=_layers(config),
    )
    if delta.value_heads % delta.key_heads:
        raise UserError(
            f"linear_num_value_heads={delta.value_heads} is not divisible by "
            f"linear_num_key_heads={delta.key_heads}"
        )
    return replace(arch, delta=delta, output_gate=True, zero_centred_norms=True)


def _layers(config: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it is a gated delta network.

    As in transformers, layer_types comes first. Without it, every full_attention_interval-th layer has
    attention.
    """
    count, kinds = reading.num_layers(config), config.texts("layer_types")
    if not kinds:
        every = config.integer("full_attention_interval", 4)
        return tuple((layer + 1) % every != 0 for layer in range(count))
    unknown = sorted(set(kinds) - {_RECURRENT, _FULL})
    if unknown or len(kinds) != count:
        raise UserError(
            f"layer_types must name {_RECURRENT} or {_FULL} for each of the {count} layers, but has "
            f"{len(kinds)} items" + (f" with {', '.join(map(shortened, unknown))}" if unknown else "")
        )
    return tuple(kind == _RECURRENT for kind in kinds)


def entries(projections: Callable[[DeltaNet, int], Projections]) -> blocks.Block:
    """Return a function that makes the weight map entries of a gated delta network and of the layer's norms.

    The function takes an architecture, HF's name of the layer and Megatron's name of it. An entry says how a
    parameter is named and sharded in HF, Megatron and the engine.

    projections: function of the dimensions and the hidden size that returns the input projections.
    """

    def block(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
        delta, hidden = arch.delta, arch.hidden_size
        theirs, ours = f"{hf}.linear_attn", f"{megatron}.self_attention"
        projected = projections(delta, hidden)
        convolved = (2 * delta.key_rows + delta.value_rows, 1, delta.kernel)

        def weights(names: Iterable[str]) -> tuple[str, ...]:
            return tuple(f"{theirs}.{name}.weight" for name in names)

        inputs = Entry(
            weights(projected.hf),
            tuple(projected.hf.values()),
            f"{ours}.in_proj.weight",
            0,
            "",
            None,
            Sections(projected.sections),
            engine_shares=tuple(
                EngineShare(*weights([name]), weights(names), Sections(sections))
                for name, (names, sections) in projected.engine.items()
            ),
        )

        def same(name: str, shape: tuple[int, ...], megatron_name: str, axis: int | None) -> Entry:
            return blocks.same(f"{theirs}.{name}", shape, f"{ours}.{megatron_name}", axis)

        before, after = blocks.layer_norms(arch, hf, megatron)
        return [
            before,
            inputs,
            replace(
                same("conv1d.weight", convolved, "conv1d.weight", 0), kind=Sections(query_key_value(delta))
            ),
            same("dt_bias", (delta.value_heads,), "dt_bias", 0),
            # SGLang computes decays from a float32 parameter.
            replace(same("A_log", (delta.value_heads,), "A_log", 0), engine_dtype=torch.float32),
            same("norm.weight", (delta.value_dim,), "out_norm.weight", None),
            same("out_proj.weight", (hidden, delta.value_rows), "out_proj.weight", 1),
            after,
        ]

    return block


def attention(arch: Architecture, hf: str, megatron: str) -> list[Entry]:
    """Return what `blocks.attention` returns, with SGLang's names: its layers have no module self_attn."""
    entries = blocks.attention(arch, hf, megatron)
    return [replace(entry, engine=entry.engine.replace(".self_attn.", ".")) for entry in entries]


def query_key_value(delta: DeltaNet) -> tuple[Section, Section, Section]:
    """Return the sections of a tensor whose rows are all queries, then all keys, then all values."""
    keys = delta.key_rows
    return ((0, 0, keys),), ((0, keys, keys),), ((0, 2 * keys, delta.value_rows),)

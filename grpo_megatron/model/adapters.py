"""LoRA adapters in the weight map: two more entries for each matrix that has an adapter.

An adapted layer computes y = W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]. In Megatron,
`linear.lora_a` and `linear.lora_b` belong to `linear.weight`. PEFT has its own pair A, B for each HF tensor
that Megatron fuses into W.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.arrangement import Plain, stacked
from grpo_megatron.model.entries import Entry
from grpo_megatron.model.families import weight_map

A, B = ".lora_a", ".lora_b"
# Megatron layers that can have an adapter.
_ADAPTABLE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.in_proj",
    "self_attention.out_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def is_adapter(megatron: str) -> bool:
    return megatron.endswith((A, B))


class Content(Enum):
    """The weights that a weight sync sends.

    merged: all weights of the model. If it has LoRA adapters, they are added to the weights.
    base: all weights of the model, without its adapters.
    adapter: only the LoRA adapters, which the engines apply to the base.
    """

    merged = "merged"
    base = "base"
    adapter = "adapter"


@dataclass(frozen=True)
class Shared(Plain):
    """Layout of a Megatron tensor that corresponds to several identical HF tensors.

    An example is the LoRA matrix A of a fused layer such as QKV: Megatron has one matrix, and PEFT's files
    have a copy of it for each of q, k and v. SGLang has these copies one below the other.
    """

    def engine_shape(self, shapes, axis, parts):
        rows, columns = self.shape(shapes, axis, parts)
        return (len(shapes) * rows, columns)

    def engine_pieces(self, hf, shapes, axis, parts, rank):
        return stacked(self.pieces(hf, shapes, axis, parts, rank))

    def pieces(self, hf, shapes, axis, parts, rank):
        return [
            piece for name in hf for piece in super(Shared, self).pieces((name,), shapes, axis, parts, rank)
        ]


def adapter_entries(entries: Iterable[Entry], config: LoraConfig) -> dict[str, Entry]:
    """Return {Megatron name: weight map entry} of the matrices A and B of every LoRA adapter.

    An entry says how Megatron's parameter corresponds to PEFT's tensors, and to the matrices of an engine
    that serves the adapter. Layers that cannot have an adapter are skipped; `without_adapter` reports them.
    The result is empty if config.rank is 0.

    entries: all entries of the model's weight map, which say how each parameter is named and sharded.
    """
    found = {}
    for entry in entries if config.rank else ():
        if not _is_target(entry, config.targets) or _layer(entry) not in _ADAPTABLE:
            continue
        module, inputs = entry.megatron.removesuffix(".weight"), entry.shapes[0][1]
        engine = entry.engine.removesuffix(".weight")
        a_shapes = ((config.rank, inputs),) * len(entry.hf)
        b_shapes = tuple((rows, config.rank) for rows, _ in entry.shapes)
        by_columns = 1 if entry.axis == 1 else None
        by_rows = 0 if entry.axis == 0 else None
        # The engine splits the matrices along the same axes as Megatron.
        a = Entry(
            _peft(entry, "A"), a_shapes, f"{module}{A}", by_columns, f"{engine}{A}", by_columns, Shared()
        )
        b = Entry(_peft(entry, "B"), b_shapes, f"{module}{B}", by_rows, f"{engine}{B}", by_rows, entry.kind)
        found |= {a.megatron: a, b.megatron: b}
    return found


def without_adapter(arch: Architecture, config: LoraConfig) -> list[str]:
    """Return one error message for each name in megatron.lora.targets whose layers cannot have adapters.

    Names of layers that the model does not have are reported too. A model with latent attention cannot have
    any adapters, so the list then has a single message. The list is empty if all targets are possible.
    """
    if arch.latent is not None:
        return [
            "megatron.lora.rank: this model uses multi-head latent attention (MLA), whose layers cannot have "
            "adapters; leave megatron.lora.rank out"
        ]
    entries = weight_map(arch).values()
    there = {target: [e for e in entries if _is_target(e, [target])] for target in config.targets}
    found = []
    for target, layers in there.items():
        if not layers:
            found.append(
                f"megatron.lora.targets: this model has no layer {target} outside its experts; remove "
                f"{target}"
            )
        elif any(entry.expert for entry in layers):
            found.append(
                f"megatron.lora.targets: {target} belongs to the experts of this model, which cannot have "
                "adapters; remove it"
            )
        elif any(_layer(entry) not in _ADAPTABLE for entry in layers):
            found.append(
                f"megatron.lora.targets: {target} of this model is {layers[0].megatron}, which cannot have "
                "an adapter; remove it"
            )
    return found


def _is_target(entry: Entry, targets: Iterable[str]) -> bool:
    """Return True if a weight map entry is the weight of a layer whose HF name is in `targets`.

    targets: names of layers, such as `q_proj`.
    """
    return entry.hf[0].endswith(".weight") and any(hf.split(".")[-2] in targets for hf in entry.hf)


def _layer(entry: Entry) -> str:
    """Return the Megatron module of a weight map entry, named within its layer, such as `mlp.linear_fc1`."""
    return ".".join(entry.megatron.split(".")[3:-1])


def _peft(entry: Entry, matrix: str) -> tuple[str, ...]:
    return tuple(f"base_model.model.{hf.removesuffix('.weight')}.lora_{matrix}.weight" for hf in entry.hf)

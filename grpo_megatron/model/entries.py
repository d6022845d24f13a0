"""Weight map entries: how each parameter is named, arranged and sharded in HF, Megatron and the engine.

Import, export, weight sync, reference weights and conversion all use these entries.
"""

from dataclasses import dataclass
from math import prod

import torch

from grpo_megatron.config.engine import EngineConfig, Quantization
from grpo_megatron.model.arrangement import Plain
from grpo_megatron.model.pieces import Piece, Shape


@dataclass(frozen=True)
class EngineLayout:
    """Division of a model over the ranks of one SGLang engine.

    tp: number of ranks of the engine.
    ep: number of parts into which a layer's experts are divided. The tp / ep ranks of a part split each of
        its experts.
    attention_dp: number of groups of neighbouring ranks for data-parallel attention. Each group has a copy of
        the attention layers and the token embedding, split over the tp / attention_dp ranks of the group.
    fp8: True if linear layers have FP8 weights with scales, see model.block_scaled.
    """

    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    fp8: bool = False

    @classmethod
    def from_config(cls, engine: EngineConfig) -> "EngineLayout":
        fp8 = engine.quantization == Quantization.fp8
        return cls(engine.tensor_parallel, engine.expert_parallel, engine.data_parallel_attention, fp8)

    @property
    def attention_tp(self) -> int:
        return self.tp // self.attention_dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep


@dataclass(frozen=True)
class Expert:
    """Identity of one expert of a layer.

    index: index of the expert within the layer, from 0.
    count: number of experts in the layer.
    """

    index: int
    count: int


@dataclass(frozen=True)
class EngineShare:
    """A parameter of the engine that consists of some of the HF tensors of a Megatron parameter.

    engine: name of the engine's parameter.
    hf, kind: names of these HF tensors, and how they are arranged in the engine's parameter.
    """

    engine: str
    hf: tuple[str, ...]
    kind: Plain


@dataclass(frozen=True)
class Entry:
    """One entry of the weight map: a Megatron parameter with its counterparts in HF and in the engine.

    "HF" is the Hugging Face checkpoint, "engine" is SGLang. An entry has the parameter's names, and says how
    the parameter is arranged and split over ranks.
    """

    hf: tuple[str, ...]
    """Names of the HF tensors of which the Megatron parameter consists."""
    shapes: tuple[Shape, ...]
    """Full shape of each of these HF tensors."""
    megatron: str
    """Megatron's name of the parameter, with the layer and expert indices of the whole model."""
    axis: int | None
    """Axis that Megatron splits over TP ranks, or, for an expert, expert-TP ranks; None: not split."""
    engine: str
    """Name of the engine's parameter."""
    engine_axis: int | None
    """Axis that the engine splits over its ranks; None: not split."""
    kind: Plain = Plain()
    """How the HF tensors are arranged in Megatron's and the engine's parameter."""
    exported: bool = True
    """True if the parameter is written to checkpoints and sent to engines. False for a second copy, such as
    the tied embedding on the last pipeline stage."""
    expert: Expert | None = None
    """The expert to which the parameter belongs, or None. In the engine, all experts of a layer are stacked
    in one parameter."""
    engine_row: int = 0
    """First row within the engine's parameter, if several Megatron parameters share it."""
    float32: bool = False
    """True for a buffer that is float32 everywhere, whatever the dtype of the parameters."""
    attention: bool = False
    """True if the engine divides the parameter like attention layers, over the attention_tp ranks of
    EngineLayout."""
    engine_dtype: torch.dtype | None = None
    """Dtype of the parameter in the engine; None: the dtype in which the engine computes."""
    engine_shares: tuple[EngineShare, ...] = ()
    """The engine's parameters, if it has several for this one: see model.engine_entries."""

    def megatron_shape(self, parts: int) -> Shape:
        """Return the shape that each shard of this parameter has in Megatron.

        parts: number of shards.
        """
        return self.kind.shape(self.shapes, self.axis, parts)

    def megatron_pieces(self, parts: int, rank: int) -> list[Piece]:
        """Return the rectangles of HF tensors that make up one shard of this parameter in Megatron.

        Rows of the shard that no rectangle covers are padding.

        parts: number of shards.
        rank: index of the shard, from 0.
        """
        return self.kind.pieces(self.hf, self.shapes, self.axis, parts, rank)

    def engine_shape(self, layout: EngineLayout) -> Shape:
        """Return the shape that the engine's counterpart of this parameter has on each engine rank.

        For an expert, the counterpart is a stack of the layer's experts, and the first dimension counts the
        experts on the rank. If several Megatron parameters lie one below the other in the counterpart, the
        returned shape has only the rows up to the last row of this parameter.

        layout: division of the model over the engine's ranks.
        """
        rows, *rest = self.kind.engine_shape(self.shapes, self.engine_axis, self.engine_parts(layout))
        if self.expert:
            return (self.expert.count // layout.ep, rows, *rest)
        return (self.engine_row + rows, *rest)

    def engine_pieces(self, layout: EngineLayout, rank: int) -> list[Piece]:
        """Return the rectangles of HF tensors that make up an engine rank's part of this parameter.

        Each piece also has the position of its rectangle in the engine's parameter. The list is empty for an
        expert that is on other ranks.

        layout: division of the model over the engine's ranks.
        rank: index of the rank in the engine.
        """
        parts = self.engine_parts(layout)
        if self.expert is None:
            pieces = self.kind.engine_pieces(self.hf, self.shapes, self.engine_axis, parts, rank % parts)
            return [Piece(p.hf, p.start, p.shape, (self.engine_row + p.at[0], *p.at[1:])) for p in pieces]
        ep_rank, part = divmod(rank, parts)
        holder, index = divmod(self.expert.index, self.expert.count // layout.ep)
        if holder != ep_rank:
            return []
        pieces = self.kind.engine_pieces(self.hf, self.shapes, self.engine_axis, parts, part)
        return [Piece(p.hf, p.start, p.shape, (index, *p.at)) for p in pieces]

    def engine_parts(self, layout: EngineLayout) -> int:
        """Return the number of shards into which the engine splits this parameter.

        The parameter of an expert is split only over the ranks that share this expert.

        layout: division of the model over the engine's ranks.
        """
        if self.expert:
            return layout.moe_tp
        return layout.attention_tp if self.attention else layout.tp

    @property
    def numel(self) -> int:
        """Number of elements of this parameter: of all its HF tensors together, without padding."""
        return sum(prod(shape) for shape in self.shapes)


def hf_shapes(entries: dict[str, Entry]) -> dict[str, Shape]:
    """Return {HF name: full shape} of all tensors that a Hugging Face checkpoint of the model must have.

    entries: weight map of the model, {Megatron name: entry}. An entry has the names and shapes of HF tensors.
    """
    return {
        name: shape for entry in entries.values() for name, shape in zip(entry.hf, entry.shapes, strict=True)
    }

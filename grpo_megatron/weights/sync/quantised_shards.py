"""On-demand FP8 quantisation of a trainer rank's linear weights, for engines in FP8."""

from collections.abc import Iterator, Mapping

import torch

from grpo_megatron.model.block_scaled import elements_name, scales_name
from grpo_megatron.model.pieces import Move
from grpo_megatron.weights.fp8_blocks import quantise


class QuantisedShards(Mapping):
    """Mapping {name: tensor} of a trainer rank's shards that quantises linear weights when they are read.

    A weight sync to FP8 engines reads the weights from this mapping. It contains every shard under its
    Megatron name. For each linear weight it also contains the FP8 elements and the scales, under the names
    that `elements_name` and `scales_name` (model.block_scaled) return. Reading either of the two quantises
    the weight. Only the last quantised weight is cached, because a sync reads slices of one parameter many
    times in a row. Reading raises ValueError if the weight contains NaN or infinity.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], orders: dict[str, list[Move]]):
        """Wrap the shards of a rank.

        parameters: {Megatron name: shard}.
        orders: {Megatron name: copies that reorder the shard's rows before quantisation} of each linear
            weight, the result of ReshardPlan.quantised for this rank.
        """
        self._parameters, self._orders = parameters, orders
        self._sources = {name(weight): weight for weight in orders for name in (elements_name, scales_name)}
        self._source, self._kept = "", {}

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources.get(name)
        if source is None:
            return self._parameters[name]
        if source != self._source:
            self._source, self._kept = "", {}
            self._kept, self._source = self._quantise(source), source
        return self._kept[name]

    def _quantise(self, name: str) -> dict[str, torch.Tensor]:
        weight = self._parameters[name]
        in_order = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        for move in self._orders[name]:
            move.target(in_order).copy_(move.source(weight))
        try:
            elements, scales = quantise(in_order)
        except ValueError as error:
            raise ValueError(f"{name} cannot be quantised for the engines: {error}") from error
        return {elements_name(name): elements, scales_name(name): scales}

    def __iter__(self) -> Iterator[str]:
        return iter([*self._parameters, *self._sources])

    def __len__(self) -> int:
        return len(self._parameters) + len(self._sources)

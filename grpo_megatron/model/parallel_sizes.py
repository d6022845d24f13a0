"""Parallel sizes of the trainer: how its ranks share the model and the samples.

The rules in preflight.layout decide which sizes are legal.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Any

from grpo_megatron.config.schema import MegatronConfig


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes of the trainer: how its tp * pp * dp * cp ranks share the model and the samples."""

    tp: int = 1
    """Number of tensor-parallel ranks."""
    pp: int = 1
    """Number of pipeline stages."""
    dp: int = 1
    """Number of data-parallel replicas."""
    cp: int = 1
    """Number of context-parallel ranks."""
    sequence_parallel: bool = False
    """True if activations are split over the tensor-parallel ranks between the matrix products."""
    vpp: int = 1
    """Number of model chunks per pipeline stage, between which the interleaved schedule alternates."""
    ep: int = 1
    """Number of expert-parallel ranks, among which a layer's experts are divided."""
    etp: int = 1
    """Number of expert-tensor-parallel ranks, which split each expert."""
    pipeline_layers: tuple[int, ...] | None = None
    """Number of layers in each of the pp * vpp chunks, in forward order; None: the same number in each."""

    @classmethod
    def from_config(cls, megatron: MegatronConfig) -> "ParallelSizes":
        return cls(
            tp=megatron.tensor_parallel,
            pp=megatron.pipeline_parallel,
            dp=megatron.data_parallel,
            cp=megatron.context_parallel,
            sequence_parallel=megatron.sequence_parallel,
            vpp=megatron.virtual_pipeline,
            ep=megatron.expert_parallel,
            etp=megatron.expert_tensor_parallel,
            pipeline_layers=tuple(megatron.pipeline_layers) if megatron.pipeline_layers else None,
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the section megatron that give these sizes: {key: value}.

        This is the inverse of `from_config`.
        """
        return {
            "tensor_parallel": self.tp,
            "pipeline_parallel": self.pp,
            "data_parallel": self.dp,
            "context_parallel": self.cp,
            "sequence_parallel": self.sequence_parallel,
            "virtual_pipeline": self.vpp,
            "expert_parallel": self.ep,
            "expert_tensor_parallel": self.etp,
            "pipeline_layers": list(self.pipeline_layers or ()),
        }

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_chunks(self) -> int:
        """Number of model chunks over all pipeline stages."""
        return self.pp * self.vpp

    @property
    def micro_batch_multiple(self) -> int:
        """Number that each data-parallel replica's number of micro-batches must be divisible by.

        For the interleaved pipeline schedule this is the number of pipeline stages. For other schedules it
        is 1.
        """
        return self.pp if self.vpp > 1 else 1

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the number of layers in each model chunk, in forward order.

        The numbers are the configured ones (`pipeline_layers`), or equal shares of `num_layers` if none are
        configured. Chunk i is on pipeline stage i % pp.

        num_layers: number of layers of the whole model.
        """
        return self.pipeline_layers or (num_layers // self.num_chunks,) * self.num_chunks

    def stage_layers(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Return the indices of the layers on each pipeline stage, in increasing order.

        num_layers: number of layers of the whole model.
        """
        stages, layers = [[] for _ in range(self.pp)], iter(range(num_layers))
        for chunk, count in enumerate(self.chunk_layers(num_layers)):
            stages[chunk % self.pp] += islice(layers, count)
        return tuple(map(tuple, stages))

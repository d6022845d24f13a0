"""Sizes of the parallel groups that the trainer's ranks form; preflight.layout says which of them are legal."""

from dataclasses import dataclass

from grpo_megatron.config.schema import MegatronConfig


@dataclass(frozen=True)
class ParallelSizes:
    """How the trainer's ranks are divided; everything else is derived from these.

    tp, pp, dp, cp: tensor, pipeline, data and context parallel; their product is the world. vpp:
    model chunks per pipeline stage, which the interleaved schedule alternates between. ep, etp:
    expert and expert-tensor parallel; experts are laid over the same ranks in their own way.
    pipeline_layers: layers of each of the pp * vpp chunks in forward order; None: equally many.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    pipeline_layers: tuple[int, ...] | None = None

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

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def num_chunks(self) -> int:
        """Model chunks over all stages."""
        return self.pp * self.vpp

    @property
    def micro_batch_multiple(self) -> int:
        """The number of micro-batches of a replica must be a multiple of this."""
        return self.pp if self.vpp > 1 else 1

    def chunk_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of each model chunk in forward order; chunk i is on stage i % pp."""
        return self.pipeline_layers or (num_layers // self.num_chunks,) * self.num_chunks

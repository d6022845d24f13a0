"""TrainerRanks computes which trainer rank has which shard of a parameter, without a running trainer."""

from dataclasses import dataclass

from grpo_megatron.model.entries import Entry
from grpo_megatron.model.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class TrainerRanks:
    """Megatron's assignment of parameter shards to trainer ranks. It tells who sends what in a weight sync.

    In the numbering of ranks, the tensor-parallel rank varies fastest, then the context-, the data- and the
    pipeline-parallel rank. For experts, the expert-tensor-parallel rank varies fastest, then the expert-, the
    data- and the pipeline-parallel rank.

    sizes: the trainer's parallel sizes.
    num_layers: number of layers of the model.
    """

    sizes: ParallelSizes
    num_layers: int

    def stage(self, entry: Entry) -> int:
        """Return the index of the pipeline stage that has this parameter.

        entry: the parameter, with its names and its sharded axis.
        Raises ValueError if the parameter is in a layer that the model does not have.
        """
        if entry.megatron.startswith("embedding."):
            return 0
        if not entry.megatron.startswith("decoder.layers."):
            return self.sizes.pp - 1
        layer = int(entry.megatron.split(".", 3)[2])
        for chunk, layers in enumerate(self.sizes.chunk_layers(self.num_layers)):
            if layer < layers:
                return chunk % self.sizes.pp
            layer -= layers
        raise ValueError(
            f"{entry.megatron} does not exist, because the model has only {self.num_layers} layers"
        )

    def shards(self, entry: Entry) -> int:
        """Return the number of shards that tensor parallelism divides a parameter into; 1: not divided.

        entry: the parameter, with its names and its sharded axis.
        """
        if entry.axis is None:
            return 1
        return self.sizes.etp if entry.expert else self.sizes.tp

    def holders(self, entry: Entry, shard: int) -> tuple[int, ...]:
        """Return all trainer ranks that hold a copy of one shard of a parameter.

        entry: the parameter, with its names and its sharded axis.
        shard: index of the shard, from 0.
        """
        sizes, stage = self.sizes, self.stage(entry)
        per_stage = sizes.world_size // sizes.pp
        if entry.expert:
            split, width = sizes.etp, sizes.etp * sizes.ep
            inner = sizes.etp * (entry.expert.index // (entry.expert.count // sizes.ep))
        else:
            split, width, inner = sizes.tp, sizes.tp, 0
        own = range(split) if entry.axis is None else (shard,)
        return tuple(
            stage * per_stage + replica * width + inner + rank
            for replica in range(per_stage // width)
            for rank in own
        )

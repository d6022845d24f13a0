"""Which rank of the trainer holds which shard of which parameter; arithmetic alone, so that a plan can be made on paper."""

from dataclasses import dataclass

from grpo_megatron.model.entries import Entry
from grpo_megatron.model.parallel_sizes import ParallelSizes


@dataclass(frozen=True)
class TrainerRanks:
    """Megatron's order of ranks: tensor parallel first, then context, data, pipeline; for experts expert-tensor, expert, data, pipeline."""

    sizes: ParallelSizes
    num_layers: int

    def stage(self, entry: Entry) -> int:
        """The pipeline stage whose parameter this is."""
        if entry.megatron.startswith("embedding."):
            return 0
        if not entry.megatron.startswith("decoder.layers."):
            return self.sizes.pp - 1
        layer = int(entry.megatron.split(".", 3)[2])
        for chunk, layers in enumerate(self.sizes.chunk_layers(self.num_layers)):
            if layer < layers:
                return chunk % self.sizes.pp
            layer -= layers
        raise ValueError(f"{entry.megatron}: the model has {self.num_layers} layers")

    def shards(self, entry: Entry) -> int:
        """How many different ones there are."""
        if entry.axis is None:
            return 1
        return self.sizes.etp if entry.expert else self.sizes.tp

    def holders(self, entry: Entry, shard: int) -> tuple[int, ...]:
        """The ranks that have this shard, which are replicas of each other."""
        sizes, stage = self.sizes, self.stage(entry)
        per_stage = sizes.world_size // sizes.pp
        if entry.expert:
            split, width = sizes.etp, sizes.etp * sizes.ep
            inner = sizes.etp * (entry.expert.number // (entry.expert.count // sizes.ep))
        else:
            split, width, inner = sizes.tp, sizes.tp, 0
        own = range(split) if entry.axis is None else (shard,)
        return tuple(
            stage * per_stage + replica * width + inner + rank
            for replica in range(per_stage // width)
            for rank in own
        )

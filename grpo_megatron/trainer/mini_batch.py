"""The samples of one optimizer step, and how they are divided among replicas and micro-batches."""

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.layout import Layout
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.megatron.spec import pack_limit
from grpo_megatron.model.parallel_sizes import ParallelSizes


@dataclass
class MiniBatch:
    """The samples of one optimizer step, and their partition, which every pass over them reuses.

    key: (step, number in it), by which the ranks know it again.
    """

    batch: TrainBatch
    plan: Schedule
    key: tuple[int, int]


def partition(config: Config, lengths: np.ndarray, cost: CostModel) -> Schedule:
    """Micro-batches of one optimizer step for every replica; lengths: int64 [S], tokens of each sequence."""
    sizes = ParallelSizes.from_config(config.megatron)
    return schedule(
        lengths,
        pack_limit(config),
        dp=sizes.dp,
        cost=cost,
        packing=config.train.packing,
        sequence_multiple=Layout(cp=sizes.cp).sequence_multiple,
        multiple_of=sizes.micro_batch_multiple,
        lockstep=sizes.ep > 1,
    )

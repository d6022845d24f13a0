"""Samples of one optimizer step, and their division among replicas and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.batch.pairs import schedule_pairs
from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.spec import pack_limit
from grpo_megatron.model.parallel_sizes import ParallelSizes

Item = TypeVar("Item")


@dataclass
class MiniBatch:
    """Samples of one optimizer step with their partition, which every pass over them reuses.

    key: (step, index of the mini-batch in it), by which the ranks recognise the mini-batch.
    """

    batch: TrainBatch
    plan: Schedule
    key: tuple[int, int]


def partition(config: Config, lengths: np.ndarray, cost: CostModel, pairs: bool = False) -> Schedule:
    """Return the micro-batches of one optimizer step for every replica.

    lengths: int64 [S], tokens of each sequence.
    pairs: keep sequences 2 i and 2 i + 1 together, see schedule_pairs.
    """
    sizes = ParallelSizes.from_config(config.megatron)
    return (schedule_pairs if pairs else schedule)(
        lengths,
        pack_limit(config),
        dp=sizes.dp,
        cost=cost,
        packing=config.train.packing,
        sequence_multiple=Layout(cp=sizes.cp).sequence_multiple,
        multiple_of=sizes.micro_batch_multiple,
        lockstep=sizes.ep > 1,
    )


def enough(items: Sequence[Item], config: Config) -> list[Item]:
    """Return enough items for `partition` to divide among the replicas, some of them twice if necessary.

    items: sequences, or pairs of them, that are only scored.
    """
    sizes = ParallelSizes.from_config(config.megatron)
    share = sizes.dp * sizes.micro_batch_multiple
    count = max(len(items), share) if config.train.packing else padded_to(len(items), share)
    return [items[i % len(items)] for i in range(count)]


def make_mini_batches(groups: list[Group], config: Config, cost: CostModel, step: int) -> list[MiniBatch]:
    """Make one mini-batch of every train.ppo_mini_batch_size groups, with the samples of each in one stream.

    Raises UserError if train.old_logprobs=current meets more than one optimizer step.
    """
    batch = TrainBatch.from_samples([sample for group in groups for sample in group.samples])
    batch.number = np.arange(batch.num_tokens)
    group_of = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    mini_of = group_of // config.train.ppo_mini_batch_size
    parts = [batch.select(np.flatnonzero(mini_of == number)) for number in range(mini_of[-1] + 1)]
    if config.train.old_logprobs == OldLogprobs.current and len(parts) * config.train.ppo_epochs > 1:
        raise UserError(
            f"train.old_logprobs=current needs one optimizer step per batch; {len(groups)} prompts make "
            "several"
        )
    return [
        MiniBatch(part, partition(config, part.lengths, cost), (step, number))
        for number, part in enumerate(parts)
    ]

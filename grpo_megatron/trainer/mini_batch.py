"""Samples of one optimizer step, and their division among data-parallel replicas and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from grpo_megatron.batch.layout import Layout, padded_to
from grpo_megatron.batch.pairs import schedule_pairs
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.derived import pack_limit
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes

Item = TypeVar("Item")
# (index of the training step, index of the mini-batch within the step)
Key = tuple[int, int]


@dataclass
class MiniBatch:
    """Samples of one optimizer step, and their partition into micro-batches.

    All passes over the samples (old log-probs, reference log-probs, training) use the same partition, so that
    ranks can reuse inputs and results of an earlier pass over the same micro-batch.
    """

    samples: list[Sample]
    """The samples. The ranks get them once, in PolicyTrainer.measure, and keep them for the later passes."""
    table: SampleTable
    """One row for each sample."""
    plan: Schedule
    """The sequences of each micro-batch, for each data-parallel replica."""
    key: Key
    """Ranks store results of earlier passes under this key."""
    version: int | None = None
    """Version of the trained weights, from which the ranks compute each token's age in versions. None: no
    sample was generated with older weights, and no ages are computed."""

    def for_ranks(self, part: Sequence[int]) -> list[Sample]:
        """Return copies of the samples of a micro-batch, with only the fields that the ranks need.

        part: indices, within the mini-batch, of the micro-batch's samples.
        """
        return [self.samples[i].for_ranks(with_spans=self.version is not None) for i in part]

    def stream(self, part: Sequence[int]) -> TrainBatch:
        """Return the token stream of a micro-batch, for diagnosis. In training, the ranks build the streams.

        part: indices, within the mini-batch, of the micro-batch's samples.
        """
        return TrainBatch.from_samples([self.samples[i] for i in part])


def partition(config: Config, lengths: np.ndarray, cost: CostModel, pairs: bool = False) -> Schedule:
    """Assign S sequences of one pass to data-parallel replicas and micro-batches.

    The configuration gives the parallel sizes, the token limit of a micro-batch, and whether to pack several
    sequences into a micro-batch (train.packing).

    lengths: int64 [S], number of tokens of each sequence.
    cost: estimates the compute time of a sequence, so that all replicas take about equally long.
    pairs: if True, keep sequences 2i and 2i + 1 (chosen and rejected) in the same micro-batch.

    Raises UserError if a sequence exceeds the token limit, or if the sequences cannot be divided into equally
    many micro-batches per replica, for example because they are too few (see `enough`).
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
    """Return `items`, followed by repeated items if there are too few to divide among the replicas.

    Let N be the number of data-parallel replicas, times the number of pipeline stages if the pipeline
    schedule is interleaved. `partition` needs at least N items, and without train.packing a multiple of N.
    Repeated items are taken from the beginning. The caller must ignore the results after the first
    len(items).

    Use this function only for scoring. In training, a repeated item would count twice in the loss.

    items: sequences, or pairs of sequences. There must be at least one.
    """
    sizes = ParallelSizes.from_config(config.megatron)
    share = sizes.dp * sizes.micro_batch_multiple
    count = max(len(items), share) if config.train.packing else padded_to(len(items), share)
    return [items[i % len(items)] for i in range(count)]


def make_mini_batches(
    groups: list[Group], config: Config, cost: CostModel, step: int, version: int | None = None
) -> list[MiniBatch]:
    """Divide the samples of a training step into mini-batches of train.ppo_mini_batch_size groups each.

    The last mini-batch may have fewer groups.

    groups: groups of samples. A group has the samples of one prompt.
    cost: estimates the compute time of a sequence, so that all replicas take about equally long.
    step: index of the training step, for the keys of the mini-batches.
    version: version of the trained weights; None if no sample was generated with older weights.

    Raises UserError if train.old_logprobs=current and there would be more than one optimizer step. After the
    first optimizer step, the current policy is no longer the one that generated the samples. Raises the
    errors of `partition` too.
    """
    size = config.train.ppo_mini_batch_size
    parts = [groups[first : first + size] for first in range(0, len(groups), size)]
    if config.train.old_logprobs == OldLogprobs.current and len(parts) * config.train.ppo_epochs > 1:
        raise UserError(
            f"train.old_logprobs=current needs one optimizer step per batch, but {len(groups)} prompts need "
            "several; raise train.ppo_mini_batch_size and set train.ppo_epochs=1, or choose another "
            "train.old_logprobs"
        )
    mini_batches = []
    for index, part in enumerate(parts):
        samples = [sample for group in part for sample in group.samples]
        table = SampleTable.of(samples)
        plan = partition(config, table.num_tokens, cost)
        mini_batches.append(MiniBatch(samples, table, plan, (step, index), version))
    return mini_batches

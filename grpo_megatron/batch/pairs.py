"""Scheduling of sequence pairs (2i, 2i + 1), which share a loss and must be in the same micro-batch."""

from dataclasses import replace

import numpy as np

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule


def schedule_pairs(
    lengths, max_tokens: int, cost: CostModel = CostModel(), sequence_multiple: int = 1, **options
) -> Schedule:
    """Assign pairs of sequences to micro-batches and data-parallel ranks, by the same rules as `schedule`.

    Sequences 2i and 2i + 1 are pair i. They stay adjacent in one micro-batch, because the loss of a reward
    model couples them.

    lengths: int [2P], number of tokens of each sequence of the P pairs.
    max_tokens: token limit of a micro-batch over all CP ranks, including padding.
    cost: cost estimate that is used to balance the ranks.
    sequence_multiple: number to whose multiples sequence lengths are padded.
    options: further arguments of `schedule`.
    """
    padded = padded_to(np.asarray(lengths, dtype=np.int64), sequence_multiple)
    # `schedule` sees a pair as one sequence of their joint length. But the two sequences do not attend to
    # each other, so a pair has only about half of the (query, key) pairs of such a sequence.
    of_pair = replace(cost, per_pair=cost.per_pair / 2)
    plan = schedule(padded.reshape(-1, 2).sum(1), max_tokens, cost=of_pair, **options)
    return Schedule(
        tuple(
            tuple(tuple(2 * i + j for i in mb for j in (0, 1)) for mb in rank) for rank in plan.micro_batches
        )
    )

"""Preference pairs, whose two sequences share a loss and must be in the same micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batch.examples import Example
from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.schedule import CostModel, Schedule, schedule
from grpo_megatron.batch.token_stream import TokenStream


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected response to a prompt.

    margin: how much the score of the chosen response should exceed that of the rejected one.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0


@dataclass(kw_only=True)
class PairBatch(TokenStream):
    """A token stream of P preference pairs, for the training of a reward model.

    Sequence 2i has the chosen response of pair i, and sequence 2i + 1 the rejected one.
    """

    weight: np.ndarray
    """float32 [P]. Weight of each pair's loss in the sum over the optimizer step."""
    margin: np.ndarray
    """float32 [P]. How much the score of the chosen sequence should exceed that of the rejected one."""

    @classmethod
    def of_pairs(cls, pairs: Sequence[Pair], weight: float) -> "PairBatch":
        """Return the stream of some pairs, two sequences each. weight: weight of each pair's loss."""
        return cls.of(
            [example.ids for pair in pairs for example in (pair.chosen, pair.rejected)],
            weight=np.full(len(pairs), weight, dtype=np.float32),
            margin=np.array([pair.margin for pair in pairs], dtype=np.float32),
        )


def schedule_pairs(
    lengths, max_tokens: int, cost: CostModel = CostModel(), sequence_multiple: int = 1, **options
) -> Schedule:
    """Assign pairs of sequences to micro-batches and data-parallel ranks, so that the ranks do equal work.

    Sequences 2i and 2i + 1 are pair i. The two stay adjacent in one micro-batch, because the loss of a reward
    model couples them. The other rules are those of `schedule`, which does the same for single sequences.

    lengths: int [2P], number of tokens of each sequence of the P pairs.
    max_tokens: token limit of a micro-batch over all CP ranks, including padding.
    cost: cost estimate that is used to balance the ranks.
    sequence_multiple: number to whose multiples sequence lengths are padded.
    options: further arguments of `schedule`.

    Returns a Schedule of the 2P sequences. Raises the errors of `schedule`; the messages count a pair as one
    sequence.
    """
    padded = padded_to(np.asarray(lengths, dtype=np.int64), sequence_multiple)
    # `schedule` sees a pair as one sequence of their joint length. But the two sequences do not attend to
    # each other, so a pair has only about half of the (query, key) pairs of such a sequence. A sliding window
    # hides nothing until the joint length exceeds twice the window.
    windows = tuple((2 * window, per_pair / 2) for window, per_pair in cost.windows)
    of_pair = replace(cost, per_pair=cost.per_pair / 2, windows=windows)
    plan = schedule(padded.reshape(-1, 2).sum(1), max_tokens, cost=of_pair, **options)
    return Schedule(
        tuple(
            tuple(tuple(2 * i + j for i in mb for j in (0, 1)) for mb in rank) for rank in plan.micro_batches
        )
    )

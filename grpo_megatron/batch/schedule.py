"""The schedule of a step: the sequences of each micro-batch, and the data-parallel rank that computes it.

First all sequences of an optimizer step are packed into micro-batches. Then the micro-batches are dealt to
the ranks. If each rank packed its own share instead, the ranks could have different numbers of micro-batches,
and the pipeline would wait.

The micro-batches are sorted by cost and dealt in rounds. A round has one micro-batch per rank, and the ranks
compute it at the same time. Sorting makes the costs within a round nearly equal, which matters for the
all-to-alls of expert parallelism. In each round, the costliest micro-batch goes to the least loaded rank, so
that the ranks' total costs are nearly equal. Exchanges of sequences, first within rounds and then between
ranks, remove most of the remaining difference.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.batch.packing import Sequences, pack
from grpo_megatron.errors import UserError

Stream = TypeVar("Stream")

# Exchanges stop when the cost of a round's costliest micro-batch, or of the costliest rank, exceeds the mean
# by at most this fraction.
_TOLERANCE = 1e-4
# Exchanges also stop after examining this many sequences, so that a large batch does not wait for tiny gains.
_EXCHANGE_BUDGET = 30_000


@dataclass(frozen=True)
class CostModel:
    """An estimate of the relative compute cost of a training or log-prob pass over one sequence.

    A sequence of L tokens costs per_token · L + per_pair · L (L + 1) / 2. The first term is for the linear
    layers, the second for the (query, key) pairs of causal attention. In layers with a sliding window, there
    are fewer pairs. Only the ratios of the costs matter. The default ratio is about right for a dense 7B
    model.

    per_token: cost of a token in all linear layers together.
    per_pair: cost of a (query, key) pair in all layers without a sliding window together.
    windows: (sliding window, cost of a pair in all layers with this window together) for each window.
    """

    per_token: float = 1.0
    per_pair: float = 2.8e-5
    windows: tuple[tuple[int, float], ...] = ()

    def flops(self, lengths) -> np.ndarray:
        """Return the estimated cost of each of S sequences, float64 [S], in relative units.

        lengths: int [S], number of tokens of each sequence.
        """
        lengths = np.asarray(lengths, dtype=np.float64)
        pairs = lengths * (lengths + 1) / 2
        found = self.per_token * lengths + self.per_pair * pairs
        for window, per_pair in self.windows:
            hidden = np.maximum(0.0, lengths - window)
            found += per_pair * (pairs - hidden * (hidden + 1) / 2)
        return found

    def flops_of_next_token(self, context: float) -> float:
        """Return the estimated cost of decoding one token, which attends to `context` tokens."""
        windowed = sum(per_pair * min(context, window) for window, per_pair in self.windows)
        return self.per_token + self.per_pair * context + windowed


@dataclass(frozen=True)
class Schedule:
    """The assignment of sequences to micro-batches and data-parallel ranks."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """micro_batches[dp_rank][i] has the indices of the sequences in micro-batch i of that rank. All ranks
    compute their micro-batch i at the same time."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank, the same for all ranks."""
        return len(self.micro_batches[0])

    def sequences(self, dp_rank: int) -> list[int]:
        """Return the indices of all sequences that a rank computes, in the order of its micro-batches."""
        return [i for micro_batch in self.micro_batches[dp_rank] for i in micro_batch]

    def places(self, sequences: Sequence[int]) -> list[tuple[int, int]]:
        """Return (data-parallel rank, place in the rank's `sequences`) of some sequences, in their order."""
        found = {
            index: (dp, place)
            for dp in range(len(self.micro_batches))
            for place, index in enumerate(self.sequences(dp))
        }
        return [found[index] for index in sequences]

    @property
    def order(self) -> np.ndarray:
        """Index int64 [S] that brings per-sequence results back into the order of the sequences.

        If `rows` has the results of all sequences of rank 0, then of rank 1, and so on, `rows[order]` has
        them in the order in which `schedule` got the sequences.
        """
        return np.argsort(np.concatenate([self.sequences(dp) for dp in range(len(self.micro_batches))]))

    def divided(self, make: Callable[[Sequence[int]], Stream]) -> list[list[Stream]]:
        """Build the data of every micro-batch. Return it as result[dp_rank][i] for micro-batch i.

        make: function that builds the data of one micro-batch from the indices of its sequences.
        """
        return [[make(micro_batch) for micro_batch in own] for own in self.micro_batches]

    def by_sequence(self, parts: list[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
        """Divide the ranks' per-token results into one array per sequence, [n, ...] for n tokens.

        The returned arrays are in the order in which `schedule` got the S sequences.

        parts: for each rank, an array [t, ...] with a value for each of its t tokens, in the order of
            `sequences(rank)`.
        lengths: int64 [S], number of tokens of each sequence.
        """
        found: dict[int, np.ndarray] = {}
        for dp, part in enumerate(parts):
            own = self.sequences(dp)
            found.update(zip(own, np.split(part, np.cumsum(lengths[own])[:-1]), strict=True))
        return [found[i] for i in range(len(lengths))]


def schedule(
    lengths,
    max_tokens: int,
    dp: int = 1,
    cost: CostModel = CostModel(),
    packing: bool = True,
    sequence_multiple: int = 1,
    multiple_of: int = 1,
    lockstep: bool = False,
) -> Schedule:
    """Partition S sequences into micro-batches, and assign the micro-batches to `dp` data-parallel ranks.

    Every sequence occurs once, all ranks get equally many micro-batches, and no micro-batch is empty. As far
    as the lengths allow, the ranks do equal work in total, and equal work in each micro-batch i. If one
    sequence is very long, the two goals conflict, and `lockstep` decides: False puts equal work in total
    first, True puts equal work in each micro-batch first. Cheap micro-batches come first and last, where a
    pipeline fills and drains. The result is deterministic.

    lengths: int [S], number of tokens of each sequence.
    max_tokens: token limit of a micro-batch over all CP ranks, including the padding to `sequence_multiple`.
    cost: cost estimate that is used to balance the ranks.
    packing: if False, every sequence is a micro-batch of its own.
    sequence_multiple: number to whose multiples sequences are padded (Layout.sequence_multiple).
    multiple_of: number that the micro-batches per rank must be divisible by. Under a virtual pipeline this is
        the pipeline size, else 1.
    lockstep: True if ranks wait for each other in every micro-batch, as in expert parallelism. False if they
        wait only once a step.

    Raises UserError if there are no sequences, if one exceeds max_tokens, or if they cannot be split into
    equally many micro-batches per rank. Raises ValueError for lengths below 1.
    """
    padded = _padded(lengths, max_tokens, sequence_multiple)
    order = np.argsort(padded, kind="stable")
    sequences = Sequences(padded[order], cost.flops(padded[order]), max_tokens)
    packed = pack(sequences, dp * multiple_of) if packing else [[s] for s in range(1, len(sequences) + 1)]
    if len(packed) % (dp * multiple_of):
        raise UserError(_cannot_share(len(sequences), dp, multiple_of, packing))
    rounds = _rounds([_MicroBatch.of(chosen, sequences) for chosen in packed], dp)
    if packing:
        _level_rounds(rounds, sequences)
    per_rank = _deal(rounds)
    if packing and not lockstep:
        _level_ranks(per_rank, sequences)
    index = [-1, *order.tolist()]
    return Schedule(
        tuple(tuple(tuple(sorted([index[s] for s in mb.members])) for mb in own) for own in per_rank)
    )


def _padded(lengths, max_tokens: int, sequence_multiple: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.size == 0:
        raise UserError("there are no sequences to train on; use a larger batch, or less strict filters")
    if lengths.min() < 1:
        raise ValueError(f"sequence {int(lengths.argmin())} has {lengths.min()} tokens, but needs at least 1")
    padded = padded_to(lengths, sequence_multiple)
    longest = int(padded.argmax())
    if padded[longest] > max_tokens:
        with_padding = f" ({padded[longest]} with the padding of context parallelism)"
        padding = with_padding if sequence_multiple > 1 else ""
        raise UserError(
            f"sequence {longest} has {lengths[longest]} tokens{padding}, but a micro-batch holds at most "
            f"{max_tokens}; raise train.max_tokens_per_micro_batch"
        )
    return padded


def _cannot_share(count: int, dp: int, multiple_of: int, packing: bool) -> str:
    step = dp * multiple_of
    fitting = f"make the number of sequences a multiple of {step}"
    if count < step:
        advice = f"at least {step} are needed: use a larger batch or fewer data-parallel ranks"
    elif packing:
        advice = f"raise train.max_tokens_per_micro_batch, or {fitting}"
    else:
        advice = f"{fitting}, or use train.packing=true"
    multiple = f", a multiple of {multiple_of} for the virtual pipeline" if multiple_of > 1 else ""
    return (
        f"{count} sequences{'' if packing else ', one per micro-batch,'} cannot be divided among {dp} "
        f"data-parallel ranks so that each gets the same number of micro-batches{multiple}; {advice}"
    )


@dataclass(slots=True)
class _MicroBatch:
    members: list[int]  # ids of the sequences (see packing.Sequences), ascending
    tokens: int
    cost: float

    @classmethod
    def of(cls, members: list[int], sequences: Sequences) -> "_MicroBatch":
        members.sort()
        tokens = sum([sequences.length[s] for s in members])
        return cls(members, tokens, sum([sequences.cost[s] for s in members]))

    def replace(self, old: int, new: int, sequences: Sequences) -> None:
        """Remove sequence `old` from this micro-batch and add sequence `new`, in place.

        old, new: ids of sequences; 0 stands for no sequence.
        sequences: lengths and costs by id.
        """
        if old:
            self.members.remove(old)
        if new:
            insort(self.members, new)
        self.tokens += sequences.length[new] - sequences.length[old]
        self.cost += sequences.cost[new] - sequences.cost[old]


def _rounds(micro_batches: list[_MicroBatch], dp: int) -> list[list[_MicroBatch]]:
    micro_batches.sort(key=lambda mb: (mb.cost, mb.members))
    return [micro_batches[i : i + dp] for i in range(0, len(micro_batches), dp)]


def _exchange(
    heavy: _MicroBatch, light: _MicroBatch, gap: float, sequences: Sequences
) -> tuple[float, int, int]:
    """Find the swap of two sequences that best reduces the difference in cost between two micro-batches.

    Returns (difference after the swap, a, b):

    - a: id of the sequence to move from `heavy` to `light`; 0 if no swap helps.
    - b: id of the shorter sequence to move from `light` to `heavy`; 0 if none should move back.

    gap: the difference in cost to reduce. It is the difference between the two micro-batches, or between the
        total costs of their ranks.
    """
    length, cost, members = sequences.length, sequences.cost, light.members
    room = sequences.max_tokens - light.tokens
    best = (gap, 0, 0)
    previous = 0
    for a in heavy.members:
        if length[a] == previous:
            continue
        previous = length[a]
        # Cost grows with length, so the best partner is next to the sequence that would close the gap
        # exactly, or next to the shortest one that makes no micro-batch too long.
        wanted = max(bisect_left(cost, cost[a] - gap / 2), bisect_left(length, length[a] - room))
        j = bisect_left(members, wanted)
        for b in (members[j - 1] if j else 0, members[j] if j < len(members) else 0):
            left = abs(gap - 2 * (cost[a] - cost[b]))
            if left < best[0] and length[a] - length[b] <= room and (b or len(heavy.members) > 1):
                best = (left, a, b)
    return best


def _level_rounds(rounds: list[list[_MicroBatch]], sequences: Sequences) -> None:
    """Exchange sequences within each round, in place, so that its micro-batches have nearly equal costs.

    rounds: lists of micro-batches that the ranks compute at the same time, one micro-batch per rank.
    sequences: lengths, costs and the token limit of a micro-batch.
    """
    dp = len(rounds[0])
    mean = [sum(mb.cost for mb in members) / dp for members in rounds]
    heap = [(mean[i] - max(mb.cost for mb in members), i) for i, members in enumerate(rounds)]
    heapq.heapify(heap)
    budget = _EXCHANGE_BUDGET
    while heap and budget > 0:
        waiting, i = heapq.heappop(heap)
        if -waiting <= _TOLERANCE * mean[i]:
            continue
        ascending = sorted(rounds[i], key=lambda mb: mb.cost)
        heavy = ascending[-1]
        for light in ascending[:-1][:4]:
            budget -= len(heavy.members)
            gap = heavy.cost - light.cost
            left, a, b = _exchange(heavy, light, gap, sequences)
            if left < gap * (1 - _TOLERANCE):
                heavy.replace(a, b, sequences)
                light.replace(b, a, sequences)
                heapq.heappush(heap, (mean[i] - max(mb.cost for mb in rounds[i]), i))
                break


def _deal(rounds: list[list[_MicroBatch]]) -> list[list[_MicroBatch]]:
    """Assign the micro-batches of each round to the ranks. Return the micro-batches of each rank.

    In each round, ranks with less total cost so far get the costlier micro-batches.

    rounds: lists of micro-batches that the ranks compute at the same time, one micro-batch per rank.
    """
    dp = len(rounds[0])
    costs = [[mb.cost for mb in members] for members in rounds]
    load = np.zeros(dp)
    dealt: list[list[_MicroBatch]] = [[] for _ in rounds]
    # Deal the most uneven rounds first, so that the other rounds can even out the total costs.
    for i in sorted(range(len(rounds)), key=lambda i: (min(costs[i]) - max(costs[i]), i)):
        busiest_first = np.argsort(-load, kind="stable")
        cheapest_first = np.argsort(costs[i], kind="stable")
        place = np.empty(dp, dtype=np.int64)
        place[busiest_first] = cheapest_first
        load += np.asarray(costs[i])[place]
        dealt[i] = [rounds[i][p] for p in place]
    # Cheap rounds go to both ends: a pipeline idles for about one micro-batch per stage at its start and end.
    dealt = dealt[::2] + dealt[1::2][::-1]
    return [[members[rank] for members in dealt] for rank in range(dp)]


def _level_ranks(per_rank: list[list[_MicroBatch]], sequences: Sequences) -> None:
    """Exchange sequences between the most and the least loaded rank, in place, to even out total costs.

    per_rank: the micro-batches of each rank.
    """
    load = [sum(mb.cost for mb in own) for own in per_rank]
    mean = sum(load) / len(load)
    budget = _EXCHANGE_BUDGET
    while budget > 0 and max(load) > mean * (1 + _TOLERANCE):
        heavy, light = load.index(max(load)), load.index(min(load))
        gap = load[heavy] - load[light]
        pairs = list(zip(per_rank[heavy], per_rank[light], strict=True))
        budget -= sum(len(mb.members) for mb, _ in pairs)
        (left, a, b), i = min((_exchange(*pair, gap, sequences), i) for i, pair in enumerate(pairs))
        if left >= gap * (1 - _TOLERANCE):
            return
        pairs[i][0].replace(a, b, sequences)
        pairs[i][1].replace(b, a, sequences)
        moved = sequences.cost[a] - sequences.cost[b]
        load[heavy] -= moved
        load[light] += moved

"""The schedule of a step: the sequences of each micro-batch, and the data-parallel rank that computes it.

Sequences are packed into micro-batches over the whole optimizer step, which are then dealt to the ranks. If
each rank packed its own share, their numbers of micro-batches would differ, and the pipeline would wait.

The micro-batches are sorted by cost and dealt in rounds of one per rank, so that the ranks' simultaneous work
costs nearly the same (for the all-to-alls of expert parallelism). In each round, the costliest micro-batch
goes to the least loaded rank, so that the totals are nearly equal. Exchanges of sequences, first within
rounds and then between ranks, remove most of the remaining difference.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.errors import UserError

# Exchanges stop when a round's costliest micro-batch, or a rank, is this close to the mean (relative) ...
_TOLERANCE = 1e-4
# ... or after examining this many sequences, so that a large batch does not wait for the last digit.
_EXCHANGE_BUDGET = 30_000


@dataclass(frozen=True)
class CostModel:
    """An estimate of the relative FLOPs of a training or log-prob pass over one sequence.

    A sequence of L tokens costs per_token · L + per_pair · L (L + 1) / 2: per_token for the linear layers,
    per_pair for each (query, key) pair of causal attention. Only the ratio of the two matters. The default is
    about the ratio of a dense 7B model.
    """

    per_token: float = 1.0
    per_pair: float = 2.8e-5

    def flops(self, lengths) -> np.ndarray:
        """Return the estimated cost of each of S sequences, float64 [S]. lengths: int [S], in tokens."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return self.per_token * lengths + self.per_pair * lengths * (lengths + 1) / 2


@dataclass(frozen=True)
class Schedule:
    """The assignment of sequences to micro-batches and data-parallel ranks."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """micro_batches[dp_rank][i]: sequence indices. All ranks compute their micro-batch i at the same time."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches per rank, the same for all ranks."""
        return len(self.micro_batches[0])

    def sequences(self, dp_rank: int) -> list[int]:
        """Return the indices of all sequences that a rank computes, micro-batch by micro-batch."""
        return [i for micro_batch in self.micro_batches[dp_rank] for i in micro_batch]


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
    """Partition S sequences into micro-batches for `dp` data-parallel ranks. The result is deterministic.

    lengths: int [S], number of tokens of each sequence.
    max_tokens: token limit of a micro-batch over all CP ranks, including the padding to `sequence_multiple`.
    cost: cost estimate that is used to balance the ranks.
    packing: if False, every sequence is a micro-batch of its own.
    sequence_multiple: number that padded sequence lengths are divisible by (Layout.sequence_multiple).
    multiple_of: divisor of the micro-batches per rank (the pipeline size under a virtual pipeline, else 1).
    lockstep: True if ranks wait for each other in every micro-batch (expert parallelism), not once a step.

    Every sequence occurs once, all ranks get equally many micro-batches, and no micro-batch is empty. The
    ranks do nearly equal work in total and in each micro-batch i, as far as the lengths allow. The two goals
    conflict if one sequence costs more than any other micro-batch. Then its rank gets less work in the other
    micro-batches, except with lockstep, where the other ranks would only wait more often. Cheap micro-batches
    come first and last, where a pipeline fills and drains.

    Raises UserError if a sequence exceeds max_tokens, or if the sequences cannot be split into equally many
    micro-batches per rank. Raises ValueError for lengths below 1.
    """
    padded = _padded(lengths, max_tokens, sequence_multiple)
    order = np.argsort(padded, kind="stable")
    sequences = _Sequences(padded[order], cost.flops(padded[order]), max_tokens)
    packed = _pack(sequences, dp * multiple_of) if packing else [[s] for s in range(1, len(sequences) + 1)]
    if len(packed) % (dp * multiple_of):
        raise UserError(_cannot_share(len(sequences), dp, multiple_of, packing))
    rounds = _rounds([sequences.micro_batch(chosen) for chosen in packed], dp)
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
        raise ValueError(f"sequence {int(lengths.argmin())} has {lengths.min()} tokens")
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
    members: list[int]  # ids of the sequences (see _Sequences), ascending
    tokens: int
    cost: float

    def replace(self, old: int, new: int, sequences: "_Sequences") -> None:
        """Remove sequence `old` and add sequence `new`, in place. Both are ids; 0 stands for no sequence."""
        if old:
            self.members.remove(old)
        if new:
            insort(self.members, new)
        self.tokens += sequences.length[new] - sequences.length[old]
        self.cost += sequences.cost[new] - sequences.cost[old]


class _Sequences:
    """Lengths and costs of S sequences with the ids 1..S, from shortest to longest. Id 0: no sequence."""

    def __init__(self, length: np.ndarray, cost: np.ndarray, max_tokens: int):
        # Lists, because single elements are read, which is several times faster than in arrays.
        self.length: list[int] = [0, *length.tolist()]
        self.cost: list[float] = [0.0, *cost.tolist()]
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self.length) - 1

    def micro_batch(self, members: list[int]) -> _MicroBatch:
        members.sort()
        tokens, cost = sum([self.length[s] for s in members]), sum([self.cost[s] for s in members])
        return _MicroBatch(members, tokens, cost)


def _pack(sequences: _Sequences, step: int) -> list[list[int]]:
    """Pack sequences evenly into a multiple of `step` micro-batches, if possible. Return their sequence ids.

    Dealing each sequence, longest first, to the emptiest micro-batch is the most even way. If it fails for
    lack of room, first-fit-decreasing is used. Then its last micro-batches, with the shortest sequences, are
    dealt again evenly: all of them, or the last quarter, or the last 16th ...
    """
    everything = range(len(sequences), 0, -1)
    fewest = padded_to(-(-sum(sequences.length) // sequences.max_tokens), step)
    if (even := _emptiest_first(everything, fewest, sequences)) is not None:
        return even
    tight = _first_fit(sequences, pairs=True)
    if padded_to(len(tight), step) > fewest:
        tight = min(tight, _first_fit(sequences, pairs=False), key=len)
    count = padded_to(len(tight), step)
    kept = 0 if count > fewest else 3 * len(tight) // 4
    while kept < len(tight):
        again = sorted((s for members in tight[kept:] for s in members), reverse=True)
        if (even := _emptiest_first(again, count - kept, sequences)) is not None:
            return tight[:kept] + even
        kept += -(-3 * (len(tight) - kept) // 4)
    return _split(tight, count)


def _emptiest_first(chosen: Sequence[int], count: int, sequences: _Sequences) -> list[list[int]] | None:
    """Deal sequences, longest first, to the emptiest of `count` micro-batches.

    Return the sequence ids of each micro-batch, or None if one would exceed the token limit.
    """
    if count > len(chosen):
        return None
    length, limit = sequences.length, sequences.max_tokens
    packed: list[list[int]] = [[] for _ in range(count)]
    # tokens · count + micro-batch, in one integer: comparing tuples would take twice as long.
    heap = list(range(count))
    for s in chosen:
        tokens, emptiest = divmod(heap[0], count)
        if tokens + length[s] > limit:
            return None
        packed[emptiest].append(s)
        heapq.heapreplace(heap, heap[0] + length[s] * count)
    return packed


def _first_fit(sequences: _Sequences, pairs: bool) -> list[list[int]]:
    """Return the sequence ids of each micro-batch, filled one by one with the longest sequence that fits.

    pairs: True to end a micro-batch with two sequences instead of one, if the two fill it better. This saves
        a few of thousands of micro-batches, but may cost one if all sequences are long.
    """
    length, remaining = sequences.length, _Remaining(sequences.length)
    little = sequences.max_tokens // 4096
    packed = []
    while s := remaining.longest(sequences.max_tokens):
        members: list[int] = []
        room = sequences.max_tokens
        while s:
            rest = room - length[s]
            look = pairs and members and little < rest < remaining.shortest()
            pair = remaining.pair(room, more_than=length[s]) if look else None
            for chosen in pair or (s,):
                remaining.take(chosen)
                members.append(chosen)
                room -= length[chosen]
            s = remaining.longest(room)
        packed.append(members)
    return packed


class _Remaining:
    """The sequences that first-fit-decreasing has not put into a micro-batch yet."""

    def __init__(self, length: list[int]):
        self._length = length
        # Union-find: a remaining sequence points to itself. A placed one points to a shorter one, or to 0.
        self._next = list(range(len(length)))
        self._low = 1

    def longest(self, room: int) -> int:
        """Return the id of the longest remaining sequence with at most `room` tokens; 0 if there is none."""
        return self._find(bisect_right(self._length, room) - 1)

    def shortest(self) -> int:
        """Return the length in tokens of the shortest remaining sequence. At least one must remain."""
        while self._next[self._low] != self._low:
            self._low += 1
        return self._length[self._low]

    def take(self, s: int) -> None:
        self._next[s] = s - 1

    def pair(self, room: int, more_than: int) -> tuple[int, int] | None:
        """Return the ids of two sequences that have more than `more_than` and at most `room` tokens together.

        Up to 16 pairs are tried, and the pair with the most tokens is returned; None if no pair fits.
        """
        best = None
        a = self.longest(room - self.shortest())
        for _ in range(16):
            if not a:
                break
            following = self._find(a - 1)
            b = min(self.longest(room - self._length[a]), following)
            together = self._length[a] + self._length[b]
            if b and together > more_than:
                best, more_than = (a, b), together
            a = following
        return best

    def _find(self, s: int) -> int:
        following = self._next
        while following[s] != s:
            following[s] = s = following[following[s]]
        return s


def _split(packed: list[list[int]], count: int) -> list[list[int]]:
    """Halve the micro-batches with the most sequences until there are `count`. Return all micro-batches."""
    heap = [(-len(members), members) for members in packed]
    heapq.heapify(heap)
    while len(heap) < count and heap[0][0] < -1:
        _, members = heapq.heappop(heap)
        for half in (members[::2], members[1::2]):
            heapq.heappush(heap, (-len(half), half))
    return [members for _, members in heap]


def _rounds(micro_batches: list[_MicroBatch], dp: int) -> list[list[_MicroBatch]]:
    micro_batches.sort(key=lambda mb: (mb.cost, mb.members))
    return [micro_batches[i : i + dp] for i in range(0, len(micro_batches), dp)]


def _exchange(
    heavy: _MicroBatch, light: _MicroBatch, gap: float, sequences: _Sequences
) -> tuple[float, int, int]:
    """Find the swap of two sequences that best reduces a gap in cost. Return (gap after the swap, a, b).

    a: id of the sequence that moves from `heavy` to `light`; 0 if no swap helps.
    b: id of the shorter sequence that moves back; 0 if nothing moves back.
    gap: the difference in cost to reduce.
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


def _level_rounds(rounds: list[list[_MicroBatch]], sequences: _Sequences) -> None:
    """Exchange sequences between micro-batches of a round, in place, to make the costliest one cheaper."""
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
    """Return the micro-batches of each rank. In each round, less loaded ranks get costlier micro-batches."""
    dp = len(rounds[0])
    costs = [[mb.cost for mb in members] for members in rounds]
    load = np.zeros(dp)
    dealt: list[list[_MicroBatch]] = [[] for _ in rounds]
    # The most uneven rounds first, so that the others can even out the rest.
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


def _level_ranks(per_rank: list[list[_MicroBatch]], sequences: _Sequences) -> None:
    """Exchange sequences between the most and the least loaded rank, in place, to even out total costs."""
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

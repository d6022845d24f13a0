"""Packing of sequences into micro-batches: few of them, with nearly equal numbers of tokens."""

import heapq
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from grpo_megatron.batch.layout import padded_to


class Sequences:
    """Lengths and costs of S sequences, which have the ids 1 to S from shortest to longest.

    Id 0 stands for no sequence: its length and cost are 0.

    length: number of tokens of each sequence, ascending.
    cost: estimated cost of each sequence.
    max_tokens: maximum number of tokens of a micro-batch.
    """

    def __init__(self, length: np.ndarray, cost: np.ndarray, max_tokens: int):
        # Lists, because single elements are read, which is several times faster than in arrays.
        self.length: list[int] = [0, *length.tolist()]
        self.cost: list[float] = [0.0, *cost.tolist()]
        self.max_tokens = max_tokens

    def __len__(self) -> int:
        return len(self.length) - 1


def pack(sequences: Sequences, step: int) -> list[list[int]]:
    """Pack sequences evenly into few micro-batches. Return the sequence ids of each micro-batch.

    The number of micro-batches is a multiple of `step` if there are enough sequences. These methods are tried
    in order, until one keeps the token limit and leaves no micro-batch empty:

    1. Deal all sequences evenly: each one, longest first, goes to the micro-batch with the fewest tokens.
    2. Pack by first-fit-decreasing. Then deal the sequences of the last micro-batches evenly again: those of
       all micro-batches (only if there are more micro-batches than in method 1), of the last quarter, of the
       last 16th, and so on.
    3. Keep the result of first-fit-decreasing, with some micro-batches halved to reach a multiple of `step`.

    sequences: lengths and costs of the sequences, and the token limit of a micro-batch.
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


def _emptiest_first(chosen: Sequence[int], count: int, sequences: Sequences) -> list[list[int]] | None:
    """Deal sequences, longest first, each to the emptiest of `count` micro-batches.

    Returns the sequence ids of each micro-batch. The result is None if a micro-batch would exceed the token
    limit, or if there are fewer sequences than micro-batches.

    chosen: ids of the sequences, longest first.
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


def _first_fit(sequences: Sequences, pairs: bool) -> list[list[int]]:
    """Pack sequences by first-fit-decreasing. Return the sequence ids of each micro-batch.

    Micro-batches are filled one after the other, always with the longest remaining sequence that fits.

    pairs: if True, a micro-batch may end with two sequences instead of one, if the two fill it better. This
        saves a few out of thousands of micro-batches, but may cost one more if all sequences are long.
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
    """The set of sequences that first-fit-decreasing has not put into a micro-batch yet."""

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
        """Return the ids of two remaining sequences that together fill `room` tokens well.

        Together the two have more than `more_than` and at most `room` tokens. Up to 16 pairs are tried, and
        the pair with the most tokens is returned. The result is None if no tried pair has so many tokens.
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
    """Halve the micro-batches with the most sequences, until there are `count` or none can be halved.

    packed: the sequence ids of each micro-batch. The result has the same form.
    """
    heap = [(-len(members), members) for members in packed]
    heapq.heapify(heap)
    while len(heap) < count and heap[0][0] < -1:
        _, members = heapq.heappop(heap)
        for half in (members[::2], members[1::2]):
            heapq.heappush(heap, (-len(half), half))
    return [members for _, members in heap]

"""Which sequences share a micro-batch, and which data-parallel rank computes it.

Pack first, distribute second: sequences are packed into micro-batches over the whole optimizer
step, then the micro-batches are dealt to the ranks. Packing each rank's share on its own instead
leaves ranks with different numbers of micro-batches, and the pipeline waiting.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from grpo_megatron.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """micro_batches[dp_rank][i]: sequence indices of micro-batch i; as many on every rank."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        return len(self.micro_batches[0])

    def sequences(self, dp_rank: int) -> list[int]:
        """All sequences of a rank, micro-batch by micro-batch."""
        return [i for micro_batch in self.micro_batches[dp_rank] for i in micro_batch]


def flops(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """Relative cost of sequences: linear layers ~12 h² per token and layer, attention ~2 h L²."""
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths * (12 * hidden_size + 2 * lengths)


def schedule(lengths, max_tokens: int, dp: int = 1, hidden_size: int = 1024, packing: bool = True) -> Schedule:
    """Deterministic partition of sequences into micro-batches for `dp` ranks.

    lengths: tokens of each sequence; max_tokens: limit of a micro-batch (over all CP ranks);
    hidden_size: of the model, for the cost by which ranks are balanced.
    With packing off every sequence is a micro-batch of its own. Every sequence occurs once, every
    rank gets equally many micro-batches, none of them is empty and none exceeds max_tokens.
    Raises UserError if a sequence is longer than max_tokens, or with fewer sequences than ranks.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.max() > max_tokens:
        raise UserError(
            f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, but a micro-batch may hold {max_tokens}; "
            "raise train.max_tokens_per_micro_batch"
        )
    bins = _pack(lengths, max_tokens, dp) if packing else [[i] for i in range(len(lengths))]
    if len(bins) % dp or len(lengths) < dp:
        raise UserError(
            f"{len(lengths)} sequences make {len(bins)} micro-batches, which {dp} data-parallel ranks cannot share "
            "equally; change the batch size, or use train.packing=true"
        )
    return Schedule(_distribute(bins, flops(lengths, hidden_size), dp))


def _pack(lengths: np.ndarray, max_tokens: int, dp: int) -> list[list[int]]:
    """Micro-batches of at most max_tokens, as even as possible; their number a multiple of dp.

    First-fit-decreasing finds how many are needed. Dealing longest-first to the emptiest of that
    many is more even, but may overflow where the fit is tight.
    """
    order = [int(i) for i in np.argsort(-lengths, kind="stable")]
    tight = _first_fit(order, lengths, max_tokens)
    count = -(-len(tight) // dp) * dp
    even = _emptiest_first(order, lengths, max_tokens, count)
    if even is not None:
        return even
    while len(tight) < count:
        crowded = max(tight, key=len)
        if len(crowded) == 1:
            return tight  # fewer sequences than needed; the caller says so
        tight.append([crowded.pop()])
    return tight


def _first_fit(order: list[int], lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room = np.empty(len(order), dtype=np.int64)
    for i in order:
        fitting = np.flatnonzero(room[: len(bins)] >= lengths[i])
        if fitting.size:
            b = int(fitting[0])
        else:
            b = len(bins)
            bins.append([])
            room[b] = max_tokens
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _emptiest_first(order: list[int], lengths: np.ndarray, max_tokens: int, count: int) -> list[list[int]] | None:
    """None if a micro-batch would overflow or stay empty."""
    if count > len(order):
        return None
    heap = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for i in order:
        used, b = heapq.heappop(heap)
        if used + lengths[i] > max_tokens:
            return None
        bins[b].append(i)
        heapq.heappush(heap, (used + int(lengths[i]), b))
    return bins


def _distribute(bins: list[list[int]], cost: np.ndarray, dp: int) -> tuple:
    """Costliest first to the rank with the least work that still has room; equal counts."""
    per_rank = len(bins) // dp
    bin_cost = [float(cost[b].sum()) for b in bins]
    ranks: list[list[int]] = [[] for _ in range(dp)]
    load = [0.0] * dp
    for b in sorted(range(len(bins)), key=lambda b: (-bin_cost[b], b)):
        rank = min((r for r in range(dp) if len(ranks[r]) < per_rank), key=lambda r: (load[r], r))
        ranks[rank].append(b)
        load[rank] += bin_cost[b]
    return tuple(tuple(tuple(sorted(bins[b])) for b in rank) for rank in ranks)

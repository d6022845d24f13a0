"""Parcels: rectangles of many tensors packed into one buffer, in the same order on both sides, with a digest of each tensor.

A sender packs from its parameters, a receiver unpacks into its own. Packing again from the receiver's parameters must give the same bytes:
that is how a digest covers the weights as they lie in the engine, and not only what travelled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.model.pieces import Move
from grpo_megatron.weights.sync.plan import Link, Part, ReshardPlan

# Digests, and sums of them, are modulo this.
DIGEST_MODULUS = 2**64
# Views of every dtype, and the digest's words of 8 bytes, start at a multiple of this.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Parcel:
    """What goes over a link at a time. number: among the link's. dtype of part i, which lies at offsets[i]; data_bytes: of all parts.

    `total_bytes` of a buffer hold the parts and, behind them, the digest of each tensor (`names`), int64.
    """

    link: Link
    number: int
    parts: tuple[Part, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    data_bytes: int

    @cached_property
    def runs(self) -> list[tuple[str, int, int]]:
        """(HF name, first word, end) of each stretch of the buffer with parts of one tensor, in words of 8 bytes."""
        ends = (*self.offsets[1:], self.data_bytes)
        found: list[tuple[str, int, int]] = []
        for part, start, end in zip(self.parts, self.offsets, ends, strict=True):
            if found and found[-1][0] == part.move.hf:
                start = 8 * found.pop()[1]
            found.append((part.move.hf, start // 8, end // 8))
        return found

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + 8 * len(self.runs)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        for part, dtype, offset in zip(self.parts, self.dtypes, self.offsets, strict=True):
            size = part.move.numel * dtype.itemsize
            yield part, buffer[offset : offset + size].view(dtype).view(part.move.shape)

    def pack(self, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """From the sender's parameters by Megatron name, cast to the engine's dtypes, into buffer uint8 [>= total_bytes]; no digest."""
        self._clear_gaps(buffer)
        for part, view in self._views(buffer):
            view.copy_(part.move.source(parameters[part.megatron]))

    def pack_again(self, parameters: dict[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """The same bytes from the receiver's parameters, by the engine's names."""
        self._clear_gaps(buffer)
        for part, view in self._views(buffer):
            view.copy_(part.move.target(parameters[part.engine]))

    def unpack(self, buffer: torch.Tensor, parameters: dict[str, torch.Tensor]) -> None:
        """Into the receiver's parameters."""
        for part, view in self._views(buffer):
            part.move.target(parameters[part.engine]).copy_(view)

    def _clear_gaps(self, buffer: torch.Tensor) -> None:
        """Bytes between parts are part of the digest."""
        ends = (*self.offsets[1:], self.data_bytes)
        for part, dtype, start, end in zip(self.parts, self.dtypes, self.offsets, ends, strict=True):
            used = start + part.move.numel * dtype.itemsize
            if used < end:
                buffer[used:end] = 0

    def digests(self, buffer: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """int64 [runs]: sum of (2k + 1) word_k modulo 2^64, k the word's place in the buffer. factors: `odd_factors`.

        An odd factor is invertible, so one changed word always shows; different factors show what is in another's place.
        """
        words = buffer[: self.data_bytes].view(torch.int64)
        if not words.is_cuda:  # several times faster than the product, but not there for integers on a GPU
            return torch.stack(
                [torch.dot(words[start:end], factors[start:end]) for _, start, end in self.runs]
            )
        products = factors[: len(words)] * words
        return torch.stack([products[start:end].sum() for _, start, end in self.runs])

    def sealed(self, buffer: torch.Tensor) -> torch.Tensor:
        """The digests' place in the buffer, int64 [runs]."""
        return buffer[self.data_bytes : self.total_bytes].view(torch.int64)


def odd_factors(parcels: list[Parcel], device: torch.device) -> torch.Tensor:
    """1, 3, 5, ... int64, enough for the largest of the parcels."""
    words = max((parcel.data_bytes for parcel in parcels), default=0) // 8
    return torch.arange(1, 2 * words, 2, dtype=torch.int64, device=device)


def make_parcels(
    link: Link, parts: list[Part], dtypes: dict[str, torch.dtype], max_bytes: int
) -> list[Parcel]:
    """Divide a link's parts into parcels of at most `max_bytes` of data; a part that is larger is cut by rows.

    dtypes: {engine's parameter: its dtype}, in which the data travels. A single row larger than `max_bytes` makes a
    parcel of its own.
    """
    whole_bytes = max(_ALIGNMENT, max_bytes // _ALIGNMENT * _ALIGNMENT)  # parts are padded to the alignment
    parcels: list[Parcel] = []
    pending: list[Part] = []
    offsets: list[int] = []
    size = 0

    def close() -> None:
        kinds = tuple(dtypes[part.engine] for part in pending)
        parcels.append(Parcel(link, len(parcels), tuple(pending), kinds, tuple(offsets), size))

    for part in parts:
        itemsize = dtypes[part.engine].itemsize
        for piece in _cut(part, whole_bytes // itemsize):
            needed = padded_to(piece.move.numel * itemsize, _ALIGNMENT)
            if pending and size + needed > max_bytes:
                close()
                pending, offsets, size = [], [], 0
            pending.append(piece)
            offsets.append(size)
            size += needed
    if pending:
        close()
    return parcels


def _cut(part: Part, max_numel: int) -> Iterator[Part]:
    """By rows, into parts of at most so many elements."""
    move = part.move
    step = max(1, max_numel // prod(move.shape[1:]))
    if move.shape[0] <= step:
        yield part
        return
    for first in range(0, move.shape[0], step):
        rows = min(step, move.shape[0] - first)
        start = (move.start[0] + first, *move.start[1:])
        shape = (rows, *move.shape[1:])
        cut = Move(
            move.hf,
            start,
            shape,
            _moved(move.source_at, len(shape), first),
            _moved(move.target_at, len(shape), first),
        )
        yield Part(part.megatron, part.engine, cut)


def _moved(at: tuple[int, ...], dimensions: int, rows: int) -> tuple[int, ...]:
    lead = len(at) - dimensions
    return (*at[:lead], at[lead] + rows, *at[lead + 1 :])


def parcels_in_order(
    plan: ReshardPlan, links: dict[Link, list[Part]], dtypes: dict[str, torch.dtype], max_bytes: int
) -> list[Parcel]:
    """All parcels of these links, in the order in which both sides go through theirs; the rest as of `make_parcels`.

    Everybody's order is part of one order of all parcels, so nobody waits for somebody who waits for him. Within it, neighbouring
    parcels go from different senders to different receivers.
    """

    places = {receiver: place for place, receiver in enumerate(plan.engine_ranks)}

    def turn(parcel: Parcel) -> tuple:
        sender, receivers = parcel.link.sender, parcel.link.receivers
        return parcel.number, (places[receivers[0]] - sender) % len(places), sender, receivers

    parcels = [
        parcel for link, parts in links.items() for parcel in make_parcels(link, parts, dtypes, max_bytes)
    ]
    return sorted(parcels, key=turn)

"""Parcels: rectangles of many tensors packed into one buffer, with a digest (checksum) per tensor.

The sender packs a parcel from its parameters. The receiver unpacks the parcel into its own parameters, in the
same order. Then the receiver packs the parcel again from its parameters and compares digests. So a digest
covers the weights as they are stored in the engine, not only the bytes that were transferred.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch

from grpo_megatron.batch.layout import padded_to
from grpo_megatron.model.pieces import Move
from grpo_megatron.weights.sync.plan import Link, Part, ReshardPlan

# Digests and their sums are taken modulo this number.
DIGEST_MODULUS = 2**64
# Parts start at a multiple of this many bytes. Views of a wide dtype need this alignment, and so do digests,
# which count in words of 8 bytes.
_ALIGNMENT = 16


class TensorSpan(NamedTuple):
    """A range of a buffer of packed weights (a parcel) whose contents belong to one HF tensor.

    hf: name of the HF tensor.
    start: index of the range's first 8-byte word in the buffer.
    end: index after its last 8-byte word.
    """

    hf: str
    start: int
    end: int


@dataclass(frozen=True)
class Parcel:
    """The layout of one message of a weight sync: rectangles of several parameters, packed into one buffer.

    The buffer has `total_bytes` bytes. It contains the rectangles (`parts`), followed by one int64 digest
    (checksum) for each range in `tensor_spans`.
    """

    link: Link
    """The sender and the receivers of the message."""
    index: int
    """Index of the message among the messages of the same link, from 0."""
    parts: tuple[Part, ...]
    """The rectangles that the message contains, in the order of the buffer."""
    dtypes: tuple[torch.dtype, ...]
    """Dtype of each rectangle of `parts` in the buffer, which is the dtype of the engine's parameter."""
    offsets: tuple[int, ...]
    """Byte offset of each rectangle of `parts` in the buffer."""
    data_bytes: int
    """Bytes of all rectangles in the buffer, including the gaps between them."""

    @cached_property
    def tensor_spans(self) -> list[TensorSpan]:
        """Ranges of the packed buffer with one digest (checksum) each. A range belongs to one HF tensor."""
        ends = (*self.offsets[1:], self.data_bytes)
        found: list[TensorSpan] = []
        for part, start, end in zip(self.parts, self.offsets, ends, strict=True):
            if found and found[-1].hf == part.move.hf:
                start = 8 * found.pop().start
            found.append(TensorSpan(part.move.hf, start // 8, end // 8))
        return found

    @property
    def total_bytes(self) -> int:
        return self.data_bytes + 8 * len(self.tensor_spans)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[Part, torch.Tensor]]:
        for part, dtype, offset in zip(self.parts, self.dtypes, self.offsets, strict=True):
            size = part.move.numel * dtype.itemsize
            yield part, buffer[offset : offset + size].view(dtype).view(part.move.shape)

    def pack(self, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy this message's rectangles from the sender's parameters into a buffer, in the engine's dtypes.

        The digests (checksums) at the end of the buffer are not written.

        parameters: {Megatron name: this trainer rank's shard}.
        buffer: uint8 [total_bytes or more].
        """
        self._clear_gaps(buffer)
        for part, view in self._views(buffer):
            view.copy_(part.move.source(parameters[part.megatron]))

    def pack_again(self, parameters: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """Copy this message's rectangles from the receiver's parameters back into a buffer.

        The receiver needs the packed buffer to compute the digests (checksums) of the weights that the engine
        really has, and to decode deltas. The digests at the end of the buffer are not written.

        parameters: {name of an engine's parameter: this rank's part of it}.
        buffer: uint8 [total_bytes or more].
        """
        self._clear_gaps(buffer)
        for part, view in self._views(buffer):
            view.copy_(part.move.target(parameters[part.engine]))

    def unpack(self, buffer: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy this message's rectangles from a buffer into the receiver's parameters.

        buffer: uint8 [total_bytes or more], the packed message.
        parameters: {name of an engine's parameter: this rank's part of it}, written in place.
        """
        for part, view in self._views(buffer):
            part.move.target(parameters[part.engine]).copy_(view)

    def _clear_gaps(self, buffer: torch.Tensor) -> None:
        """Set the unused bytes between packed rectangles to 0, because checksums include these bytes."""
        ends = (*self.offsets[1:], self.data_bytes)
        for part, dtype, start, end in zip(self.parts, self.dtypes, self.offsets, ends, strict=True):
            used = start + part.move.numel * dtype.itemsize
            if used < end:
                buffer[used:end] = 0

    def digests(self, buffer: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return the digest (checksum) of each of this message's `tensor_spans`, int64 [tensor_spans].

        The buffer is read as int64 words. The digest is the sum of (2k + 1) * word k modulo 2^64 over the
        words of the span, where k is the word's index in the buffer. An odd factor is invertible modulo 2^64,
        so a change of one word always changes the digest. The factors of any two words differ, so swapped
        words are almost always detected too.

        buffer: uint8 [total_bytes or more], the packed message.
        factors: the numbers 2k + 1, from `odd_factors`.
        """
        words = buffer[: self.data_bytes].view(torch.int64)
        if not words.is_cuda:  # torch.dot is several times faster, but does not support integers on a GPU
            return torch.stack(
                [torch.dot(words[start:end], factors[start:end]) for _, start, end in self.tensor_spans]
            )
        products = factors[: len(words)] * words
        return torch.stack([products[start:end].sum() for _, start, end in self.tensor_spans])

    def sent_digests(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view of the sender's digests (checksums) at the end of a buffer, int64 [tensor_spans].

        buffer: uint8 [total_bytes or more], the packed message.
        """
        return buffer[self.data_bytes : self.total_bytes].view(torch.int64)


def odd_factors(parcels: list[Parcel], device: torch.device) -> torch.Tensor:
    """Return the factors 1, 3, 5, ... by which `Parcel.digests` multiplies words for checksums, int64 [n].

    n is the number of 8-byte words in the largest parcel, so that the result can be used for all parcels.
    """
    words = max((parcel.data_bytes for parcel in parcels), default=0) // 8
    return torch.arange(1, 2 * words, 2, dtype=torch.int64, device=device)


def make_parcels(
    link: Link, parts: list[Part], dtypes: dict[str, torch.dtype], max_bytes: int
) -> list[Parcel]:
    """Divide the rectangles that are sent over a link into parcels of at most `max_bytes` bytes of data.

    A parcel is one message of packed weights, and a link is a sender with its receivers. A rectangle larger
    than `max_bytes` is cut by rows. A single row larger than `max_bytes` gets a parcel of its own.

    parts: the rectangles.
    dtypes: {name of an engine's parameter: its dtype}. Data is sent in this dtype.
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
    """Cut a rectangle by rows. Yield rectangles of at most `max_numel` elements, but at least one row."""
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
    """Divide the weights that are sent over some links into parcels, in the order in which they are sent.

    A parcel is one message of packed weights, and a link is a sender with its receivers. All processes send
    and receive their parcels in the same global order, so that they cannot deadlock. In this order,
    neighbouring parcels tend to have different senders and different receivers, so that transfers run in
    parallel.

    plan: the reshard plan that the links belong to.
    links: {link: rectangles that are sent over it}.
    dtypes: {name of an engine's parameter: its dtype}.
    max_bytes: maximum bytes of data in a parcel.
    """

    places = {receiver: place for place, receiver in enumerate(plan.engine_ranks)}

    def turn(parcel: Parcel) -> tuple:
        sender, receivers = parcel.link.sender, parcel.link.receivers
        return parcel.index, (places[receivers[0]] - sender) % len(places), sender, receivers

    parcels = [
        parcel for link, parts in links.items() for parcel in make_parcels(link, parts, dtypes, max_bytes)
    ]
    return sorted(parcels, key=turn)

"""Protocols of the two sides of a transport, which every transport implements by one class each."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.parcels import Parcel

# A function that returns the maximum bytes that a parcel takes in a sync.
PayloadBytes = Callable[[Parcel], int]


class ParcelSender(Protocol):
    """The sending side of a transport, in the process of a trainer rank.

    For each parcel the caller calls `buffer` and then `send`, in the order of parcels.parcels_in_order.
    """

    def begin(self, sync_id: int) -> None:
        """Begin a weight sync. sync_id: that of its SyncCommand, which no other sync of the run has."""

    def buffer(self, size: int) -> torch.Tensor:
        """Return a buffer, uint8 [size], to fill with the next parcel. Wait until a buffer is free.

        Raises TimeoutError if no buffer becomes free in time, because receivers have not read older parcels.
        """

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        """Send the payload (the bytes to transfer) of a parcel.

        payload: the buffer that `buffer` returned last, a part of it, or another tensor of at most its size.
            The caller must not write to it afterwards.
        """

    def finish(self) -> None:
        """Wait until no parcel of this sync is in flight. Files are complete when `send` returns already."""

    def close(self) -> None: ...


class ParcelReceiver(Protocol):
    """The receiving side of a transport, in the process of one tensor-parallel rank of an engine."""

    def receive(
        self, sync_id: int, parcels: list[Parcel], payload_bytes: PayloadBytes
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """Yield (parcel, payload) for each of the parcels, in the order given. A payload is uint8 [bytes].

        sync_id: that of the SyncCommand, as for ParcelSender.begin.

        A payload is valid until the next one is requested, because its buffer is then used again.
        Raises TimeoutError if the next parcel does not arrive in time. The timeout is per parcel, so a whole
        sync may take longer.
        """

    def close(self) -> None: ...


def parcel_key(sync_id: int, parcel: Parcel, state: str) -> str:
    """Return the key under which sender and receiver store a state of a parcel in the key-value store.

    state: such as "sent" or "taken".
    """
    return f"{sync_id}/{parcel.link.name}/{parcel.index}/{state}"


def wait_for(store: dist.Store, key: str, timeout: float) -> None:
    """Wait until another process has set a key in the store. Raises TimeoutError after `timeout` seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise TimeoutError(f"no process reported {key} within {timeout:.0f} s") from error

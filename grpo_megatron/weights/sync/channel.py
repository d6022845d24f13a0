"""Protocols of the channels that carry parcels from trainer ranks to engine ranks.

Each transport implements one class for either side.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.parcels import Parcel

# A function that returns the maximum payload bytes of a parcel.
SizeOf = Callable[[Parcel], int]


class SendingChannel(Protocol):
    """The sending side of a transport, in the process of a trainer rank.

    For each parcel the caller calls `buffer` and then `send`, in the order of parcels.parcels_in_order.
    """

    def begin(self, number: int) -> None:
        """Begin a weight sync. number: sequence number of its Order, which no other sync of the run has."""

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


class ReceivingChannel(Protocol):
    """The receiving side of a transport, in the process of one tensor-parallel rank of an engine."""

    def receive(
        self, number: int, parcels: list[Parcel], size_of: SizeOf
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """Yield (parcel, payload) for each of the parcels, in the order given. A payload is uint8 [bytes].

        number: sequence number of the Order, as for SendingChannel.begin.
        size_of: returns the maximum payload bytes of a parcel.

        A payload is valid until the next one is requested, because its buffer is then used again.
        Raises TimeoutError if the next parcel does not arrive in time. The timeout is per parcel, so a whole
        sync may take longer.
        """

    def close(self) -> None: ...


def parcel_key(number: int, parcel: Parcel, what: str) -> str:
    """Return the key under which sender and receiver store a state of a parcel in the key-value store.

    number: sequence number of the Order.
    what: the state, such as "sent" or "taken".
    """
    return f"{number}/{parcel.link.name}/{parcel.number}/{what}"


def wait_for(store: dist.Store, key: str, timeout: float) -> None:
    """Wait until another process has set a key in the store. Raises TimeoutError after `timeout` seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise TimeoutError(f"no process reported {key} within {timeout:.0f} s") from error

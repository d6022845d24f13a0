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
    """The side of a trainer rank. Parcels are sent in the order of parcels.parcels_in_order."""

    def begin(self, number: int) -> None:
        """Begin a sync. number: the unique sequence number of its order."""

    def buffer(self, size: int) -> torch.Tensor:
        """Return a buffer, uint8 [size], to fill with the next parcel. Waits until a buffer is free.

        Raises TimeoutError if none becomes free in time.
        """

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        """Send a payload: the last buffer, a part of it, or other bytes that are no longer than the buffer.

        The caller must not write to the payload afterwards.
        """

    def finish(self) -> None:
        """Wait until every receiver has received everything."""

    def close(self) -> None: ...


class ReceivingChannel(Protocol):
    """The side of a tensor-parallel rank of an engine."""

    def receive(
        self, number: int, parcels: list[Parcel], size_of: SizeOf
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """Yield each parcel with its payload, uint8, in the order given.

        number: sequence number of the order.
        size_of: returns the maximum payload bytes of a parcel.

        A payload is valid until the next one is requested.
        Raises TimeoutError if the next parcel does not arrive in time. The timeout is per parcel, so a whole
        sync may take longer.
        """

    def close(self) -> None: ...


def parcel_key(number: int, parcel: Parcel, what: str) -> str:
    """Return a key for the key-value store. number: sequence number of the order."""
    return f"{number}/{parcel.link.name}/{parcel.number}/{what}"


def wait_for(store: dist.Store, key: str, timeout: float) -> None:
    """Wait until the store has a key. Raises TimeoutError after `timeout` seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise TimeoutError(f"{key} did not come within {timeout:.0f} s") from error

"""Protocols of the two sides of a transport of packed weights. A transport has one class for each side."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_megatron.errors import UserError
from grpo_megatron.weights.sync.parcels import Parcel

# Key that the driver sets in its store to end a sync in which a process has died.
ABANDONED = "abandoned"
# Seconds between two looks of a waiting process at this key.
_LOOK_SECONDS = 2.0

# A function that returns the maximum bytes that a parcel takes in a sync.
PayloadBytes = Callable[[Parcel], int]


class SyncAbandoned(UserError):
    """Error in a process whose weight sync was ended by the driver, because another process has died."""


class ParcelSender(Protocol):
    """The sending side of a transport for packed weights, in the process of a trainer rank.

    For each message (a parcel) the caller calls `buffer`, packs weights into the returned buffer, and calls
    `send`. All ranks send and receive messages in the same global order (parcels.parcels_in_order).

    Methods that wait raise SyncAbandoned if the driver ends the sync. Only the transport over process groups
    does not notice the end, and waits until its timeout.
    """

    def begin(self, sync_id: int) -> None:
        """Begin a weight sync.

        sync_id: id of the sync, unique within the run (SyncCommand.sync_id).
        """

    def buffer(self, size: int) -> torch.Tensor:
        """Wait until a buffer is free, and return it: uint8 [size], to be filled with the next message.

        Raises TimeoutError if the receivers do not read older messages in time, so that no buffer is free.
        """

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        """Send the bytes of a message: packed weights, a delta, or only digests (checksums).

        parcel: layout of the message.
        payload: uint8, the bytes. The payload is the tensor that `buffer` returned last, a part of that
            tensor, or another tensor that is not larger. The caller must not write to the payload afterwards.
        """

    def finish(self) -> None:
        """Wait until no message of this sync needs its buffer any more.

        The transport through files does not wait, because a file is complete when `send` returns.
        """

    def close(self) -> None: ...


class ParcelReceiver(Protocol):
    """The receiving side of a transport for packed weights, in the process of an engine rank."""

    def receive(
        self, sync_id: int, parcels: list[Parcel], payload_bytes: PayloadBytes
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """Yield (parcel, payload) for each of the messages `parcels`, in the order given.

        A payload is uint8 [bytes]: packed weights, a delta, or only digests (checksums). It is valid until
        the caller requests the next message, because its buffer is then used again.

        sync_id: id of the sync, the same as for ParcelSender.begin.
        parcels: layouts of the messages.
        payload_bytes: function that returns the maximum bytes of a message.

        Raises TimeoutError if the next message does not arrive in time. The timeout is per message, so a
        whole sync may take longer. Raises SyncAbandoned if the driver ends the sync, except in the transport
        over process groups.
        """

    def close(self) -> None: ...


def parcel_key(sync_id: int, parcel: Parcel, state: str) -> str:
    """Return the key with which one side tells the other, through a key-value store, the state of a message.

    One side sets the key when the message has reached the state, and the other side waits for the key.

    sync_id: id of the weight sync.
    parcel: layout of the message.
    state: name of the state, such as "sent" or "taken".
    """
    return f"{sync_id}/{parcel.link.name}/{parcel.index}/{state}"


def wait_for(store: dist.Store, key: str, timeout: float, driver: dist.Store) -> None:
    """Wait until another process has set a key in the store.

    driver: the driver's store. The driver sets the key ABANDONED in it to end a sync.

    Raises SyncAbandoned if the driver ends the sync, and TimeoutError after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = max(0.0, deadline - time.monotonic())
        try:
            store.wait([key], timedelta(seconds=min(left, _LOOK_SECONDS)))
            return
        except dist.DistStoreError as error:
            if driver.check([ABANDONED]):
                raise SyncAbandoned("the weight sync was ended, because an engine has died") from error
            if left <= _LOOK_SECONDS:
                raise TimeoutError(
                    f"no process reported {key} within {timeout:.0f} s (weight_sync.timeout); the other side "
                    "of the weight sync has failed or is too slow"
                ) from error

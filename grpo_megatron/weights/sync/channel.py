"""What carries parcels from the trainer's ranks to the engines' ranks; one pair of classes for each transport."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.parcels import Parcel

# Of a parcel: how many bytes its payload has at most.
SizeOf = Callable[[Parcel], int]


class SendingChannel(Protocol):
    """On a rank of the trainer; parcels are sent in the global order of parcels.in_global_order."""

    def begin(self, number: int) -> None:
        """A sync begins; number: of its order, which no other has."""

    def buffer(self, size: int) -> torch.Tensor:
        """uint8 [size] to fill with the next parcel; waits until one is free. Raises TimeoutError if none becomes free in time."""

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        """payload: the last buffer, a part of it, or other bytes, no more than its size; nobody else may write to it any more."""

    def finish(self) -> None:
        """Waits until every receiver has taken everything."""

    def close(self) -> None: ...


class ReceivingChannel(Protocol):
    """On a tensor-parallel rank of an engine."""

    def receive(
        self, number: int, parcels: list[Parcel], size_of: SizeOf
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        """Each parcel, in the order given, with its payload uint8, which is valid until the next one is asked for.

        Raises TimeoutError where nothing arrives in time; as long as parcels do arrive, the whole may take longer.
        """

    def close(self) -> None: ...


def parcel_key(number: int, parcel: Parcel, what: str) -> str:
    """Of a store. number: of the order."""
    return f"{number}/{parcel.link.name}/{parcel.number}/{what}"


def wait_for(store: dist.Store, key: str, timeout: float) -> None:
    """Until a key is there. Raises TimeoutError after so many seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except dist.DistStoreError as error:
        raise TimeoutError(f"{key} did not come within {timeout:.0f} s") from error

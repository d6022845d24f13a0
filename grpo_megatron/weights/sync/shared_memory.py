"""Parcels through memory that the trainer's rank and the engine's rank share: on one GPU or node by CUDA IPC, on a CPU as a file in memory.

A sender has a few slots, which it fills in turn; a slot is free again when all receivers of its parcel have said so. So no second copy
of the model is alive. Both sides are on one node, and tell each other of parcels through a store that the sender serves there: all
the nodes' parcels through the driver's store would keep the driver busy for longer than they travel.
"""

import json
import mmap
import os
import pickle
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.weights.sync.channel import SizeOf, parcel_key, wait_for
from grpo_megatron.weights.sync.parcels import Parcel

_SLOTS = 2


def _make(size: int, device: torch.device) -> tuple[torch.Tensor, Any, IO | None]:
    """Memory of uint8 [size], how another process opens it, and the file that must stay open for that."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, reduce_tensor(memory), None
    # A file without a name: it is gone with the last process that has it open, whatever ends that one.
    file = os.fdopen(os.memfd_create("grpo-weights"), "rb+")
    # Reserved now: without memory left, the process would otherwise end by a signal in the middle of a copy.
    os.posix_fallocate(file.fileno(), 0, size)
    memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    return memory, (f"/proc/{os.getpid()}/fd/{file.fileno()}", size), file


def _open(handle: Any) -> torch.Tensor:
    first, second = handle
    if callable(first):
        return first(*second)
    with open(first, "rb+") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), second), dtype=torch.uint8)


def _settle(memory: torch.Tensor) -> None:
    """Copies on a device must be done before the other process is told of them."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


class SharedMemorySender:
    """store: reaches every receiver, to say where the memory is, and the store of this rank. slot_bytes: of the largest parcel.
    timeout: seconds that a slot may stay taken."""

    def __init__(self, store: dist.Store, rank: int, slot_bytes: int, device: torch.device, timeout: float):
        self._timeout = timeout
        self._memory, handle, self._file = _make(_SLOTS * slot_bytes, device)
        self._slot_bytes = slot_bytes
        self._taken: list[str] = []  # of each parcel, the key that says so
        self._server = StoreServer("127.0.0.1", timeout)
        self._store = self._server.store
        store.set(_memory_key(rank), pickle.dumps((self._server.address, handle)))

    def begin(self, number: int) -> None:
        self._sync, self._taken = number, []

    def buffer(self, size: int) -> torch.Tensor:
        number = len(self._taken)
        if number >= _SLOTS:
            self._wait(number - _SLOTS)
        start = number % _SLOTS * self._slot_bytes
        return self._memory[start : start + size]

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        number = len(self._taken)
        self._taken.append(parcel_key(self._sync, parcel, "taken"))
        start = number % _SLOTS * self._slot_bytes
        slot = self._memory[start : start + len(payload)]
        if payload.data_ptr() != slot.data_ptr():
            slot.copy_(payload.clone())  # a part of the slot itself may not be copied over itself
        _settle(slot)
        self._store.set(parcel_key(self._sync, parcel, "sent"), json.dumps((start, len(payload))))

    def finish(self) -> None:
        for number in range(max(0, len(self._taken) - _SLOTS), len(self._taken)):
            self._wait(number)

    def _wait(self, number: int) -> None:
        key = self._taken[number]
        wait_for(self._store, key, self._timeout)
        self._store.delete_key(key)

    def close(self) -> None:
        if self._file:
            self._file.close()


class _Carrier(NamedTuple):
    """A rank that hands parcels over, as a receiver has it."""

    memory: torch.Tensor
    store: dist.Store


class SharedMemoryReceiver:
    """store: of the senders' `store`. timeout: seconds to wait for a parcel."""

    def __init__(self, store: dist.Store, timeout: float):
        self._store, self._timeout = store, timeout
        self._carriers: dict[int, _Carrier] = {}

    def receive(self, number: int, parcels: list[Parcel], size_of: SizeOf) -> Iterator[tuple[Parcel, torch.Tensor]]:
        for parcel in parcels:
            memory, store = self._carrier(parcel.link.carrier)
            start, size = json.loads(self._value(store, parcel_key(number, parcel, "sent")))
            yield parcel, memory[start : start + size]
            _settle(memory)
            taken, receivers = parcel_key(number, parcel, "taken"), len(parcel.link.receivers)
            if receivers == 1 or store.add(f"{taken}/count", 1) == receivers:
                for key in (parcel_key(number, parcel, "sent"), f"{taken}/count"):
                    store.delete_key(key)
                store.set(taken, b"1")

    def _carrier(self, rank: int) -> _Carrier:
        if rank not in self._carriers:
            address, handle = pickle.loads(self._value(self._store, _memory_key(rank)))
            self._carriers[rank] = _Carrier(_open(handle), address.connect(self._timeout))
        return self._carriers[rank]

    def _value(self, store: dist.Store, key: str) -> bytes:
        wait_for(store, key, self._timeout)
        return store.get(key)

    def close(self) -> None:
        self._carriers.clear()


def _memory_key(rank: int) -> str:
    return f"memory/{rank}"

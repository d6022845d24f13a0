"""Parcels through memory that the trainer's rank and the engine's rank share: on one GPU or node by CUDA IPC, on a CPU as a file in memory.

A sender has a few slots, which it fills in turn; a slot is free again when all receivers of its parcel have said so in the store. So
no second copy of the model is alive.
"""

import contextlib
import mmap
import os
import pickle
import uuid
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_megatron.weights.sync.channel import SizeOf
from grpo_megatron.weights.sync.parcels import Parcel

_SLOTS = 2
# The files of one run, by the port of its store.
FILES = "/dev/shm/grpo-weights-{port}-*"


def _make(size: int, device: torch.device, port: int) -> tuple[torch.Tensor, bytes, str | None]:
    """Memory of uint8 [size], how another process opens it, and the file to remove once it has."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, pickle.dumps(reduce_tensor(memory)), None
    path = FILES.format(port=port).replace("*", uuid.uuid4().hex)
    with open(path, "xb+") as file:
        # Reserved now: a full /dev/shm would otherwise end the process by a signal in the middle of a copy.
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8), pickle.dumps((path, size)), path


def _open(handle: bytes) -> torch.Tensor:
    first, second = pickle.loads(handle)
    if callable(first):
        return first(*second)
    with open(first, "rb+") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), second), dtype=torch.uint8)


def _settle(memory: torch.Tensor) -> None:
    """Copies on a device must be done before the other process is told of them."""
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _wait(store: dist.Store, key: str, timeout: timedelta) -> None:
    """Until a key is there. Raises TimeoutError."""
    try:
        store.wait([key], timeout)
    except dist.DistStoreError as error:
        raise TimeoutError(f"{key} did not come within {timeout.total_seconds():.0f} s") from error


class SharedMemorySender:
    """store: reaches every receiver. port: of its server, for FILES. slot_bytes: of the largest parcel. timeout: seconds that a slot
    may stay taken."""

    def __init__(self, store: dist.TCPStore, port: int, rank: int, slot_bytes: int, device: torch.device, timeout: float):
        self._store, self._timeout = store, timedelta(seconds=timeout)
        self._memory, handle, self._file = _make(_SLOTS * slot_bytes, device, port)
        self._slot_bytes = slot_bytes
        self._taken: list[str] = []  # of each parcel, the key that says so
        store.set(f"memory/{rank}", handle)

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
        self._taken.append(_key(self._sync, parcel, "taken"))
        start = number % _SLOTS * self._slot_bytes
        slot = self._memory[start : start + len(payload)]
        if payload.data_ptr() != slot.data_ptr():
            slot.copy_(payload.clone())  # a part of the slot itself may not be copied over itself
        _settle(slot)
        self._store.set(_key(self._sync, parcel, "sent"), pickle.dumps((start, len(payload))))

    def finish(self) -> None:
        for number in range(max(0, len(self._taken) - _SLOTS), len(self._taken)):
            self._wait(number)
        if self._taken:
            self._unlink()  # every receiver has it open

    def _wait(self, number: int) -> None:
        key = self._taken[number]
        _wait(self._store, key, self._timeout)
        self._store.delete_key(key)

    def _unlink(self) -> None:
        if self._file:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._file)
            self._file = None

    def close(self) -> None:
        self._unlink()


class SharedMemoryReceiver:
    """timeout: seconds to wait for a parcel."""

    def __init__(self, store: dist.Store, timeout: float):
        self._store, self._timeout = store, timedelta(seconds=timeout)
        self._memories: dict[int, torch.Tensor] = {}

    def receive(self, number: int, parcels: list[Parcel], size_of: SizeOf) -> Iterator[tuple[Parcel, torch.Tensor]]:
        for parcel in parcels:
            memory = self._memory(parcel.link.carrier)
            start, size = pickle.loads(self._value(_key(number, parcel, "sent")))
            yield parcel, memory[start : start + size]
            _settle(memory)
            taken, receivers = _key(number, parcel, "taken"), len(parcel.link.receivers)
            if receivers == 1 or self._store.add(f"{taken}/count", 1) == receivers:
                for key in (_key(number, parcel, "sent"), f"{taken}/count"):
                    self._store.delete_key(key)
                self._store.set(taken, b"1")

    def _memory(self, carrier: int) -> torch.Tensor:
        if carrier not in self._memories:
            self._memories[carrier] = _open(self._value(f"memory/{carrier}"))
        return self._memories[carrier]

    def _value(self, key: str) -> bytes:
        _wait(self._store, key, self._timeout)
        return self._store.get(key)

    def close(self) -> None:
        self._memories.clear()


def _key(number: int, parcel: Parcel, what: str) -> str:
    return f"{number}/{parcel.link.name}/{parcel.number}/{what}"

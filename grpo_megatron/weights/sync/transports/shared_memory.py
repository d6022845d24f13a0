"""Transport of packed weights (parcels) through memory that a trainer rank shares with engine ranks.

Sender and receivers are on one node. The memory is shared by CUDA IPC on GPUs, and by a file in memory on
CPUs. A sender fills a few buffers (slots) in turn. A slot is free again when all receivers of its parcel have
confirmed that they have read it, so there is never a second copy of the whole model. Both sides announce
parcels through a key-value store that the sender serves on its node. The driver's store would handle the
announcements of all nodes more slowly than the parcels are transferred.
"""

import json
import mmap
import os
import pickle
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from grpo_megatron.cluster.store import StoreServer
from grpo_megatron.files import json_text
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.transports.base import PayloadBytes, parcel_key, wait_for

_SLOTS = 2
# Position of `storage_device` among the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor.
_STORAGE_DEVICE = 6


def _make(size: int, device: torch.device) -> tuple[torch.Tensor, Any, IO | None]:
    """Allocate shared memory of `size` bytes on a device. Return (memory, handle, file).

    memory: uint8 [size].
    handle: the argument with which `_open` maps the memory in another process.
    file: on a CPU, a file that must stay open until the other processes have mapped the memory; else None.
    """
    if device.type != "cpu":
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, reductions.reduce_tensor(memory), None
    # A file without a name disappears when the last process that has it open ends, even if it is killed.
    file = os.fdopen(os.memfd_create("grpo-weights"), "rb+")
    # Reserve the memory now. Otherwise a process that runs out of memory during a copy is killed by a signal.
    os.posix_fallocate(file.fileno(), 0, size)
    memory = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    return memory, (f"/proc/{os.getpid()}/fd/{file.fileno()}", size), file


def _open(handle: Any, device: torch.device) -> torch.Tensor:
    """Map a sender's shared memory into this process, for use on `device`. Return it as uint8 [bytes].

    The GPU index in a CUDA IPC handle is replaced by the index of `device`, because the two processes number
    GPUs differently. A trainer rank sees only its own GPU, as index 0. An engine's scheduler sees all GPUs of
    its engine, so that index 0 may be the GPU of another scheduler.

    handle: the handle that `_make` returned in the sender's process.
    """
    if device.type != "cpu":
        rebuild, arguments = handle
        return rebuild(*arguments[:_STORAGE_DEVICE], device.index, *arguments[_STORAGE_DEVICE + 1 :])
    path, size = handle
    with open(path, "rb+") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def _wait_for_copies(memory: torch.Tensor) -> None:
    """Wait until all copies on the memory's device are done, so that another process may use the memory."""
    if memory.device.type != "cpu":
        torch.get_device_module(memory.device).synchronize(memory.device)


class SharedMemorySender:
    """The sending side of the transport through shared memory (a base.ParcelSender).

    Weights are packed into slots: a few buffers in shared memory on the sender's device, used in turn.

    store: the driver's key-value store, in which the sender publishes the handle of its memory and the
        address of its own key-value store.
    rank: this trainer rank.
    slot_bytes: bytes of the largest message.
    device: device of the shared memory.
    timeout: maximum seconds to wait until receivers have read a slot.
    """

    def __init__(self, store: dist.Store, rank: int, slot_bytes: int, device: torch.device, timeout: float):
        self._timeout, self._driver = timeout, store
        self._memory, handle, self._file = _make(_SLOTS * slot_bytes, device)
        self._slot_bytes = slot_bytes
        self._taken: list[str] = []  # for each parcel, the key that its receivers set to confirm it
        self._server = StoreServer("127.0.0.1", timeout)
        self._store = self._server.store
        store.set(_memory_key(rank), pickle.dumps((self._server.address, handle)))

    def begin(self, sync_id: int) -> None:
        self._sync_id, self._taken = sync_id, []

    def buffer(self, size: int) -> torch.Tensor:
        index = len(self._taken)
        if index >= _SLOTS:
            self._wait(index - _SLOTS)
        start = index % _SLOTS * self._slot_bytes
        return self._memory[start : start + size]

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        index = len(self._taken)
        self._taken.append(parcel_key(self._sync_id, parcel, "taken"))
        start = index % _SLOTS * self._slot_bytes
        slot = self._memory[start : start + len(payload)]
        if payload.data_ptr() != slot.data_ptr():
            slot.copy_(payload.clone())  # clone, because the payload may overlap the slot
        _wait_for_copies(slot)
        self._store.set(parcel_key(self._sync_id, parcel, "sent"), json_text((start, len(payload))))

    def finish(self) -> None:
        for index in range(max(0, len(self._taken) - _SLOTS), len(self._taken)):
            self._wait(index)

    def _wait(self, index: int) -> None:
        key = self._taken[index]
        wait_for(self._store, key, self._timeout, self._driver)
        self._store.delete_key(key)

    def close(self) -> None:
        if self._file:
            self._file.close()


class _RankMemory(NamedTuple):
    """A trainer rank's shared memory and key-value store, opened by a receiver on the same node."""

    memory: torch.Tensor
    store: dist.Store


class SharedMemoryReceiver:
    """The receiving side of the transport through shared memory (a base.ParcelReceiver).

    It reads weights from the shared memory of the trainer ranks on its node.

    store: the driver's key-value store, in which senders publish the handles of their memory.
    device: the device of the engine's parameters.
    timeout: maximum seconds to wait for one message.
    """

    def __init__(self, store: dist.Store, device: torch.device, timeout: float):
        self._store, self._device, self._timeout = store, device, timeout
        self._opened: dict[int, _RankMemory] = {}

    def receive(
        self, sync_id: int, parcels: list[Parcel], payload_bytes: PayloadBytes
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        for parcel in parcels:
            memory, store = self._memory_of(parcel.link.relay_rank)
            start, size = json.loads(self._value(store, parcel_key(sync_id, parcel, "sent")))
            yield parcel, memory[start : start + size]
            _wait_for_copies(memory)
            taken, receivers = parcel_key(sync_id, parcel, "taken"), len(parcel.link.receivers)
            if receivers == 1 or store.add(f"{taken}/count", 1) == receivers:
                for key in (parcel_key(sync_id, parcel, "sent"), f"{taken}/count"):
                    store.delete_key(key)
                store.set(taken, b"1")

    def _memory_of(self, rank: int) -> _RankMemory:
        if rank not in self._opened:
            address, handle = pickle.loads(self._value(self._store, _memory_key(rank)))
            self._opened[rank] = _RankMemory(_open(handle, self._device), address.connect(self._timeout))
        return self._opened[rank]

    def _value(self, store: dist.Store, key: str) -> bytes:
        wait_for(store, key, self._timeout, self._store)
        return store.get(key)

    def close(self) -> None:
        self._opened.clear()


def _memory_key(rank: int) -> str:
    return f"memory/{rank}"

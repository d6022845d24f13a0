"""What a rank holds in its device's memory, and giving it back for a while.

Tensors are parked by emptying their storages and filled again in place: parameters, DDP buffers and
optimizer states are views of each other, and whoever holds one keeps a valid tensor.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from grpo_megatron.megatron.host_memory import host_memory

# name -> bytes
Bytes = dict[str, int]


def unique_storages(tensors) -> dict[int, torch.UntypedStorage]:
    """{address: storage} of the tensors that occupy memory."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage for storage in storages if storage.nbytes()}


class TrainingMemory:
    """The storages behind a DDP-wrapped model and its optimizer; found anew at each call, as some
    come into being with the first step.

    parameters: the weights. gradients: DDP's buffers. optimizer: moments, and master weights where
    they are not the weights themselves.
    """

    def __init__(self, ddp: list, optimizer):
        self._ddp, self._optimizer = ddp, optimizer

    def _buffers(self) -> Iterator:
        for ddp in self._ddp:
            yield from ddp.buffers
            yield from ddp.expert_parallel_buffers

    def parameters(self) -> dict[int, torch.UntypedStorage]:
        return unique_storages(parameter.data for ddp in self._ddp for parameter in ddp.parameters())

    def gradients(self) -> dict[int, torch.UntypedStorage]:
        return unique_storages(buffer.grad_data for buffer in self._buffers())

    def optimizer(self) -> dict[int, torch.UntypedStorage]:
        tensors = []
        for part in self._optimizer.parts():
            for group in part.optimizer.param_groups:
                tensors += [parameter.data for parameter in group["params"]]
            for state in part.optimizer.state.values():
                tensors += [value for value in state.values() if torch.is_tensor(value)]
        weights = self.parameters()
        return {address: storage for address, storage in unique_storages(tensors).items() if address not in weights}

    def resident(self) -> Bytes:
        """Bytes in the device's memory now, by kind."""
        kinds = {"parameters": self.parameters(), "gradients": self.gradients(), "optimizer": self.optimizer()}
        return {name: sum(storage.nbytes() for storage in storages.values()) for name, storages in kinds.items()}


class Parking:
    """Parked storages and their contents: in pinned host memory, or in files.

    folder: for files; None: pinned host memory where there is CUDA, else files in a temporary folder,
    because on a machine without a GPU the host's memory is the memory to be given back.
    """

    def __init__(self, folder: str | None = None):
        self._pinned: dict[str, torch.Tensor] = {}
        self._files: tempfile.TemporaryDirectory | None = None
        if folder is not None or not torch.cuda.is_available():
            if folder is not None:
                Path(folder).mkdir(parents=True, exist_ok=True)
            self._files = tempfile.TemporaryDirectory(prefix="parked-", dir=folder)
        self._parked: dict[str, list[tuple[torch.UntypedStorage, int, object]]] = {}

    def park(self, name: str, storages: dict[int, torch.UntypedStorage], keep: bool = True) -> None:
        """Empty the storages. keep: with their contents, else they come back as zeros."""
        if name in self._parked:
            raise RuntimeError(f"{name} is parked already")
        self._parked[name] = []
        for number, storage in enumerate(storages.values()):
            size = storage.nbytes()
            copy = self._write(f"{name}-{number}", storage) if keep else None
            storage.resize_(0)
            self._parked[name].append((storage, size, copy))
        _return_to_system()

    def unpark(self, name: str) -> None:
        """Give the storages their memory and contents back; nothing happens if `name` is not parked."""
        for storage, size, copy in self._parked.pop(name, []):
            storage.resize_(size)
            if copy is None:
                storage.fill_(0)
            else:
                self._read(copy, storage)

    def parked(self, name: str) -> bool:
        return name in self._parked

    def _write(self, name: str, storage: torch.UntypedStorage):
        if self._files is None:
            # Kept when it is empty again: to allocate it takes longer than to fill it.
            if name not in self._pinned or len(self._pinned[name]) != storage.nbytes():
                self._pinned[name] = host_memory(storage.nbytes())
            return self._pinned[name].copy_(_as_tensor(storage))
        path = Path(self._files.name, name)
        with path.open("wb") as file:
            file.write(_host_bytes(storage.cpu()))
        return path

    def _read(self, copy, storage: torch.UntypedStorage) -> None:
        if torch.is_tensor(copy):
            _as_tensor(storage).copy_(copy)
            return
        host = storage if storage.device.type == "cpu" else torch.UntypedStorage(storage.nbytes())
        with copy.open("rb") as file:
            if file.readinto(_host_bytes(host)) != storage.nbytes():
                raise RuntimeError(f"{copy} is shorter than what was parked in it")
        if host is not storage:
            storage.copy_(host)
        copy.unlink()


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage):
    """A storage on the host as a writable buffer. Tensor.numpy() would make it impossible to resize."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _return_to_system() -> None:
    """Freed memory back to where others can have it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps small blocks otherwise


def occupied() -> int:
    """Bytes this process occupies: reserved on the device, or anonymous resident memory without one."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    for line in Path(f"/proc/{os.getpid()}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say how much memory a process occupies")

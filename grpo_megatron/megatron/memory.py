"""What a rank holds in its device's memory, and giving it back for a while.

Tensors are parked by emptying their storages and filled again in place: parameters, DDP buffers and
optimizer states are views of each other, and whoever holds one keeps a valid tensor.
"""

import ctypes
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.host_memory import host_memory
from grpo_megatron.paths import output_folder_problem

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
    they are not the weights themselves. fp8_casts: the weights once more in FP8, which TransformerEngine keeps from one
    micro-batch to the next.
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
        return {
            address: storage
            for address, storage in unique_storages(tensors).items()
            if address not in weights
        }

    def _casts(self) -> Iterator[dict]:
        for ddp in self._ddp:
            for module in ddp.modules():
                yield getattr(module, "_fp8_workspaces", {})

    def fp8_casts(self) -> dict[int, torch.UntypedStorage]:
        quantized = (cast for casts in self._casts() for cast in casts.values())
        return unique_storages(
            part for cast in quantized for part in vars(cast).values() if torch.is_tensor(part)
        )

    def drop_fp8_casts(self) -> None:
        """The next micro-batch makes them again."""
        for casts in self._casts():
            casts.clear()

    def resident(self) -> Bytes:
        """Bytes in the device's memory now, by kind."""
        kinds = {
            "parameters": self.parameters(),
            "gradients": self.gradients(),
            "optimizer": self.optimizer(),
            "fp8_casts": self.fp8_casts(),
        }
        return {
            name: sum(storage.nbytes() for storage in storages.values()) for name, storages in kinds.items()
        }


class Parking:
    """Parked storages and their contents: in pinned host memory, or in files.

    folder: for files; None: pinned host memory where there is CUDA, else files in the system's folder for temporary ones,
    because on a machine without a GPU the host's memory is the memory to be given back.

    The files have no names: a rank ends by SIGKILL, and what it had parked in a file with a name would stay on the disk.
    """

    def __init__(self, folder: str | None = None):
        self._pinned: dict[str, torch.Tensor] = {}
        self._folder, self._in_files = folder, folder is not None or not torch.cuda.is_available()
        if folder is not None:
            if problem := output_folder_problem(folder):  # on this node; the driver may be on another
                raise UserError(f"megatron.offload_folder={folder} {problem} (on {socket.gethostname()})")
            Path(folder).mkdir(parents=True, exist_ok=True)
        # Of each name: the file of its contents, if in files, and each storage with its bytes and its copy, if in memory.
        self._parked: dict[
            str, tuple[BinaryIO | None, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]]
        ] = {}

    def park(self, name: str, storages: dict[int, torch.UntypedStorage], keep: bool = True) -> None:
        """Empty the storages. keep: with their contents, else they come back as zeros."""
        if name in self._parked:
            raise RuntimeError(f"{name} is parked already")
        # One for all storages, one behind the other: a process may open only so many files.
        file = tempfile.TemporaryFile(dir=self._folder) if self._in_files and keep else None  # noqa: SIM115 - open until unpark
        copies: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self._parked[name] = file, copies
        for number, storage in enumerate(storages.values()):
            size, copy = storage.nbytes(), None
            if file:
                host = storage.cpu()  # which must live until it is written
                file.write(_host_bytes(host))
            elif keep:
                copy = self._pin(f"{name}-{number}", storage)
            storage.resize_(0)
            copies.append((storage, size, copy))
        if file:
            file.seek(0)
        return_to_system()

    def unpark(self, name: str) -> None:
        """Give the storages their memory and contents back; nothing happens if `name` is not parked."""
        file, copies = self._parked.pop(name, (None, []))
        for storage, size, copy in copies:
            storage.resize_(size)
            if file:
                _read(file, storage)
            elif copy is not None:
                _as_tensor(storage).copy_(copy)
            else:
                storage.fill_(0)
        if file:
            file.close()

    def parked(self, name: str) -> bool:
        return name in self._parked

    def _pin(self, name: str, storage: torch.UntypedStorage) -> torch.Tensor:
        # Kept when it is empty again: to allocate it takes longer than to fill it.
        if name not in self._pinned or len(self._pinned[name]) != storage.nbytes():
            self._pinned[name] = host_memory(storage.nbytes())
        return self._pinned[name].copy_(_as_tensor(storage))


def _read(file: BinaryIO, storage: torch.UntypedStorage) -> None:
    host = storage if storage.device.type == "cpu" else torch.UntypedStorage(storage.nbytes())
    if file.readinto(_host_bytes(host)) != storage.nbytes():
        raise RuntimeError("the file of what was parked is shorter than that")
    if host is not storage:
        storage.copy_(host)


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage):
    """A storage on the host as a writable buffer. Tensor.numpy() would make it impossible to resize."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def return_to_system() -> None:
    """Freed memory back to where others can have it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps small blocks otherwise

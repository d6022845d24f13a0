"""Parking: freeing the memory of tensors for a while, with their contents in host memory or in files.

Parking a tensor empties its storage; unparking fills the same storage again. Parameters, DDP buffers and
optimizer states are views of common storages. So all tensors stay valid, and none has to be recreated.
"""

import ctypes
import io
import socket
import sys
import tempfile
from pathlib import Path

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.files import fill_buffer, write_buffer, writing
from grpo_megatron.megatron.memory.host import host_memory
from grpo_megatron.paths import output_folder_problem


class Parking:
    """Frees the memory of tensor storages and restores it later, with the contents saved in between.

    folder: folder for files with the contents. None: with CUDA, save the contents in pinned host memory;
        without CUDA, where host memory itself must be freed, save them in files in the system's folder for
        temporary files.

    The files have no names, so they vanish with the process, even if SIGKILL ends it.

    The constructor raises UserError if files cannot be created in `folder` on this node.
    """

    def __init__(self, folder: str | None = None):
        self._pinned: dict[str, torch.Tensor] = {}
        self._folder, self._in_files = folder, folder is not None or not torch.cuda.is_available()
        if folder is not None:
            if problem := output_folder_problem(folder):  # checked on this node; the driver may be on another
                raise UserError(
                    f"megatron.offload_folder={folder} {problem} (on {socket.gethostname()}); choose another "
                    "folder"
                )
            Path(folder).mkdir(parents=True, exist_ok=True)
        # {name: (file with the contents or None, [(storage, size in bytes, copy in host memory or None)])}
        self._parked: dict[
            str, tuple[io.RawIOBase | None, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]]
        ] = {}

    def park(self, name: str, storages: dict[int, torch.UntypedStorage], keep: bool = True) -> None:
        """Save the contents of some storages, and free their memory until `unpark(name)`.

        name: name of this group of storages, for `unpark`.
        storages: {address: storage}, as `unique_storages` returns them.
        keep: if False, do not save the contents. `unpark` then fills the storages with zeros.

        Raises RuntimeError if storages are parked under this name already. Raises UserError if the file
        cannot be written, for example on a full disk. In this case the storages keep their memory and
        contents.
        """
        if name in self._parked:
            raise RuntimeError(f"{name} is parked already: call unpark({name!r}) first")
        folder = self._folder or tempfile.gettempdir()
        try:
            with writing(f"megatron.offload_folder={folder} (on {socket.gethostname()})"):
                self._park(name, storages, keep)
        except BaseException:
            self.unpark(name)
            raise
        return_to_system()

    def _park(self, name: str, storages: dict[int, torch.UntypedStorage], keep: bool) -> None:
        # One file for all storages, one after the other, because a process may open only so many files. It
        # has no buffer, so that the contents are in the file before their memory is freed.
        file = (
            tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - open until unpark
            if self._in_files and keep
            else None
        )
        copies: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []
        self._parked[name] = file, copies
        for index, storage in enumerate(storages.values()):
            size, copy = storage.nbytes(), None
            if file:
                host = storage.cpu()  # must live until it is written
                write_buffer(file, _host_bytes(host))
            elif keep:
                copy = self._pin(f"{name}-{index}", storage)
            storage.resize_(0)
            copies.append((storage, size, copy))

    def unpark(self, name: str) -> None:
        """Restore memory and contents of the storages parked as `name`. Do nothing if none are parked."""
        file, copies = self._parked.pop(name, (None, []))
        offset = 0
        for storage, size, copy in copies:
            storage.resize_(size)
            if file:
                _read(file, offset, storage)
                offset += size
            elif copy is not None:
                _as_tensor(storage).copy_(copy)
            else:
                storage.fill_(0)
        if file:
            file.close()

    def parked(self, name: str) -> bool:
        return name in self._parked

    def _pin(self, name: str, storage: torch.UntypedStorage) -> torch.Tensor:
        # The pinned copy is kept for next time: allocating it takes longer than filling it.
        if name not in self._pinned or len(self._pinned[name]) != storage.nbytes():
            self._pinned[name] = host_memory(storage.nbytes())
        return self._pinned[name].copy_(_as_tensor(storage))


def _read(file: io.RawIOBase, offset: int, storage: torch.UntypedStorage) -> None:
    host = storage if storage.device.type == "cpu" else torch.UntypedStorage(storage.nbytes())
    if not fill_buffer(_host_bytes(host), file, offset):
        raise RuntimeError(
            f"the file with the parked memory is too short: it ends before {storage.nbytes()} bytes are read"
        )
    if host is not storage:
        storage.copy_(host)


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: torch.UntypedStorage):
    """Return a writable buffer that shares the memory of `storage`, which must be in host memory.

    Unlike Tensor.numpy(), this does not prevent the storage from being resized later.
    """
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def return_to_system() -> None:
    """Release the memory that torch (without CUDA: glibc) caches, so that other processes can use it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # glibc keeps small blocks otherwise

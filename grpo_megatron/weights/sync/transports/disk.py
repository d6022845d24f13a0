"""Transport of packed weights (parcels) as files in a folder that both sides access, for example on NFS.

The sides need no network between them except for the driver's key-value store, which tells receivers which
files are complete. Receivers do not poll for files: after a failed look-up NFS may report for half a minute
that a file is missing.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.errors import UserError
from grpo_megatron.files import new_file
from grpo_megatron.weights.sync.parcels import Parcel
from grpo_megatron.weights.sync.transports.base import PayloadBytes, parcel_key, wait_for

_RETRY_SECONDS = 0.05


def _folder(folder: Path, sync_id: int) -> Path:
    return folder / f"sync{sync_id:08d}"


def _name(parcel: Parcel) -> str:
    return f"{parcel.link.name}.{parcel.index}"


class DiskSender:
    """The sending side of the transport through files (a base.ParcelSender), with one file per message.

    The files of a sync are deleted when the next sync begins, or by `close`.

    store: the driver's key-value store, in which the sender announces complete files to receivers.
    folder: this run's subfolder of weight_sync.folder.
    device: the device of the buffers in which weights are packed.
    """

    def __init__(self, store: dist.Store, folder: str, device: torch.device):
        self._store, self._root, self._device = store, Path(folder), device
        self._written: dict[str, Path] = {}  # {key that announces the file: file}

    def begin(self, sync_id: int) -> None:
        self.close()
        for key in self._written:
            self._store.delete_key(key)
        self._written, self._sync_id, self._folder = {}, sync_id, _folder(self._root, sync_id)
        self._folder.mkdir(parents=True, exist_ok=True)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        path = self._folder / _name(parcel)
        try:
            with new_file(path, durable=False) as file:  # receivers never see a partial file
                file.write(payload.cpu().numpy())
        except OSError as error:
            raise UserError(
                f"weights cannot be written to {path}: {error}; set weight_sync.folder to a writable folder "
                "with enough space for the model"
            ) from error
        key = parcel_key(self._sync_id, parcel, "written")
        self._written[key] = path
        self._store.set(key, "")

    def finish(self) -> None:
        pass

    def close(self) -> None:
        for path in self._written.values():
            path.unlink(missing_ok=True)
        if self._written:
            with suppress(OSError):  # fails while other ranks have files there; the last rank succeeds
                self._folder.rmdir()


class DiskReceiver:
    """The receiving side of the transport through files (a base.ParcelReceiver).

    store: the driver's key-value store, in which the senders announce complete files.
    folder: this run's subfolder of weight_sync.folder.
    device: the device to which the contents are copied.
    timeout: maximum seconds to wait for one file.
    """

    def __init__(self, store: dist.Store, folder: str, device: torch.device, timeout: float):
        self._store, self._root, self._device, self._timeout = store, Path(folder), device, timeout

    def receive(
        self, sync_id: int, parcels: list[Parcel], payload_bytes: PayloadBytes
    ) -> Iterator[tuple[Parcel, torch.Tensor]]:
        for parcel in parcels:
            wait_for(self._store, parcel_key(sync_id, parcel, "written"), self._timeout, self._store)
            payload = self._read(_folder(self._root, sync_id) / _name(parcel))
            yield parcel, torch.from_numpy(payload).to(self._device)

    def _read(self, path: Path) -> np.ndarray:
        """Return the contents, uint8 [bytes], of a file that its sender has announced as complete.

        A file that another node wrote may become visible on this node only after a delay. Raises TimeoutError
        if the file does not become visible in time.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return np.fromfile(path, dtype=np.uint8)
            except FileNotFoundError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{path} did not appear on this node within {self._timeout:.0f} s after another "
                        "process wrote it; weight_sync.folder must be on a file system that all nodes share"
                    ) from error
                time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        pass

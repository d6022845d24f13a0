"""Parcels as files in a folder that both sides see, such as NFS or a mounted object store; they need no network between them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.errors import UserError
from grpo_megatron.weights.sync.channel import SizeOf
from grpo_megatron.weights.sync.parcels import Parcel

_POLL_SECONDS = 0.005


def _path(folder: Path, number: int, parcel: Parcel) -> Path:
    return folder / f"sync{number:08d}" / f"{parcel.link.name}.{parcel.number}"


class DiskSender:
    """folder: weight_sync.folder with the name of the run. Files of a sync go when the next one begins."""

    def __init__(self, folder: str, device: torch.device):
        self._folder, self._device = Path(folder), device
        self._written: list[Path] = []

    def begin(self, number: int) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)
        self._written, self._sync = [], number
        (self._folder / f"sync{number:08d}").mkdir(parents=True, exist_ok=True)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, parcel: Parcel, payload: torch.Tensor) -> None:
        path = _path(self._folder, self._sync, parcel)
        aside = path.with_name(f"{path.name}.partial")
        try:
            with open(aside, "wb") as file:
                file.write(payload.cpu().numpy())
            os.replace(aside, path)  # a receiver sees a whole file or none
        except OSError as error:
            raise UserError(
                f"weights cannot be written to {path}: {error}; weight_sync.folder needs room for the model"
            ) from error
        self._written.append(path)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        for path in self._written:
            path.unlink(missing_ok=True)


class DiskReceiver:
    """timeout: seconds to wait for a file."""

    def __init__(self, folder: str, device: torch.device, timeout: float):
        self._folder, self._device, self._timeout = Path(folder), device, timeout

    def receive(self, number: int, parcels: list[Parcel], size_of: SizeOf) -> Iterator[tuple[Parcel, torch.Tensor]]:
        for parcel in parcels:
            path, deadline = _path(self._folder, number, parcel), time.monotonic() + self._timeout
            while not path.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} did not come within {self._timeout:.0f} s")
                time.sleep(_POLL_SECONDS)
            yield parcel, torch.from_numpy(np.fromfile(path, dtype=np.uint8)).to(self._device)

    def close(self) -> None:
        pass

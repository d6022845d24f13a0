"""Buckets: the unit in which weights travel from trainer to engines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PackedTensor:
    """One tensor inside a bucket: bytes [start, end) hold `shape` elements of `dtype`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Several named tensors in one uint8 array, which the object store shares without copies."""

    contents: tuple[PackedTensor, ...]
    data: np.ndarray

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Named tensors that share memory with `data`, which may be read-only."""
        flat = torch.from_numpy(self.data)
        return [
            (item.name, flat[item.start : item.end].view(getattr(torch, item.dtype)).view(item.shape)) for item in self.contents
        ]


def make_buckets(named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`; a larger tensor gets a bucket of its own."""
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if pending and size + tensor_bytes > max_bytes:
            yield _fill(pending)
            pending, size = [], 0
        pending.append((name, tensor))
        size += tensor_bytes
    if pending:
        yield _fill(pending)


def _fill(named_tensors: list[tuple[str, torch.Tensor]]) -> Bucket:
    contents, parts, offset = [], [], 0
    for name, tensor in named_tensors:
        part = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        # Views of another dtype must start at a multiple of its size; 16 suits all of them.
        padding = -offset % 16
        parts += [torch.zeros(padding, dtype=torch.uint8), part]
        offset += padding
        contents.append(
            PackedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset, offset + part.numel())
        )
        offset += part.numel()
    return Bucket(tuple(contents), torch.cat(parts).numpy())

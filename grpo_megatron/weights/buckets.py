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
            (item.name, flat[item.start : item.end].view(getattr(torch, item.dtype)).view(item.shape))
            for item in self.contents
        ]


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int, stacks: dict[str, str] | None = None
) -> Iterator[Bucket]:
    """Fill buckets of at most `max_bytes`; a larger tensor gets a bucket of its own.

    stacks: as of entries.engine_stacks. Neighbours in one stack share a bucket: SGLang's DeepSeek loader puts both down
    projections together within one call, and drops without a word a one whose other one comes in the next.
    """
    pending: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named_tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        joined = pending and stacks and name in stacks and stacks[name] == stacks.get(pending[-1][0])
        if pending and size + tensor_bytes > max_bytes and not joined:
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
            PackedTensor(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                offset,
                offset + part.numel(),
            )
        )
        offset += part.numel()
    return Bucket(tuple(contents), torch.cat(parts).numpy())

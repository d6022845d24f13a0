"""Buckets: groups of full HF tensors, in which weights are sent through Ray's object store to the engines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PackedTensor:
    """The location of one tensor in a bucket's data."""

    name: str
    """HF name."""
    dtype: str
    """Name of the torch dtype, such as "bfloat16"."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    start: int
    """Byte offset of its first element."""
    end: int
    """Byte offset after its last element."""


@dataclass(frozen=True)
class Bucket:
    """Several named tensors in one uint8 array, so that Ray's object store shares them without copying.

    contents: name, dtype and location of each tensor in `data`.
    data: uint8 [bytes], the elements of all tensors.
    """

    contents: tuple[PackedTensor, ...]
    data: np.ndarray

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return (HF name, tensor) of every tensor. They share memory with `data`, which may be read-only."""
        flat = torch.from_numpy(self.data)
        return [
            (item.name, flat[item.start : item.end].view(getattr(torch, item.dtype)).view(item.shape))
            for item in self.contents
        ]


def make_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int, stacks: dict[str, str] | None = None
) -> Iterator[Bucket]:
    """Pack full HF tensors into buckets of at most `max_bytes` bytes, and yield each when it is full.

    A larger tensor gets a bucket of its own.

    named_tensors: (HF name, tensor).
    stacks: {HF name: engine's parameter that several HF tensors fill}, from model.entries.engine_stacks.
        Consecutive tensors of one such parameter stay in one bucket, even if it becomes too large. SGLang's
        DeepSeek loader fuses the two down projections of attention only if both arrive in the same call, and
        silently drops one that arrives without the other.
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
        # A view as another dtype must start at a multiple of that dtype's size. 16 works for all of them.
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

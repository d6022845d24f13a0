"""Functions that read and write the bytes of tensors in files, without an intermediate copy."""

import os
from pathlib import Path

import numpy as np
import torch

# Bytes per write() call. With larger calls a file system allocates memory in blocks of megabytes. On a
# virtual machine that returns free blocks to its host, these allocations made writing seven times slower.
_WRITE_BYTES = 512 * 2**10


def write(file, data) -> int:
    """Write a whole contiguous buffer to a file opened in binary mode.

    Return its size in bytes. Raises OSError.
    """
    data = memoryview(data).cast("B")
    for first in range(0, len(data), _WRITE_BYTES):
        file.write(data[first : first + _WRITE_BYTES])
    return len(data)


def bytes_of(tensor: torch.Tensor):
    """Return the elements of a CPU tensor as a row-major buffer. A contiguous tensor is not copied."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def fill(out: torch.Tensor, path: str | Path, offset: int) -> bool:
    """Fill a contiguous tensor with the bytes at `offset` of a file.

    Return False if the file ends too early.
    """
    # as_strided: torch calls a tensor of one element contiguous whatever its stride is.
    raw: np.ndarray = out.as_strided((out.numel(),), (1,)).view(torch.uint8).numpy()
    # Open the file for each call: a checkpoint may have thousands of files, more than a process may keep
    # open.
    with open(path, "rb", buffering=0) as file:
        os.lseek(file.fileno(), offset, os.SEEK_SET)
        got = 0
        while got < raw.nbytes and (more := file.readinto(raw[got:])):
            got += more
    return got == raw.nbytes

"""Functions that read and write the bytes of tensors in files, without an intermediate copy."""

import os
from pathlib import Path

import numpy as np
import torch

# Bytes per write() call. With larger calls a file system allocates memory in blocks of megabytes. On a
# virtual machine that returns free blocks to its host, these allocations made writing seven times slower.
_WRITE_BYTES = 512 * 2**10


def write(file, data) -> int:
    """Write all bytes of a contiguous buffer to a file that is open for writing in binary mode.

    It replaces file.write, which is slow for large buffers on some machines. Return the number of bytes.
    Raises OSError if the disk is full, for example.
    """
    data = memoryview(data).cast("B")
    for first in range(0, len(data), _WRITE_BYTES):
        file.write(data[first : first + _WRITE_BYTES])
    return len(data)


def bytes_of(tensor: torch.Tensor):
    """Return the elements of a CPU tensor as a row-major buffer, for `write`. No copy if it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def fill(out: torch.Tensor, path: str | Path, offset: int) -> bool:
    """Read the elements of a contiguous CPU tensor from a file, starting at byte `offset`.

    Return True if the tensor was filled, and False if the file ended before.
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

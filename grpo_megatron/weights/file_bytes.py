"""Bytes of a file straight into a tensor, and out of it."""

import os
from pathlib import Path

import numpy as np
import torch

# One call of the system. Larger ones let a file system take its memory in blocks of megabytes, which on a virtual machine that gives
# free blocks back to its host cost seven times the time.
_WRITE_BYTES = 512 * 2**10


def write(file, data) -> int:
    """Write all of a contiguous buffer to a file that is open in binary mode; its bytes. Raises OSError."""
    data = memoryview(data).cast("B")
    for first in range(0, len(data), _WRITE_BYTES):
        file.write(data[first : first + _WRITE_BYTES])
    return len(data)


def bytes_of(tensor: torch.Tensor):
    """Return the elements of a CPU tensor as a buffer, row by row; no copy unless they lie otherwise."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def fill(out: torch.Tensor, path: str | Path, offset: int) -> bool:
    """Read bytes of a file into a tensor whose elements lie side by side; False if the file ends before it is full."""
    # as_strided, because a single element counts as contiguous whatever its stride
    raw: np.ndarray = out.as_strided((out.numel(),), (1,)).view(torch.uint8).numpy()
    # Opened anew each time: thousands of files, one a rank, would be more than a process may have open.
    with open(path, "rb", buffering=0) as file:
        os.lseek(file.fileno(), offset, os.SEEK_SET)
        got = 0
        while got < raw.nbytes and (more := file.readinto(raw[got:])):
            got += more
    return got == raw.nbytes

"""Memory that a process occupies, on its GPU or on its host."""

import os
from pathlib import Path

import torch


def occupied() -> int:
    """Return how many bytes of memory this process has reserved on its GPU.

    Without a GPU, return the bytes of its anonymous resident memory on the host.
    """
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else anonymous_bytes(os.getpid())


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, without mapped files and shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no line RssAnon, so the memory of process {pid} is unknown")

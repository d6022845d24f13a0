"""How much memory a process occupies, where it computes."""

import os
from pathlib import Path

import torch


def occupied() -> int:
    """Bytes this process occupies: reserved on the device, or anonymous resident memory without one."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else anonymous_bytes(os.getpid())


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: neither files nor what it shares with others."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not say how much memory a process occupies")

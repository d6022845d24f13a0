"""Host memory for data that waits outside of the device.

With CUDA it is page-locked, so that copies run beside computation.
"""

import mmap
from dataclasses import dataclass, field

import torch


class _Pages(mmap.mmap):
    """Memory pages of this process. With CUDA they are locked until the last tensor on them is gone."""

    def __new__(cls, size: int):
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int):
        self._locked_at = None
        if torch.cuda.is_available():
            address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
            self._locked_at = address

    def __del__(self):
        if self._locked_at is not None:
            torch.cuda.cudart().cudaHostUnregister(self._locked_at)


def host_memory(size: int) -> torch.Tensor:
    """Return a tensor uint8 [size] in host memory. size must be above 0.

    With CUDA this is slow, because every page is touched and locked. Keep the memory; do not allocate it in
    every step. torch's own page-locked memory (`pin_memory`) comes in powers of two: 70 GB would take 128.
    """
    return torch.frombuffer(_Pages(size), dtype=torch.uint8)


@dataclass
class HostArena:
    """Host memory for tensors that are released together. It is kept for the next ones.

    block_bytes: the arena grows by at least this much.
    """

    block_bytes: int = 1 << 30
    _blocks: list[torch.Tensor] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised host tensor of this tensor's shape and dtype."""
        size = -(-tensor.nbytes // 64) * 64  # aligned, so that a tensor of any dtype may follow
        number = next((i for i, block in enumerate(self._blocks) if len(block) - self._used[i] >= size), None)
        if number is None:
            number = len(self._blocks)
            self._blocks.append(host_memory(max(size, self.block_bytes)))
            self._used.append(0)
        start = self._used[number]
        self._used[number] += size
        return self._blocks[number][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def clear(self) -> None:
        """Release all tensors of this arena. The next ones will overwrite them."""
        self._used = [0] * len(self._blocks)

"""Host memory for tensors that are moved out of device memory for a while.

With CUDA this memory is page-locked (pinned), so that copies to and from the device overlap with computation.
"""

import mmap
import sys
from dataclasses import dataclass, field

import torch


class _Pages(mmap.mmap):
    """Anonymous memory pages. With CUDA they stay page-locked until no tensor uses them any more."""

    def __new__(cls, size: int):
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, size: int):
        self._locked_at = None
        if torch.cuda.is_available():
            address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, size, 0)))
            self._locked_at = address

    def __del__(self, ending=sys.is_finalizing):  # a default, because globals may be gone at the end
        # The end of the process unlocks the pages. Parts of torch are gone by then.
        if self._locked_at is not None and not ending():
            torch.cuda.cudart().cudaHostUnregister(self._locked_at)


def host_memory(size: int) -> torch.Tensor:
    """Return a new uint8 tensor in host memory. With CUDA the memory is page-locked.

    torch's `pin_memory` is not used, because it allocates powers of two: 70 GB would take 128 GB.
    Page-locking is slow, so keep the tensor and reuse it in every step.

    size: number of bytes, at least 1.
    """
    return torch.frombuffer(_Pages(size), dtype=torch.uint8)


@dataclass
class HostArena:
    """Allocator of host tensors that are all released together. It reuses their memory for later tensors.

    block_bytes: the allocator requests memory in blocks of at least this many bytes.
    """

    block_bytes: int = 1 << 30
    _blocks: list[torch.Tensor] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised host tensor with the shape and dtype of `tensor`."""
        size = -(-tensor.nbytes // 64) * 64  # aligned, so that a tensor of any dtype may follow
        index = next((i for i, block in enumerate(self._blocks) if len(block) - self._used[i] >= size), None)
        if index is None:
            index = len(self._blocks)
            self._blocks.append(host_memory(max(size, self.block_bytes)))
            self._used.append(0)
        start = self._used[index]
        self._used[index] += size
        return self._blocks[index][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def clear(self) -> None:
        """Release all tensors that `like` returned. Later tensors will overwrite their memory."""
        self._used = [0] * len(self._blocks)

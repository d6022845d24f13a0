"""A memory saver for engines on a CPU: it releases memory and later restores it at the same addresses.

On GPUs SGLang uses the package torch_memory_saver, which unmaps the memory of a region but keeps its
addresses. On a CPU this module returns the pages to the system and makes them inaccessible until they are
resumed. An access before that ends the process with a segmentation fault, like an illegal memory access on a
GPU.

Imported in SGLang's own processes, and in the one that starts them. Written for SGLang 0.5.23.
"""

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter, _TorchMemorySaverAdapterNoop
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MADV_DONTNEED = 4
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class _Recorded(TorchDispatchMode):
    """A context manager that records the storages of all CPU tensors that are created inside its context.

    storages: {address of a storage object: weak reference to it}. New storages are added to this dict.
    """

    def __init__(self, storages: dict[int, StorageWeakRef]):
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                reference = StorageWeakRef(tensor.untyped_storage())
                self._storages.setdefault(reference.cdata, reference)
        return made


class HostMemorySaver(_TorchMemorySaverAdapterNoop):
    """The memory saver of CPU engines. It replaces the package torch_memory_saver, which needs CUDA.

    The memory of all tensors with the same tag is a region. `pause` releases the memory of a region, whose
    contents are lost. `resume` makes the memory usable again, filled with zeros.
    """

    enabled = True

    def __init__(self):
        self._regions: dict[str, dict[int, StorageWeakRef]] = defaultdict(dict)

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Return a context. Tensors that are created inside the context belong to the region with this tag.

        Raises NotImplementedError if `enable_cpu_backup` is True.
        """
        if enable_cpu_backup:
            raise NotImplementedError("the memory saver of CPU engines does not support enable_cpu_backup")
        storages = self._regions[tag]
        with _Recorded(storages):
            yield
        for address in [address for address, reference in storages.items() if reference.expired()]:
            del storages[address]

    def pause(self, tag: str) -> None:
        for start, size in self._pages(tag):
            _system("madvise", start, size, _MADV_DONTNEED)
            _system("mprotect", start, size, _PROT_NONE)

    def resume(self, tag: str) -> None:
        for start, size in self._pages(tag):
            _system("mprotect", start, size, _PROT_READ_WRITE)

    def _pages(self, tag: str) -> Iterator[tuple[int, int]]:
        """Yield (address, size in bytes) of the whole memory pages within each storage of a region.

        Only whole pages can be released, because the first and the last page of a storage may also contain
        other data. A storage that is freed or contains no whole page is left out.

        tag: tag of the region.
        """
        page = mmap.PAGESIZE
        for address, reference in self._regions[tag].items():
            storage = torch.UntypedStorage._new_with_weak_ptr(address) if not reference.expired() else None
            if storage is not None:
                start = -(-storage.data_ptr() // page) * page
                end = (storage.data_ptr() + storage.nbytes()) // page * page
                if end > start:
                    yield start, end - start


def _system(call: str, start: int, size: int, argument: int) -> None:
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    if getattr(libc, call)(ctypes.c_void_p(start), ctypes.c_size_t(size), argument):
        raise OSError(ctypes.get_errno(), f"{call} of {size} bytes: {os.strerror(ctypes.get_errno())}")


def register() -> HostMemorySaver:
    """Make SGLang use a HostMemorySaver in this process from now on, and return this HostMemorySaver.

    A HostMemorySaver releases and restores memory as the package torch_memory_saver does on GPUs.
    """
    saver = HostMemorySaver()
    create = TorchMemorySaverAdapter.create
    TorchMemorySaverAdapter.create = staticmethod(lambda enable: saver if enable else create(False))
    return saver


def weights_region():
    """Return a context. Tensors that are created inside the context are released together with the weights.

    The context has no effect if this engine was started without the memory saver.
    """
    from sglang.srt.runtime_context import get_exec

    return TorchMemorySaverAdapter.create(enable=get_exec().features.enable_memory_saver).region(
        GPU_MEMORY_TYPE_WEIGHTS
    )

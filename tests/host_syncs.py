"""Counter for operations that make the host wait for a GPU, or would do so, on a CPU.

On a GPU the host runs ahead of the device until an operation needs a value from the device, or its size. The
host then waits until the device has caught up. On a CPU the same operations cost nothing, but can be counted
as well.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_megatron.megatron.without_gpu import emulation

aten = torch.ops.aten
# Those that return a number, or a tensor whose shape depends on values.
ALWAYS = {
    aten._local_scalar_dense: "item() or bool(), int(), float()",
    aten.equal: "torch.equal",
    aten.nonzero: "nonzero",
    aten.masked_select: "masked_select",
    aten.bincount: "bincount",
    aten._unique: "unique",
    aten._unique2: "unique",
    aten.unique_dim: "unique",
    aten.unique_consecutive: "unique_consecutive",
}
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
READING = ("cpu", "numpy", "tolist", "__array__")
# In a line that reads a tensor which is the host's on every machine: Megatron compares generator states.
OF_THE_HOST = "torch.get_rng_state()"
# What the functions in there read stays on the device where the kernels are real.
OF_KERNELS = str(Path(emulation.__file__).parent)


class HostSyncs(TorchDispatchMode):
    """Context whose `found` has one text for each operation that would make the host wait, with its place.

    It sees values read by the host (item, bool, cpu, numpy, tolist), shapes that depend on values (nonzero,
    boolean masks as an index, unique, bincount, repeat_interleave without output_size), and blocking copies
    of Python's numbers or NumPy's arrays to the device. It does not see `copy_` between host and device and
    `to("cpu")`, which on a CPU look like any other operation. It works in one thread, which on a CPU includes
    the backward pass.
    """

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self._inside = False
        self._patched: list[tuple[object, str, Callable]] = []

    def __enter__(self):
        for name in READING:
            self._patch(torch.Tensor, name, lambda *args, name=name, **kwargs: f"Tensor.{name}")
        self._patch(torch.Tensor, "to", _blocking_copy)
        self._patch(torch, "tensor", _from_python)
        self._patch(torch, "as_tensor", _from_python)
        return super().__enter__()

    def __exit__(self, *exc):
        for where, name, plain in self._patched:
            setattr(where, name, plain)
        self._patched.clear()
        return super().__exit__(*exc)

    def _patch(self, where: object, name: str, what: Callable[..., str]) -> None:
        """Wrap a function so that its waits are recorded.

        what: is called with the function's arguments and returns what would wait, or nothing.
        """
        plain = getattr(where, name)

        def noticed(*args, **kwargs):
            if self._inside:
                return plain(*args, **kwargs)
            self._note(what(*args, **kwargs))
            self._inside = True  # how it is done is no second time
            try:
                return plain(*args, **kwargs)
            finally:
                self._inside = False

        self._patched.append((where, name, plain))
        setattr(where, name, noticed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self._inside:
            self._note(_waits(func.overloadpacket, args, kwargs))
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        where = _caller() if what else OF_THE_HOST
        if OF_THE_HOST not in where and OF_KERNELS not in where:
            self.found.append(f"{what}: {where}")


class CudaSyncs:
    """Context whose `found` has one text for each time that the host waited for the GPU, as torch reports
    it.
    """

    def __enter__(self):
        self.found: list[str] = []
        self._catching = warnings.catch_warnings()
        self._catching.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *exc):
        torch.cuda.set_sync_debug_mode("default")
        return self._catching.__exit__(*exc)

    def _note(self, message, *_, **__):
        if "synchronizing CUDA operation" in str(message):
            self.found.append(f"waited: {_caller()}")


def host_syncs():
    """Return the counter for this machine, a context with `found`."""
    return CudaSyncs() if torch.cuda.is_available() else HostSyncs()


def difference(fewer: list[str], more: list[str]) -> list[str]:
    """Return what was found more often in the second, and how many times more."""
    return [f"{count} x {text}" for text, count in (Counter(more) - Counter(fewer)).items()]


def _waits(operator, args, kwargs) -> str:
    if operator in ALWAYS:
        return ALWAYS[operator]
    if operator in INDEXING:
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        # One value for all that a mask chooses is filled in without counting them.
        fills = operator != aten.index and len(masks) == 1 and args[2].numel() == 1
        return "a boolean mask as an index" if masks and not fills else ""
    if operator == aten.repeat_interleave and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size"
    return ""


def _from_python(data, *args, device=None, **kwargs) -> str:
    on_device = torch.is_tensor(data) or device is None
    return "" if on_device else "Python's numbers to the device"


def _blocking_copy(tensor, *args, non_blocking=False, **kwargs) -> str:
    to_device = "device" in kwargs or any(isinstance(argument, str | torch.device) for argument in args)
    # NumPy's memory, which torch cannot resize; a GPU would have got a copy of it.
    from_numpy = tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()
    return "NumPy's array to the device" if to_device and from_numpy and not non_blocking else ""


def _caller() -> str:
    """Return the innermost line that belongs neither to torch, nor to Python's warnings, nor to this file."""
    own = (str(Path(torch.__file__).parent), warnings.__file__, __file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}"

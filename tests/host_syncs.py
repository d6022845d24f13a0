"""Counts, on a CPU, what would make the host wait for a GPU.

On a GPU the host runs ahead of the device, until an operation needs a value from there, or its size: then it waits until the
device has caught up. On a CPU the same operations cost nothing and are seen all the same.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class HostSyncs(TorchDispatchMode):
    """Within this context: `found` has what would wait and where, one text for each time.

    Seen are values read by the host (item, bool, cpu, numpy, tolist), shapes that depend on values (nonzero, boolean masks as an
    index, unique, bincount, repeat_interleave without output_size), and blocking copies to the device of Python's numbers or of
    NumPy's arrays. Not seen are `copy_` between host and device and `to("cpu")`, which on a CPU look like any other.
    Works in one thread, which on a CPU includes the backward pass.
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
        """what: called with the arguments; says what would wait, or nothing."""
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
        if OF_THE_HOST not in where:
            self.found.append(f"{what}: {where}")


def difference(fewer: list[str], more: list[str]) -> list[str]:
    """What was found more often in the second, with how many times."""
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
    """The innermost line that is neither torch's nor of this file."""
    own = (str(Path(torch.__file__).parent), __file__)
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(own)]
    return f"{frames[-1].filename}:{frames[-1].lineno}, {frames[-1].line}"

"""A torch backend with two devices, "fake:0" and "fake:1", on a machine without GPUs.

torch's own OpenReg does the same, but torch's packages lack it. fake.cpp is the part of it that weights need.
It refuses operations over several devices, which OpenReg passes to the CPU. After `install`, a process has
accelerators for good, so that tests call it in a process of their own.
"""

import subprocess
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("fake.cpp")


def build(folder: Path, compiler: str) -> Path:
    """Compile the backend into a folder, which takes about ten seconds, and return the library."""
    library = folder / "libfake.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [
        argument for path in cpp_extension.library_paths() for argument in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    command = [
        compiler,
        "-O0",
        "-std=c++20",
        "-fPIC",
        "-shared",
        "-w",
        *includes,
        str(SOURCE),
        "-o",
        str(library),
        *libraries,
    ]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


def install(library: Path) -> None:
    """Register the fake devices with torch in this process, and share their memory as CUDA IPC shares a
    GPU's.
    """
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("fake")
    module: Any = types.ModuleType("torch.fake")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = torch.ops.fake.current_device
    module.set_device = lambda device: torch.ops.fake.set_device(torch.device(device).index)
    module.synchronize = lambda device: None
    torch._register_device_module("fake", module)
    torch.multiprocessing.reductions.reduce_tensor = reduce_tensor


def reduce_tensor(memory: torch.Tensor) -> tuple:
    """Return what torch returns for GPU memory, as far as it is used.

    A trainer rank sees one GPU, device 0.
    """
    before, handle, after = [None] * 6, memory.data_ptr(), [None] * 6
    return rebuild_tensor, (*before, 0, handle, memory.nbytes, *after)


def rebuild_tensor(*arguments) -> torch.Tensor:
    device, handle, size = arguments[6:9]
    return torch.ops.fake.open(handle, size, device)

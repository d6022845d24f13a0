"""Environment variables of processes on a GPU: trainer ranks, engines, probes of `grpo-megatron doctor`."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

# All NCCL peers must have the same values. Otherwise groups of ranks and engines fail or hang when they are
# created. SGLang sets both to 0 in its schedulers unless the environment has them. In ranks, NCCL's own
# default is 1.
NCCL_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
# The Makefile has the same default.
_TOOLKIT = "/usr/local/cuda"


def cuda_home(environ: Mapping[str, str]) -> str | None:
    """Return the folder of the CUDA toolkit that libraries use to build kernels at run time, or None.

    The first one found is taken: CUDA_HOME or CUDA_PATH, then /usr/local/cuda, then the toolkit of the nvcc
    on PATH. The nvcc on PATH comes last, because it may be a link or a script outside of its toolkit, such as
    /usr/local/bin/nvcc, and libraries do not find the CUDA runtime from there. The result is None if no
    toolkit is found.

    environ: the driver's environment variables.
    """
    if named := environ.get("CUDA_HOME") or environ.get("CUDA_PATH"):
        return named
    if Path(_TOOLKIT, "bin", "nvcc").exists():
        return _TOOLKIT
    found = shutil.which("nvcc", path=environ.get("PATH", ""))
    return str(Path(found).resolve().parent.parent) if found else None


def gpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to set for every trainer rank and every engine on a GPU.

    - NCCL settings, which must be the same in all processes.
    - CUDA_HOME, if a CUDA toolkit is found.
    - PATH, which begins with the folder of the Python executable. pip installs `ninja` there, which SGLang
      needs to build kernels. The value contains `${PATH}`, which Ray replaces by the PATH of the node.

    environ: the driver's environment variables. Its NCCL settings and its CUDA toolkit are passed on.
    """
    found = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}${{PATH}}"}
    found |= {name: environ.get(name, value) for name, value in NCCL_DEFAULTS.items()}
    home = cuda_home(environ)
    return found | ({"CUDA_HOME": home} if home else {})


def preload_environment(
    environ: Mapping[str, str], cuda: str | None, packages: str | Path = sysconfig.get_path("purelib")
) -> dict[str, str]:
    """Return {"LD_LIBRARY_PATH": value}, which a process needs to preload the library torch_memory_saver.

    The library needs libcudart. pip installs libcudart into a folder that the dynamic loader does not search.
    The value begins with this folder, followed by the LD_LIBRARY_PATH of `environ`. The result is {} if pip
    has not installed a libcudart for this CUDA version.

    environ: environment variables of the process whose children preload the library.
    cuda: CUDA version of torch (torch.version.cuda), such as `13.0`; None if torch has no CUDA.
    packages: the folder that pip installs into.
    """
    major = (cuda or "").partition(".")[0]
    folders = [
        str(file.parent) for file in sorted(Path(packages, "nvidia").glob(f"*/lib/libcudart.so.{major}"))
    ]
    # This folder is first, so that the process loads the CUDA runtime that torch was built with. An empty
    # item would mean the current folder.
    items = [*folders[:1], *filter(None, [environ.get("LD_LIBRARY_PATH")])]
    return {"LD_LIBRARY_PATH": os.pathsep.join(items)} if folders else {}


def conflicts(environ: Mapping[str, str]) -> list[str]:
    """Return warnings about the user's NCCL and CUDA environment variables that have no effect or are wrong.

    environ: the driver's environment variables.

    Each warning is a text that says what to change. The list is empty if nothing is wrong.
    """
    nccl, found = gpu_environment(environ), []
    if nccl["NCCL_NVLS_ENABLE"] != "0" and nccl["NCCL_CUMEM_ENABLE"] == "0":
        found.append(
            f"NCCL_NVLS_ENABLE={nccl['NCCL_NVLS_ENABLE']} has no effect, because NCCL_CUMEM_ENABLE is 0; set "
            "NCCL_CUMEM_ENABLE=1, which NVLink SHARP needs, or unset NCCL_NVLS_ENABLE"
        )
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if connections != "1":
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections} has no effect, because trainer ranks always use 1 "
            "and SGLang sets 8 in engines; unset it"
        )
    home = cuda_home(environ)
    if home and not Path(home, "bin", "nvcc").exists():
        found.append(
            f"the CUDA toolkit {home} has no bin/nvcc on this machine, and engines need it to build their "
            "kernels; set CUDA_HOME to a complete toolkit"
        )
    return found


def filled_in(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environ` with `variables` added, as Ray would set them for a process.

    `${PATH}` in a value is replaced by the PATH of `environ`. The doctor (a command that checks the
    installation) uses this to start test processes with the environment of a rank or engine, without Ray.
    """
    return dict(environ) | {
        name: value.replace("${PATH}", environ.get("PATH", "")) for name, value in variables.items()
    }

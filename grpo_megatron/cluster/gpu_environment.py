"""Environment variables of processes on a GPU: trainer ranks, engines and the doctor's probes."""

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
    """Return the CUDA toolkit's folder, or None if there is none.

    The user's choice comes first, then /usr/local/cuda, then the folder of the nvcc on PATH. Libraries that
    build kernels ask for the nvcc on PATH before they look into /usr/local/cuda. They guess wrong where that
    nvcc is a link or a script, such as /usr/local/bin/nvcc, and then do not find the CUDA runtime to link
    with.
    """
    if named := environ.get("CUDA_HOME") or environ.get("CUDA_PATH"):
        return named
    if Path(_TOOLKIT, "bin", "nvcc").exists():
        return _TOOLKIT
    found = shutil.which("nvcc", path=environ.get("PATH", ""))
    return str(Path(found).resolve().parent.parent) if found else None


def gpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set for a process on a GPU. Ray replaces `${PATH}` by each node's own.

    environ: the driver's environment. Every process of the run gets the driver's NCCL settings and CUDA
        toolkit.

    SGLang, Triton and torch.compile build kernels at run time. SGLang looks for `ninja` on PATH, and pip
    installs it next to the Python executable.
    """
    found = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}${{PATH}}"}
    found |= {name: environ.get(name, value) for name, value in NCCL_DEFAULTS.items()}
    home = cuda_home(environ)
    return found | ({"CUDA_HOME": home} if home else {})


def preload_environment(
    environ: Mapping[str, str], cuda: str | None, packages: str | Path = sysconfig.get_path("purelib")
) -> dict[str, str]:
    """Return the variables with which torch_memory_saver's library can be preloaded.

    The library needs libcudart and does not say where it is. pip installs libcudart into a folder that the
    loader does not search. torch knows the folder, but is loaded later.

    environ: the environment of the process whose children preload the library.
    cuda: torch.version.cuda.
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
    """Return one line for each variable of the user that does not have the effect it seems to have."""
    nccl, found = gpu_environment(environ), []
    if nccl["NCCL_NVLS_ENABLE"] != "0" and nccl["NCCL_CUMEM_ENABLE"] == "0":
        found.append(
            f"NCCL_NVLS_ENABLE={nccl['NCCL_NVLS_ENABLE']} has no effect, because NVLink SHARP needs "
            "NCCL_CUMEM_ENABLE=1, which is 0 here"
        )
    connections = environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if connections != "1":
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections} has no effect: trainer ranks need 1, by which "
            "Megatron orders communication before compute, and SGLang sets 8 in engines"
        )
    home = cuda_home(environ)
    if home and not Path(home, "bin", "nvcc").exists():
        found.append(
            f"the CUDA toolkit {home} has no bin/nvcc on this machine, and engines need it to build their "
            "kernels: set CUDA_HOME"
        )
    return found


def filled_in(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the variables set, as Ray sets them on a node with this environment."""
    return dict(environ) | {
        name: value.replace("${PATH}", environ.get("PATH", "")) for name, value in variables.items()
    }

"""`grpo-megatron doctor`: checks the hardware and software of this machine, and says what can run on it."""

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from grpo_megatron.capabilities import Capabilities, release, version
from grpo_megatron.cluster.gpu_environment import conflicts, filled_in, gpu_environment
from grpo_megatron.commands import probes
from grpo_megatron.sandbox.contain import LANDLOCK, NAMESPACES
from grpo_megatron.sandbox.run import problem_with

OK, NOTE, PROBLEM = "ok", "note", "problem"

# The releases in requirements/ that this project is tested with or written for.
MEGATRON_CORE, MEGATRON_CORE_NEXT = "0.16.1", "0.19.2"
SGLANG, SGLANG_ON_GPU = "0.5.23", "0.5.17"

# Version of the first driver for CUDA 13.
LEAST_DRIVER = (580,)
# File in which the driver reports its version.
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check of this machine. It is printed as one line.

    level: OK, NOTE (something is not possible on this machine), or PROBLEM (something is broken)
    subject: what was checked, such as `cuDNN`
    text: what was found
    """

    level: str
    subject: str
    text: str


def _python() -> Diagnosis:
    current = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if not (3, 11) <= current <= (3, 13):
        return Diagnosis(PROBLEM, "Python", f"{text}; install Python 3.11, 3.12 or 3.13")
    return Diagnosis(OK, "Python", text)


def _driver() -> Diagnosis | None:
    """Check the version of NVIDIA's driver. Return None if no driver or no version is found.

    If the driver is too old, torch says only that CUDA is not available. This check gives the reason.
    """
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    if not found:
        return None
    if release(found[1]) < LEAST_DRIVER:
        return Diagnosis(
            PROBLEM, "driver", f"{found[1]}; CUDA 13 needs {LEAST_DRIVER[0]} or newer, so update the driver"
        )
    return Diagnosis(OK, "driver", found[1])


def _devices() -> list[Diagnosis]:
    import torch

    found = [Diagnosis(OK, "torch", torch.__version__)]
    if driver := _driver():
        found.append(driver)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            found.append(
                Diagnosis(
                    OK,
                    f"GPU {index}",
                    f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm {capability}",
                )
            )
        found.append(
            Diagnosis(
                OK, "CUDA", f"{torch.version.cuda}; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
            )
        )
    else:
        reason = "this build of torch is for CPUs" if torch.version.cuda is None else "no device is visible"
        found.append(
            Diagnosis(
                NOTE, "CUDA", f"not available ({reason}): ranks run on CPUs over gloo, engines torch-native"
            )
        )
    if not torch.distributed.is_gloo_available():
        found.append(
            Diagnosis(
                PROBLEM, "gloo", "torch was built without gloo, which CPU ranks need; install another build"
            )
        )
    return found


def _package(package: str, expected: tuple[str, ...], missing: str, required: bool) -> Diagnosis:
    """Check that a Python package is installed, in a version that this project is tested with.

    expected: the versions that this project is tested with. Another version is only a note. (): any version.
    missing: text for the user about what does not work without the package.
    required: True if a missing package is a problem, False if it is only a note.
    """
    have = version(package)
    if have is None:
        return Diagnosis(PROBLEM if required else NOTE, package, f"not installed: {missing}")
    if expected and release(have) not in map(release, expected):
        return Diagnosis(NOTE, package, f"{have}; this project is tested with {' and '.join(expected)}")
    return Diagnosis(OK, package, have)


def _sglang() -> list[Diagnosis]:
    import torch

    expected = (SGLANG_ON_GPU if torch.cuda.is_available() else SGLANG,)
    found = [
        _package("sglang", expected, "rollouts are not possible, only sft and rollout.replay", required=True)
    ]
    if not torch.cuda.is_available() and version("sglang"):
        from grpo_megatron.sglang.without_gpu import platform as cpu_platform

        installed = [entry.value for entry in metadata.entry_points(group="sglang.srt.platforms")]
        if f"{cpu_platform.__name__}:activate" not in installed:
            found.append(
                Diagnosis(
                    PROBLEM,
                    "SGLang's CPU platform",
                    "entry point not found or outdated; install this project again (pip install -e .)",
                )
            )
    return found


def _shared_memory() -> Diagnosis:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Diagnosis(PROBLEM, path, "missing, but Ray's object store and the weight sync need it")
    free = shutil.disk_usage(path).free / 2**30
    level = OK if free > 1 else NOTE
    return Diagnosis(
        level,
        path,
        f"{free:.1f} GiB free"
        + ("" if free > 1 else "; with less than 1 GiB, Ray falls back to files on disk"),
    )


def _sandbox() -> Diagnosis:
    """Check whether this machine can sandbox programs that a model wrote, as the `code` reward requires.

    The sandbox uses Linux namespaces or Landlock. With each of them, a test program tries to escape. If both
    fail, the result is a note, because only the `code` reward is affected.
    """
    problems = {containment: problem_with(containment) for containment in (NAMESPACES, LANDLOCK)}
    possible = [containment for containment, problem in problems.items() if problem is None]
    if possible:
        return Diagnosis(OK, "sandbox", f"programs that a model wrote are contained by {possible[0]}")
    reasons = "; ".join(f"{containment}: {problem}" for containment, problem in problems.items())
    return Diagnosis(
        NOTE,
        "sandbox",
        "the `code` reward is only possible with reward.code.isolation=no_network (docs/security.md): "
        f"{reasons}",
    )


def _result_of(subject: str, probe: Callable[..., str], *arguments: str) -> Diagnosis:
    try:
        return Diagnosis(OK, subject, probes.attempt(probe, *arguments))
    except probes.ProbeError as error:
        return Diagnosis(PROBLEM, subject, str(error))


def _imported(module: str, missing: str, required: bool) -> Diagnosis:
    """Check that a module can be imported. Another process imports it, because a broken library may crash.

    missing: text for the user about what does not work without the module.
    required: True if a module that is not installed is a problem, False if it is only a note. A module that
        is installed but cannot be imported is always a problem.
    """
    if util.find_spec(module.split(".")[0]) is None:
        return Diagnosis(PROBLEM if required else NOTE, module, f"not installed: {missing}")
    return _result_of(module, probes.import_of, module)


# The programs that build kernels on a machine with ranks or engines, and where to get them.
_BUILDERS = {
    "nvcc": "the toolkit of CUDA 13, and set CUDA_HOME to its folder",
    "ninja": "the package of this name from requirements/gpu-torch.txt",
    "c++": "a compiler of the system, such as Ubuntu's build-essential",
}


def _builders() -> Iterator[Diagnosis]:
    """Check that the compilers and headers exist that SGLang and Triton need to build kernels at run time.

    Yields one result for each. Programs are searched for in the PATH and CUDA_HOME of ranks and engines.
    """
    environment = filled_in(gpu_environment(os.environ), os.environ)
    for program, source in _BUILDERS.items():
        of_toolkit = os.path.join(environment.get("CUDA_HOME", ""), "bin")
        found = shutil.which(program, path=of_toolkit if program == "nvcc" else environment["PATH"])
        missing = Diagnosis(
            PROBLEM,
            program,
            f"not found, but engines build kernels with it when they start; install {source}",
        )
        yield Diagnosis(OK, program, found) if found else missing
    headers = os.path.join(sysconfig.get_path("include"), "Python.h")
    there = os.path.exists(headers)
    missing = Diagnosis(
        PROBLEM,
        "Python.h",
        f"{headers} is missing; Triton needs Python's headers: install a package such as python3.12-dev",
    )
    yield Diagnosis(OK, "Python.h", headers) if there else missing


def _gpu_libraries() -> Iterator[Diagnosis]:
    """Check the libraries and programs that only a machine with a GPU needs. Yield one result for each.

    Each setting of NCCL or CUDA in the environment that is wrong or has no effect gives a note.
    """
    import torch

    cudnn = torch.backends.cudnn.version()
    yield (
        Diagnosis(OK, "cuDNN", str(cudnn))
        if cudnn
        else Diagnosis(PROBLEM, "cuDNN", "torch does not find it, but attention needs it")
    )
    yield from (Diagnosis(NOTE, "environment", line) for line in conflicts(os.environ))
    yield from _builders()
    yield _imported("sglang.srt.entrypoints.engine", "rollouts are not possible", required=True)
    yield _imported("sgl_kernel", "engines need SGLang's kernels", required=True)
    yield _imported("flashinfer", "engines need its kernels of attention and sampling", required=True)
    # SGLang imports deep_gemm in every engine on Hopper. It tolerates a missing module, but not a module that
    # fails.
    yield _imported("deep_gemm", "engines in FP8 need its kernels", required=False)
    yield _result_of("an engine's kernel", probes.kernel)
    if util.find_spec("torch_memory_saver") is None:
        yield Diagnosis(
            NOTE,
            _SAVER,
            "not installed: engines cannot give their memory to the trainer (placement=colocated)",
        )
    else:
        yield _result_of(_SAVER, probes.memory_saver)
    # Package indexes have another package named apex, so a module of NVIDIA's is imported.
    yield _imported(
        "apex.optimizers", "nothing needs it; it is installed from NVIDIA's sources", required=False
    )


def _computes(here: Capabilities) -> Iterator[Diagnosis]:
    """Check the precision and speed of matrix products in fp32, bf16 and FP8, and of an all-reduce.

    here: capabilities of this machine. They say whether FP8 is possible.

    Yields one result for each product, and one for the all-reduce.
    """
    yield _result_of("matrix product, fp32", probes.matrix_product, "fp32")
    yield _result_of("matrix product, bf16", probes.matrix_product, "bf16")
    if here.fp8_problem:
        yield Diagnosis(NOTE, "FP8 training", f"not possible: {here.fp8_problem}")
    else:
        yield _result_of("matrix product, fp8", probes.matrix_product, "fp8")
    yield _result_of("all-reduce", probes.all_reduce)


_TE, _SAVER = "TransformerEngine", "torch_memory_saver"


def examine() -> Iterator[Diagnosis]:
    """Check this machine's Python, devices, packages, sandbox and speed, and yield each result in turn.

    A check that could crash runs in another process.
    """
    yield _python()
    yield from _devices()
    tested = (MEGATRON_CORE, MEGATRON_CORE_NEXT)
    yield _package("megatron-core", tested, "training is not possible", required=True)
    yield from _sglang()
    yield _package("ray", (), "no run can start its processes", required=True)
    yield _package("transformers", (), "tokenizers cannot be loaded", required=True)
    yield _package(
        "psutil", (), "engines cannot be watched, and megatron-core cannot be imported", required=True
    )
    yield _package("math-verify", (), "the `math` reward is not possible", required=False)
    yield _package("pyarrow", (), "Parquet files cannot be read", required=False)
    yield _package("datasets", (), "data sets of the form hf:NAME cannot be loaded", required=False)
    yield _shared_memory()
    yield _sandbox()
    here = Capabilities.of_this_machine()
    if here.gpus:
        yield from _gpu_libraries()
    if util.find_spec("transformer_engine") is None:
        yield Diagnosis(NOTE, _TE, "not installed: FP8 is not possible, and layers are Megatron's, in torch")
    else:
        # megatron-core imports TransformerEngine if it is installed. It tolerates a missing module, but not a
        # module that fails.
        yield _result_of(_TE, probes.import_of, "transformer_engine.pytorch")
    yield from _computes(here)


def doctor() -> int:
    """Run all checks of this machine, and print each result at once.

    Returns the exit status: 1 if a check found a problem, else 0.
    """
    problems = 0
    for finding in examine():
        problems += finding.level == PROBLEM
        print(f"{finding.level:<8} {finding.subject:<22}  {finding.text}", flush=True)
    if problems:
        print("1 problem" if problems == 1 else f"{problems} problems")
    else:
        print("no problems: sft and train can run here")
    return 1 if problems else 0

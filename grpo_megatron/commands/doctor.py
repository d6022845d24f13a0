"""`grpo-megatron doctor`: what this machine has, and what that allows."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata

from grpo_megatron.capabilities import Capabilities, release, version

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """level: ok, note (something is not possible here), or problem (something is broken)."""

    level: str
    subject: str
    text: str


def _python() -> Finding:
    current = sys.version_info[:2]
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    if not (3, 11) <= current <= (3, 13):
        return Finding(PROBLEM, "Python", f"{text}; 3.11 to 3.13 is supported")
    return Finding(OK, "Python", text)


def _devices() -> list[Finding]:
    import torch

    found = [Finding(OK, "torch", torch.__version__)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            found.append(
                Finding(OK, f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm {capability}")
            )
        found.append(Finding(OK, "CUDA", f"{torch.version.cuda}; NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"))
    else:
        reason = "this build of torch is for CPUs" if torch.version.cuda is None else "no device is visible"
        found.append(Finding(NOTE, "CUDA", f"not available ({reason}): ranks run on CPUs over gloo, engines torch-native"))
    if not torch.distributed.is_gloo_available():
        found.append(Finding(PROBLEM, "gloo", "torch was built without gloo, which CPU ranks need"))
    return found


def _package(package: str, expected: str | None, missing: str, required: bool) -> Finding:
    """expected: the version this project is written for; missing: what its absence means."""
    have = version(package)
    if have is None:
        return Finding(PROBLEM if required else NOTE, package, f"not installed: {missing}")
    if expected and release(have) != release(expected):
        return Finding(NOTE, package, f"{have}; this project is tested with {expected}")
    return Finding(OK, package, have)


def _sglang() -> list[Finding]:
    import torch

    expected = "0.5.17" if torch.cuda.is_available() else "0.5.23"
    found = [_package("sglang", expected, "no rollouts, only sft and rollout.replay", required=True)]
    if not torch.cuda.is_available() and version("sglang"):
        from grpo_megatron.sglang.cpu_platform import PLATFORM_NAME

        names = [entry.name for entry in metadata.entry_points(group="sglang.srt.platforms")]
        if PLATFORM_NAME not in names:
            found.append(
                Finding(PROBLEM, "SGLang's CPU platform", "entry point not found; install this project (pip install -e .)")
            )
    return found


def _shared_memory() -> Finding:
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Finding(PROBLEM, path, "missing: Ray's object store and weight sync use it")
    free = shutil.disk_usage(path).free / 2**30
    level = OK if free > 1 else NOTE
    return Finding(level, path, f"{free:.1f} GiB free" + ("" if free > 1 else "; Ray falls back to files below 1 GiB"))


def examine() -> list[Finding]:
    """Everything that can be found out without starting a process."""
    found = [_python(), *_devices()]
    found += [
        _package("megatron-core", "0.16.1", "no training", required=True),
        *_sglang(),
        _package("ray", None, "no processes", required=True),
        _package("transformers", None, "no tokenizers", required=True),
        _package("psutil", None, "engines are watched with it, and megatron-core imports it undeclared", required=True),
        _package("math-verify", None, "no `math` reward", required=False),
        _package("pyarrow", None, "no Parquet files", required=False),
        _package("datasets", None, "no hf: data sets", required=False),
        _package("apex", None, "no apex kernels; nothing needs them", required=False),
        _shared_memory(),
    ]
    here = Capabilities.of_this_machine()
    for subject, problem in (
        ("TransformerEngine layers", here.transformer_engine_problem),
        ("FP8 training", here.fp8_problem),
    ):
        found.append(Finding(NOTE, subject, f"not possible: {problem}") if problem else Finding(OK, subject, "possible"))
    return found


def doctor() -> int:
    """Print the findings; returns 1 if there is a problem."""
    found = examine()
    width = max(len(finding.subject) for finding in found)
    for finding in found:
        print(f"{finding.level:<8} {finding.subject:<{width}}  {finding.text}")
    problems = sum(finding.level == PROBLEM for finding in found)
    print(f"{problems} problems" if problems else "no problems: sft and train can run here")
    return 1 if problems else 0

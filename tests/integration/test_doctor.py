"""The doctor tries what it reports. Planted faults are reported, and none of them ends it."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from grpo_megatron.cli import main
from grpo_megatron.cluster.gpu_environment import cuda_home
from grpo_megatron.commands import doctor, probes
from tests.tools import unpacked


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A function planted(file, text) that makes a module which this process and the probes find first."""

    def plant(file: str, text: str) -> None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    monkeypatch.syspath_prepend(tmp_path)
    return plant


def report(capsys, status: int) -> dict[str, str]:
    """Return {subject: level and text} of a report that ends with this exit status."""
    capsys.readouterr()
    assert main(["doctor"]) == status
    lines = capsys.readouterr().out.splitlines()
    parts = [re.fullmatch(r"(\w+) +(.+?)  +(.+)", line) for line in lines[:-1]]
    return {part[2]: f"{part[1]} {part[3]}" for part in parts}


@pytest.mark.slow
def test_a_sound_machine(capsys):
    found = report(capsys, 0)
    for subject in ("Python", "torch", "megatron-core", "sglang", "ray", "/dev/shm"):
        assert found[subject].startswith("ok ")
    for precision in ("fp32", "bf16") if not torch.cuda.is_available() else ("fp32", "bf16", "fp8"):
        rate = re.match(r"ok (\S+) TFLOP/s", found[f"matrix product, {precision}"])
        assert 1e-4 < float(rate[1]) < 1e4
    assert re.match(r"ok (gloo, 2|NCCL, \d+) processes: \d+ MiB in \S+ ms", found["all-reduce"])
    assert re.match(
        "ok programs that a model wrote are contained by |note the `code` reward is only", found["sandbox"]
    )
    if not torch.cuda.is_available():
        assert found["FP8 training"] == "note not possible: TransformerEngine is not installed"


@pytest.mark.slow
def test_a_transformer_engine_that_ends_its_process_is_a_problem_and_no_more(planted, capsys):
    planted("transformer_engine/__init__.py", "")
    planted("transformer_engine/pytorch/__init__.py", "import os; os.abort()")
    found = report(capsys, 1)
    assert found["TransformerEngine"].startswith("problem its process was ended by SIGABRT: ")
    assert found["all-reduce"].startswith("ok ")


@pytest.mark.slow_when(lambda text: "_exit" in text)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise RuntimeError('cuDNN 9 is not there')", "^RuntimeError: cuDNN 9 is not there$"),
        ("import os; os._exit(0)", "^its process ended with exit status 0 but without a result$"),
        ("import os; os._exit(3)", "^it printed no message$"),
    ],
)
def test_how_an_import_failed_is_said(planted, text, says):
    planted("broken.py", text)
    with pytest.raises(probes.ProbeError, match=says):
        probes.attempt(probes.import_of, "broken")


@pytest.mark.slow
def test_a_library_that_hangs_is_given_up(planted):
    planted("hangs.py", "import time; time.sleep(60)")
    with pytest.raises(probes.ProbeError, match="did not finish within 1 s"):
        probes.attempt(probes.import_of, "hangs", timeout=1.0)


WRONG_PRODUCT = """
import torch
right = torch.Tensor.__matmul__
torch.Tensor.__matmul__ = lambda a, b: right(a, b) if a.dtype == torch.float64 else right(a, b) * 1.02
"""


@pytest.mark.slow
def test_a_product_that_is_wrong_is_said(planted):
    planted("sitecustomize.py", WRONG_PRODUCT)
    for precision in ("fp32", "bf16"):
        with pytest.raises(probes.ProbeError, match=rf"^a product in {precision} is off by 0\.02"):
            probes.attempt(probes.matrix_product, precision)


@pytest.mark.slow
def test_a_sum_that_is_wrong_is_said(planted):
    planted("sitecustomize.py", "import torch.distributed as dist\ndist.all_reduce = lambda tensor: None\n")
    with pytest.raises(probes.ProbeError, match=r"^the sum over 2 processes is wrong on process"):
        probes.attempt(probes.all_reduce)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_what_a_gpu_machine_needs_is_missing_here():
    found = {finding.subject: finding for finding in doctor._gpu_libraries()}
    for subject in ("cuDNN", "sgl_kernel", "an engine's kernel"):
        assert found[subject].level == doctor.PROBLEM
    for subject in ("torch_memory_saver", "deep_gemm", "apex.optimizers"):
        assert found[subject].level == doctor.NOTE
        assert found[subject].text.startswith("not installed: ")


@pytest.mark.parametrize("missing", ["nvcc", "ninja", "c++", "Python.h", None])
def test_what_builds_kernels_is_a_problem_where_it_is_missing(tmp_path, monkeypatch, missing):
    """A missing nvcc was only a note, and ninja was not checked, so that engines died at their start."""
    for path in ("toolkit/bin/nvcc", "bin/ninja", "bin/c++", "include/Python.h"):
        if not path.endswith(f"/{missing}"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))  # beside which pip puts ninja
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path / name))
    found = {finding.subject: finding.level for finding in doctor._builders()}
    expected = dict.fromkeys(("nvcc", "ninja", "c++", "Python.h"), doctor.OK)
    assert found == expected | ({missing: doctor.PROBLEM} if missing else {})


@pytest.mark.parametrize(
    ("text", "level", "says"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n",
            doctor.OK,
            "580.65.06",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.44.01  Release Build\n",
            doctor.OK,
            "590.44.01",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Thu May 29 2025\n",
            doctor.PROBLEM,
            "CUDA 13 needs 580",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.163.01  Release\n",
            doctor.PROBLEM,
            "550.163.01; ",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 2024\n",
            doctor.PROBLEM,
            "470.256.02; ",
        ),
    ],
)
def test_a_driver_that_is_too_old_is_said(tmp_path, monkeypatch, text, level, says):
    """torch only says that CUDA is not available, and the run would go on without the GPUs."""
    (tmp_path / "version").write_text(text + "GCC version:  gcc version 13.3.0\n")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    found = doctor._driver()
    assert found.level == level
    assert says in found.text


@pytest.mark.parametrize("text", [None, "", "something else\n"])
def test_without_a_driver_nothing_is_said_of_it(tmp_path, monkeypatch, text):
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert doctor._driver() is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a driver")
def test_the_memory_saver_is_tried_as_engines_start_it(monkeypatch):
    """Only its import was tried, which succeeds even where every engine ends with status 127."""
    runtime = unpacked("nvidia-cuda-runtime==13.0.96") / "nvidia" / "cu13" / "lib"
    monkeypatch.setenv("PYTHONPATH", f"{unpacked('torch_memory_saver==0.0.10')}:{os.getcwd()}")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(runtime))
    assert probes.attempt(probes.import_of, "torch_memory_saver")
    with pytest.raises(probes.ProbeError, match=r"error while loading shared libraries: libcuda\.so\.1"):
        probes.attempt(probes.memory_saver)


@pytest.mark.slow
@pytest.mark.skipif(
    cuda_home(os.environ) is None, reason="needs nvcc, which the package nvidia-cuda-nvcc has"
)
@pytest.mark.parametrize("problem", [None, "no ninja", "another toolkit"])
def test_an_engines_kernel_is_built_for_hopper(monkeypatch, tmp_path, problem):
    """The GPU stack's pinned SGLang builds it, with nothing but an engine's environment."""
    monkeypatch.setenv("PYTHONPATH", f"{unpacked('sglang==0.5.17')}:{os.getcwd()}")
    if problem is None:
        assert re.fullmatch(r"built for sm 9\.0a in \d+ s", probes.attempt(probes.kernel, "9.0", timeout=400))
        return
    if problem == "no ninja":
        for program in ("nvcc", "c++", "gcc"):
            (tmp_path / program).symlink_to(shutil.which(program) or "/nowhere")
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "nvcc").symlink_to(f"{cuda_home(os.environ)}/bin/nvcc")
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if problem == "no ninja" and Path(sys.executable).with_name("ninja").exists():
        pytest.skip("ninja is beside Python here")
    with pytest.raises(probes.ProbeError, match="ninja" if problem == "no ninja" else "cannot find|error"):
        probes.attempt(probes.kernel, "9.0", timeout=400)

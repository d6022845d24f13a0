"""The doctor tries what it reports: what is planted broken is said, and ends nothing."""

import os
import re

import pytest
import torch

from grpo_megatron.cli import main
from grpo_megatron.commands import doctor, probes


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """planted(file, text): a module that the processes of the probes, and this one, find before any other."""

    def plant(file: str, text: str) -> None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    monkeypatch.syspath_prepend(tmp_path)
    return plant


def report(capsys, status: int) -> dict[str, str]:
    """{subject: level and text} of a report with this exit status."""
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
    assert re.match("ok programs that a model wrote are contained by |note no `code` reward", found["sandbox"])
    if not torch.cuda.is_available():
        assert found["FP8 training"] == "note not possible: TransformerEngine is not installed"


@pytest.mark.slow
def test_a_transformer_engine_that_ends_its_process_is_a_problem_and_no_more(planted, capsys):
    planted("transformer_engine/__init__.py", "")
    planted("transformer_engine/pytorch/__init__.py", "import os; os.abort()")
    found = report(capsys, 1)
    assert found["TransformerEngine"].startswith("problem ended by SIGABRT: ")
    assert found["all-reduce"].startswith("ok ")


@pytest.mark.slow_when(lambda text: "_exit" in text)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise RuntimeError('cuDNN 9 is not there')", "^RuntimeError: cuDNN 9 is not there$"),
        ("import os; os._exit(0)", "^ended its process, with exit status 0$"),
        ("import os; os._exit(3)", "^without a message$"),
    ],
)
def test_how_an_import_failed_is_said(planted, text, says):
    planted("broken.py", text)
    with pytest.raises(probes.ProbeError, match=says):
        probes.attempt(probes.import_of, "broken")


@pytest.mark.slow
def test_a_library_that_hangs_is_given_up(planted):
    planted("hangs.py", "import time; time.sleep(60)")
    with pytest.raises(probes.ProbeError, match="did not end within 1 s"):
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
    for subject in ("cuDNN", "sgl_kernel"):
        assert found[subject].level == doctor.PROBLEM
    for subject in ("torch_memory_saver", "apex.optimizers"):
        assert found[subject].level == doctor.NOTE
        assert found[subject].text.startswith("not installed: ")

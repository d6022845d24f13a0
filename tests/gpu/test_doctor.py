"""The doctor finds nothing wrong with a machine with GPUs, FP8 included."""

import pytest
import torch

from grpo_megatron.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_every_probe_passes(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out
    report = capsys.readouterr().out
    for precision in ("fp32", "bf16", "fp8"):
        assert f"ok       matrix product, {precision}" in report
    for subject in (
        "TransformerEngine",
        "nvcc",
        "ninja",
        "c++",
        "Python.h",
        "an engine's kernel",
        "torch_memory_saver",
    ):
        assert f"ok       {subject} " in report
    assert "NCCL" in report

"""The doctor finds a machine with GPUs sound, FP8 included."""

import pytest
import torch

from grpo_megatron.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_every_probe_passes(capsys):
    assert main(["doctor"]) == 0, capsys.readouterr().out
    report = capsys.readouterr().out
    for precision in ("fp32", "bf16", "fp8"):
        assert f"ok       matrix product, {precision}" in report
    assert "ok       TransformerEngine" in report
    assert "NCCL" in report

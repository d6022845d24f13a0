"""benchmarks/gpu.py runs on a CPU as on a GPU, except for the kernels."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from grpo_megatron.capabilities import emulated_transformer_engine
from tests.tools import run_tool

pytestmark = pytest.mark.skipif(
    emulated_transformer_engine()[1] is not None, reason=str(emulated_transformer_engine()[1])
)


OTHERS = ["peak", "head", "export", "handover", "sleep", "loop", "fp8_error", "repeat"]
SHAPES = ["training-8b", "training-4b", "training-0.6b"]


def dry_run(*arguments, status: int, **environment: str) -> dict:
    """Return the JSON object of the last line."""
    command = [sys.executable, "benchmarks/gpu.py", "--dry-run", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | environment)
    assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_section_but_the_one_that_fails_reports(tmp_path):
    result = dry_run("--trained", tmp_path / "missing", status=1)
    assert result["dry_run"] is True
    assert list(result["failed"]) == ["fp8_error"]
    assert "missing" in result["failed"]["fp8_error"]
    assert result["skipped"] == {}
    assert sorted(result["sections"]) == sorted({*OTHERS, *SHAPES} - {"fp8_error"})
    measured = {name: value for name, (value, *_) in result["targets"].items()}
    assert [name for name, value in measured.items() if value is None] == [
        "fp8_error.fp8_tensorwise.mean_difference"
    ]
    for shape in SHAPES:
        figures = result["sections"][shape]
        assert figures["transformer_engine"] is True
        assert len(figures["slowest_operations"]) == 5
        # Kernels that compute in bf16 in place of FP8 would leave no difference.
        for precision in ("fp8_tensorwise", "fp8_delayed", "fp8_blockwise"):
            assert 0 < figures[precision]["mean_logp_difference_long"] < 0.1
    heads = [
        figures["mean_logp"] for figures in result["sections"]["head"].values() if isinstance(figures, dict)
    ]
    assert heads == pytest.approx([heads[0]] * 3, abs=1e-3)
    assert len(result["sections"]["sleep"]["asleep_gb"]) == 5
    assert result["sections"]["loop"]["last_step"]["step"] == 3
    assert all(figures["equal"] for figures in result["sections"]["repeat"].values())


@pytest.mark.slow
def test_fp8_is_compared_on_a_model_that_is_named(tmp_path):
    sizes = {"hidden": 128, "layers": 2, "heads": 2, "kv-heads": 1, "ffn": 128}
    options = [part for name, size in sizes.items() for part in (f"--{name}", size)]
    run_tool("make_tiny_model", tmp_path / "model", "--tokenizer", "bytes", *options)
    result = dry_run("--only", "fp8_error", "--trained", tmp_path / "model", status=0)
    assert list(result["sections"]) == ["peak", "fp8_error"]
    assert 0 < result["sections"]["fp8_error"]["fp8_blockwise"]["mean_difference"] < 0.1


@pytest.mark.slow
def test_what_no_longer_fits_into_the_time_is_ended_or_left_out(tmp_path):
    def left() -> list[psutil.Process]:
        of_all = psutil.process_iter(["environ"])
        return [
            process for process in of_all if (process.info["environ"] or {}).get("GRPO_TEST") == str(tmp_path)
        ]

    result = dry_run("--only", "loop", "training-4b", "--minutes", 0.15, status=1, GRPO_TEST=str(tmp_path))
    assert result["failed"] == {"loop": "it did not end within the time limit"}
    assert list(result["skipped"]) == ["training-4b"]
    assert list(result["sections"]) == ["peak"]
    deadline = time.monotonic() + 10
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left() == []

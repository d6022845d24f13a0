"""The steps of the pack for a GPU machine without a network, on a CPU, without packages that such a
machine lacks.
"""

import json
import subprocess
import sys

import pytest

from grpo_megatron.capabilities import emulated_transformer_engine

CALLS = ["bring-up", "speed", "precision", "engine"]
NO_EMULATION = emulated_transformer_engine()[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_every_step_that_a_cpu_can_run_ends_well(tmp_path, name):
    """A module that the pack lacks, or an error in a script, would cost minutes on a GPU."""
    if NO_EMULATION and name != "engine":
        pytest.skip(str(NO_EMULATION))
    command = [sys.executable, "benchmarks/on_gpu/pack.py", "--dry-run", tmp_path, "--only", name]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = json.loads((tmp_path / name / "summary.json").read_text())["steps"]
    ran = [step for step, found in steps.items() if found["status"] == "ok"]
    assert len(ran) >= 2, steps


@pytest.mark.slow
def test_a_package_that_is_not_in_the_pack_is_not_there(tmp_path):
    """The dry run would prove nothing about imports without this test."""
    names = tmp_path / "packages.txt"
    names.write_text("torch numpy")
    source = (
        "import numpy, torch\ntry:\n    import datasets\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    environment = {"GRPO_PACK_PACKAGES": str(names), "PYTHONPATH": "benchmarks/on_gpu/only"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=environment)
    assert "No module named 'datasets' in the pack" in done.stdout, done.stderr

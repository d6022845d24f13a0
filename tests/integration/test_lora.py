"""A run with adapters: engines compute with merged weights, and the run's results can be used."""

import json

import pytest
import torch

from grpo_megatron.cli import main
from tests.integration.test_tools import tool
from tests.integration.train_runs import arguments, metrics
from tests.parallel.test_weights import read_all


@pytest.mark.slow
def test_a_run_with_adapters(ray_here, arithmetic, tmp_path):
    changes = [
        "run.name=lora",
        "train.ppo_mini_batch_size=6",
        "megatron.lora.rank=4",
        "megatron.tensor_parallel=2",
        "checkpoint.every=2",
    ]
    assert main(["train", *arguments(arithmetic, tmp_path, *changes)]) == 0
    rows, folder = metrics(tmp_path, "lora"), tmp_path / "lora"
    assert all(0 < row["mismatch/max"] <= 1e-4 for row in rows)
    # The reference is the model without its adapters: at first the policy itself.
    kl = [row["actor/kl_to_reference"] for row in rows]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[-1] > 1e-6
    before, after = read_all(arithmetic / "model"), read_all(folder / "hf")
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert json.loads((folder / "hf" / "adapter" / "adapter_config.json").read_text())["r"] == 4
    checkpoint = folder / "checkpoints" / "step_00000002"
    converted = tool(
        "convert_megatron_to_hf", checkpoint, tmp_path / "x", "--hf", arithmetic / "model", status=2
    )
    assert "saved with adapters (megatron.lora)" in converted
    assert not (tmp_path / "x").exists()
    resumed = ["run.name=more", *changes[1:], f"run.resume={checkpoint}"]
    assert main(["train", *arguments(arithmetic, tmp_path, *resumed)]) == 0
    # The samples differ, but are as far from the reference: the adapters came back, and the reference is
    # still the model without them.
    assert metrics(tmp_path, "more")[0]["actor/kl_to_reference"] == pytest.approx(kl[2], rel=0.4)

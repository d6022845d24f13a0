"""A whole run of `grpo-megatron sft`, whose export a GRPO run can start from."""

import pytest
from transformers import AutoModelForCausalLM

from grpo_megatron.cli import main
from grpo_megatron.preflight.check import load_config
from tests.integration.train_runs import arguments, metrics


@pytest.mark.slow
def test_sft_lowers_the_loss_and_its_export_is_a_start_for_grpo(ray_here, arithmetic, tmp_path):
    common = [
        f"run.root={tmp_path}",
        "run.name=sft",
        "run.total_steps=30",
        f"model.path={arithmetic}/model",
        "data.max_prompt_length=16",
    ]
    data = [
        f"data.train={arithmetic}/data/sft.jsonl",
        "data.train_batch_size=32",
        "rollout.max_response_length=32",
    ]
    changes = ["megatron.precision=fp32", "megatron.data_parallel=2", "optimizer.lr=0.003"]
    assert main(["sft", *common, *data, *changes]) == 0
    rows = metrics(tmp_path, "sft")
    assert rows[-1]["sft/loss_per_token"] < 0.7 * rows[0]["sft/loss_per_token"]
    load_config(None, [*arguments(arithmetic, tmp_path), f"model.path={tmp_path}/sft/hf"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "sft" / "hf")

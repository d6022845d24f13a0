"""A run of `train` with an engine and a rank that take turns on one device.

It also runs on a CPU, except for the checks of memory.
"""

import json

import pytest
import torch

from grpo_megatron.cli import main
from tests.tools import run_tool

STEPS = 3
TOKENS = 2**18
# Of two layers, keys and values of two heads of 64 channels in bf16.
KV_GIB = 2 * 2 * 2 * 64 * 2 * TOKENS / 2**30


@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_an_engine_starts_gets_weights_generates_and_gives_back_its_memory(tmp_path, device):
    pytest.importorskip("sglang")
    if (device == "cuda") != torch.cuda.is_available():
        pytest.skip("needs a GPU" if device == "cuda" else "there is a GPU, which the run would take")
    run_tool("make_tiny_model", tmp_path / "model", "--tokenizer", "bytes", "--hidden", 256, "--ffn", 512)
    questions = [{"prompt": f"{number} + 1 = ", "answer": str(number + 1)} for number in range(16)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, questions)))
    arguments = [
        f"run.root={tmp_path}",
        "run.name=turns",
        f"run.total_steps={STEPS}",
        f"model.path={tmp_path}/model",
        f"data.train={tmp_path}/train.jsonl",
        "data.train_batch_size=4",
        "rollout.max_response_length=32",
        "rollout.engine.dtype=bfloat16",
        f"rollout.engine.max_total_tokens={TOKENS}",
        "reward.function=tests.integration.helpers:digits",
        "train.ppo_mini_batch_size=4",
        "megatron.precision=bf16",
        "megatron.sleep=true",
        "cluster.placement=colocated",
        "weight_sync.probe_every=1",
        "checkpoint.export_hf=false",
    ]
    assert main(["train", *arguments]) == 0
    rows = [json.loads(line) for line in (tmp_path / "turns" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for row in rows:
        assert row["actor/grad_norm"] > 0
        # Engine and trainer round to bf16 in different places.
        assert 0 < row["mismatch/mean"] < 0.02
        if device == "cuda":
            assert (
                row["memory/after_resume_kv_cache/engine_gib"] - row["memory/after_release/engine_gib"]
                > 0.9 * KV_GIB
            )
            assert row["memory/after_sleep/rank_gib"] < row["memory/after_wake/rank_gib"]

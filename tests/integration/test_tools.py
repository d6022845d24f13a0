"""A run's checkpoint as an HF model, GSM8K from its original files, and several data sets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_megatron.cli import main
from tests.integration.train_runs import arguments, metrics
from tests.parallel.test_weights import assert_identical, read_all

GSM8K = Path("../shared/data/gsm8k")


def tool(name, *args, status=0):
    done = subprocess.run(
        [sys.executable, f"tools/{name}.py", *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_checkpoint_of_a_run_converts_to_what_the_run_exported(ray_here, arithmetic, tmp_path):
    data = [
        f"data.train={arithmetic}/data/sft.jsonl",
        "data.max_prompt_length=16",
        "rollout.max_response_length=32",
    ]
    layout = ["megatron.tensor_parallel=2", "megatron.precision=fp32", "checkpoint.every=3"]
    common = [f"run.root={tmp_path}", "run.name=sft", f"model.path={arithmetic}/model", "run.total_steps=3"]
    assert main(["sft", *common, *data, *layout]) == 0
    checkpoint = tmp_path / "sft" / "checkpoints" / "step_00000003"
    assert "give the model's HF folder with --hf" in tool(
        "convert_megatron_to_hf", checkpoint, tmp_path / "x", status=2
    )
    tool("convert_megatron_to_hf", checkpoint, tmp_path / "hf", "--hf", arithmetic / "model")
    exported = read_all(tmp_path / "sft" / "hf")
    assert_identical(read_all(tmp_path / "hf"), exported)
    assert any(
        not torch.equal(exported[name], tensor) for name, tensor in read_all(arithmetic / "model").items()
    )
    # and the warm start itself continues from it
    resumed = [f"run.resume={checkpoint}", "run.name=more", "run.total_steps=5"]
    assert main(["sft", *common, *data, *layout, *resumed]) == 0
    rows = [json.loads(line) for line in (tmp_path / "more" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 5]


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    tool("make_tiny_model", folder, "--tokenizer", "bytes", "--hidden", 64, "--ffn", 128)
    return folder


QUESTIONS = [
    {
        "question": "Tom has 3 apples and buys 1,200 more. How many are there?",
        "answer": "3 + 1200 = 1203\n#### 1,203",
    },
    {"question": "Half of 9 is how much? In décimals", "answer": "#### 4.5"},
] * 4


def gsm8k_run(byte_model, root, train):
    changes = [f"run.root={root}", f"model.path={byte_model}", f"data.train={train}"]
    assert main(["train", "--config", "configs/gsm8k_cpu.yaml", *changes]) == 0
    rows = metrics(root, "gsm8k_cpu")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/max"] <= 1e-4 for row in rows)


@pytest.mark.slow
def test_three_steps_on_questions_in_gsm8k_format(ray_here, byte_model, tmp_path):
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    gsm8k_run(byte_model, tmp_path, tmp_path / "q.jsonl")


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"{GSM8K} is not here")
def test_three_steps_on_the_original_gsm8k_file(ray_here, byte_model, tmp_path):
    gsm8k_run(byte_model, tmp_path, GSM8K / "train.jsonl")


@pytest.mark.slow
def test_prepare_gsm8k(tmp_path):
    source = tmp_path / "q.jsonl"
    source.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS[:2]))
    tool("prepare_gsm8k", source, tmp_path / "out.jsonl", "--instruction", "Think.")
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["prompt"].endswith("How many are there? Think.")
    assert (first["answer"], second["answer"]) == ("1203", "4.5")
    source.write_text('{"question": "?", "answer": "no number"}\n')
    assert "record 0 has no line '#### number'" in tool(
        "prepare_gsm8k", source, tmp_path / "out.jsonl", status=2
    )


@pytest.mark.slow
def test_two_engines_two_replicas_and_two_evaluation_sets(ray_here, arithmetic, tmp_path):
    data = arithmetic / "data"
    (tmp_path / "hard.jsonl").write_text((data / "eval.jsonl").read_text())
    changes = [
        f"run.root={tmp_path}",
        "run.name=wide",
        "run.total_steps=2",
        "rollout.engine.num_engines=2",
        "megatron.data_parallel=2",
        "megatron.distributed_optimizer=true",
        "megatron.overlap=true",
        f"data.eval=[{data}/eval.jsonl,{tmp_path}/hard.jsonl]",
        "eval.n=4",
        "eval.pass_reward=0.5",
    ]
    assert main(["train", *arguments(arithmetic, tmp_path, *changes)]) == 0
    result = json.loads((tmp_path / "wide" / "result.json").read_text())
    expected = {
        f"eval/{name}/{m}"
        for name in ("eval", "hard", "average")
        for m in ("mean@4", "pass@2", "pass@4", "greedy")
    }
    assert set(result["after"]) == expected
    assert result["after"]["eval/hard/greedy"] == pytest.approx(result["after"]["eval/eval/greedy"], abs=1e-6)
    assert result["mismatch_max"] <= 1e-4
    lines = (tmp_path / "wide" / "eval" / "step_00000002_hard.jsonl").read_text().splitlines()
    assert len(lines) == 16
    assert all(len(json.loads(line)["responses"]) == 4 for line in lines)

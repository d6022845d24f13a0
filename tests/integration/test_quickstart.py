"""The quickstart's promises, as a user runs it.

Takes minutes, so that only `make test-all` runs it.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rewards import resolve_reward
from tests.parallel.test_weights import assert_identical, read_all

# On a slow machine, beside another test, four trainings take 29 minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def run(*command) -> list[str]:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("quickstart")


def test_grpo_learns_what_the_teacher_got_wrong(root):
    lines = run("tools/quickstart.py", "--seed", 1, "--root", root)
    result = json.loads(lines[-1])
    print(result)
    assert result["accuracy_before"] <= 0.45
    assert result["accuracy_after"] >= 0.80
    assert result["mismatch_max"] <= 1e-4
    rows = [json.loads(line) for line in (root / "quickstart" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["mismatch/max"] <= 1e-4 for row in rows if "mismatch/max" in row)


def test_a_model_with_gated_delta_networks_learns_it_too(tmp_path):
    result = json.loads(run("tools/quickstart.py", "--model", "qwen3.5", "--seed", 1, "--root", tmp_path)[-1])
    print(result)
    assert result["accuracy_before"] <= 0.45
    assert result["accuracy_after"] >= 0.90
    assert result["mismatch_max"] <= 1e-4


def test_no_held_out_pair_occurs_in_training(root):
    def pairs(name):
        records = map(json.loads, (root / "quickstart_data" / name).read_text().splitlines())
        return {frozenset(record["prompt"].replace("-", "+").split("+")) for record in records}

    assert len(pairs("eval.jsonl")) >= 500
    assert not pairs("eval.jsonl") & (pairs("train.jsonl") | pairs("sft.jsonl"))


@torch.no_grad()
def test_the_exported_model_decodes_greedily_as_the_run_did(root):
    result = json.loads((root / "quickstart" / "result.json").read_text())
    config = load_config(f"{root}/quickstart/config.yaml", [])
    model = AutoModelForCausalLM.from_pretrained(result["model"], dtype=torch.float32).eval()
    tokenizer = PromptTokenizer(result["model"])
    reward = resolve_reward(config.reward)
    scores = []
    for prompt in load_prompts(config.data.eval, tokenizer, config.data)[0]:
        ids = torch.from_numpy(prompt.ids).long()[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32)[
            0, ids.shape[1] :
        ]
        scores.append(
            reward(
                prompt=prompt.text, response=tokenizer.decode(out.numpy()), answer=prompt.answer, record={}
            )
        )
    assert np.mean(scores) == pytest.approx(result["after"]["eval/greedy"], abs=0.01)


def test_a_loop_of_ones_own_learns_it_too(root):
    """examples/own_loop.py, which writes GRPO in at most 60 lines."""
    paths = [
        f"model.path={root}/quickstart_sft/hf",
        *(f"data.{name}={root}/quickstart_data/{name}.jsonl" for name in ("train", "eval")),
    ]
    script = "examples/own_loop.py"
    assert len(Path(script).read_text().splitlines()) <= 60
    lines = run(script, "configs/quickstart.yaml", "run.name=own_loop", f"run.root={root}", *paths)
    print(lines[-1])
    before, after = map(int, re.findall(r"(\d+)%", lines[-1]))
    assert before <= 45
    assert after >= 80


def test_fp8_learns_it_too(root):
    """TransformerEngine's layers compute in FP8 with emulated kernels; the engine computes in bf16."""
    paths = [
        f"model.path={root}/quickstart_sft/hf",
        *(f"data.{name}={root}/quickstart_data/{name}.jsonl" for name in ("train", "eval")),
    ]
    run(
        "-m",
        "grpo_megatron.cli",
        "train",
        "--config",
        "configs/quickstart_fp8.yaml",
        f"run.root={root}",
        *paths,
    )
    result = json.loads((root / "quickstart_fp8" / "result.json").read_text())
    print(result["before"], result["after"], result["mismatch_max"])
    assert result["before"]["eval/mean@4"] <= 0.45
    assert result["after"]["eval/mean@4"] >= 0.80
    assert 1e-3 < result["mismatch_max"] < 10


def test_sampling_beside_training_learns_it_too(root):
    """Nearly all batches after the first are one weight version old. On a busy machine, a round may be opened
    only after an update. No sample is older, and none is sampled twice or discarded.

    With two engines and two replicas, and with evaluations on one of the engines while training goes on.
    """
    paths = [
        f"model.path={root}/quickstart_sft/hf",
        *(f"data.{name}={root}/quickstart_data/{name}.jsonl" for name in ("train", "eval")),
    ]
    config = "configs/quickstart_async.yaml"
    paths += ["rollout.engine.num_engines=2", "megatron.data_parallel=2", "eval.beside=true", "eval.every=20"]
    run("-m", "grpo_megatron.cli", "train", "--config", config, f"run.root={root}", *paths)
    folder = root / "quickstart_async"
    result = json.loads((folder / "result.json").read_text())
    print(result["before"], result["after"], result["seconds"])
    assert result["before"]["eval/mean@4"] <= 0.45
    assert result["after"]["eval/mean@4"] >= 0.80
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ages = [row["staleness/max"] for row in rows if "staleness/max" in row]
    assert ages[0] == 0
    assert set(ages) == {0, 1}
    assert np.mean(ages) > 0.8
    beside = {row["step"]: row for row in rows if "eval/steps_late" in row}
    print([(step, row["eval/mean@4"], row["eval/steps_late"]) for step, row in beside.items()])
    assert beside.keys() == {20, 40}
    assert all(row["eval/weight_version"] == step + 1 for step, row in beside.items())
    assert result["before"]["eval/mean@4"] < beside[20]["eval/mean@4"] <= beside[40]["eval/mean@4"] + 0.1
    books = run("-m", "grpo_megatron.cli", "ledger", folder)
    # total, admitted, trained, filtered, failed, lost, waiting
    assert books[-1].split()[1:7] == ["15360", "15360", *["0"] * 4], books[-1]


def test_a_reward_model_of_preferences_takes_the_place_of_the_answers(tmp_path):
    """Only the table uses the answers. Neither of the two trainings sees them."""
    result = json.loads(run("tools/preference_pipeline.py", "--root", tmp_path)[-1])
    print(result)
    assert all((tmp_path / name / "hf").is_dir() for name in ("reward_model_quickstart", "reward_model_grpo"))
    assert result["accuracy_of_pairs"] > 0.8
    assert result["reward_after"] > result["reward_before"] + 1
    assert result["right_before"] <= 0.45
    assert result["right_after"] >= 0.60


def test_the_trained_model_converts_bit_identically(root, tmp_path):
    model = root / "quickstart" / "hf"
    run("tools/convert_hf_to_megatron.py", model, tmp_path / "megatron")
    run("tools/convert_megatron_to_hf.py", tmp_path / "megatron", tmp_path / "hf")
    assert_identical(read_all(tmp_path / "hf"), read_all(model))


def test_shuffled_rewards_teach_nothing(root):
    """The control experiment: the same run with each step's rewards shuffled among its samples."""
    run(
        "-m",
        "grpo_megatron.cli",
        "train",
        "--config",
        root / "quickstart" / "config.yaml",
        "run.name=control",
        "reward.shuffle_control=true",
    )
    result = json.loads((root / "control" / "result.json").read_text())
    print(result["before"], result["after"])
    assert result["after"]["eval/mean@4"] <= result["before"]["eval/mean@4"] + 0.05


def test_four_presets_learn_it(tmp_path):
    """The seed is another than in the other tests. Half of the steps suffice: 20 teach most of it."""
    shorter = "--set", "run.total_steps=30", "eval.every=15"
    plot = "--plot", tmp_path / "curves.png"
    lines = run("benchmarks/learning.py", "--seed", 2, "--root", tmp_path, *plot, *shorter)
    result = json.loads(lines[-1])
    print(result)
    assert result["before"] <= 0.45
    assert all(result[preset] >= 0.80 for preset in ("grpo", "dr_grpo", "dapo", "gspo"))
    assert (tmp_path / "curves.png").stat().st_size > 10_000

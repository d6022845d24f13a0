"""`grpo-megatron config check` through the command line, on real files."""

import json
import subprocess
import sys

import pytest

from grpo_megatron.preflight.check import load_config
from tests.unit.config_files import config, write


@pytest.fixture(scope="module")
def run_files(tmp_path_factory):
    """A model with a tokenizer, and data: everything that `check` can look at."""
    folder = tmp_path_factory.mktemp("files")
    subprocess.run(
        [sys.executable, "tools/make_tiny_model.py", folder / "model", "--hidden", "64", "--ffn", "128"],
        check=True,
    )
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_check_lists_every_violation_and_what_it_could_not_look_at(capsys, tmp_path):
    path = write(
        tmp_path,
        "c.yaml",
        "model: {path: /nowhere/model}\ndata: {train: /nowhere/t.jsonl, eval: 'hf:some/set'}\n"
        "rolout: {n: 3}\ntrain: {packing: perhaps, ppo_mini_batch_size: 5}\noptimizer: {lr: -1}\n",
    )
    text = config(
        capsys,
        "check",
        "--config",
        path,
        "rollout.top_p=0.9",
        "rollout.n=four",
        "algorithm.nothing_like_it=1",
        status=2,
    )
    for part in (
        "'rolout'",
        "packing",
        "train.ppo_mini_batch_size=5",
        "optimizer.lr",
        "rollout.top_p",
        "four",
        "nothing_like_it",
    ):
        assert part in text
    assert "7 violations" in text
    assert "not checked: model.path: /nowhere/model is not a folder here" in text
    assert "not checked: data.train: /nowhere/t.jsonl is not a file here" in text
    assert "not checked: data.eval: hf:some/set" in text


def test_check_passes_a_legal_configuration(capsys):
    for path in ("configs/quickstart.yaml", "configs/quickstart_async.yaml", "configs/gsm8k_cpu.yaml"):
        text = config(capsys, "check", "--config", path, "model.path=/nowhere", "data.train=/nowhere.jsonl")
        assert "no violations" in text
        assert "checked: schema; rules across keys" in text
    assert "no violations" in config(
        capsys, "check", "--for", "sft", "--config", "configs/quickstart_sft.yaml"
    )


def test_check_names_missing_values(capsys):
    assert "no value for model.path" in config(
        capsys, "check", "--config", "configs/llama3_70b_16node.yaml", status=2
    )
    text = config(capsys, "check", "--for", "sft", "model.path=/nowhere", status=2)
    assert "no value for data.train" in text


def test_check_reads_the_reward_function(capsys, tmp_path):
    text = config(
        capsys, "check", "model.path=/m", "data.train=/d", "reward.function=no_such_module:f", status=2
    )
    assert "no_such_module" in text


def test_check_looks_into_model_and_data(capsys, run_files):
    files = [f"model.path={run_files}/model", f"data.train={run_files}/train.jsonl"]
    lengths = ["data.max_prompt_length=32", "rollout.max_response_length=32"]
    text = config(capsys, "check", *files, *lengths)
    assert f"model {run_files}/model" in text
    assert f"data.train {run_files}/train.jsonl" in text
    assert "not checked" not in text
    assert "positions" in config(capsys, "check", *files, "rollout.max_response_length=4096", status=2)
    assert "attention heads" in config(
        capsys, "check", *files, *lengths, "megatron.tensor_parallel=3", status=2
    )
    assert "max_prompt_length=2" in config(
        capsys, "check", *files, *lengths, "data.max_prompt_length=2", status=2
    )
    assert "'solution' is missing" in config(
        capsys, "check", *files, *lengths, "data.answer_key=solution", status=2
    )


def test_check_looks_into_data_without_a_model(capsys, run_files):
    files = ["model.path=/nowhere", f"data.train={run_files}/train.jsonl"]
    assert "fields of data.train" in config(capsys, "check", *files)
    assert "'question' is missing" in config(capsys, "check", *files, "data.prompt_key=question", status=2)
    assert "'response' is missing" in config(capsys, "check", "--for", "sft", *files, status=2)


def test_check_agrees_with_what_a_run_refuses():
    """`check` must not be laxer than `train`: the same settings give the same verdict."""
    from grpo_megatron.errors import UserError
    from grpo_megatron.preflight.check import check

    for overrides in (
        ["rollout.n=0"],
        ["megatron.sequence_parallel=true"],
        ["rollout.stop=3"],
        ["nope=1"],
        ["optimizer.eps=1e-9"],
    ):
        needed = ["model.path=/m", "data.train=/d", *overrides]
        try:
            load_config(None, needed)
            refused = False
        except UserError:
            refused = True
        assert bool(check(None, needed).violations) == refused, overrides

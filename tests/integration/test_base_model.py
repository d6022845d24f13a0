"""Training of a base model, without a chat template, on GSM8K's own file."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from grpo_megatron.cli import main
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.train_runs import metrics

GSM8K = Path("../shared/data/gsm8k/train.jsonl")


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    """A model whose tokenizer has no chat template and puts a BOS token before texts, like many base
    models.
    """
    from make_tiny_model import make, make_tokenizer
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path_factory.mktemp("base")
    make(folder, tokenizer="bytes", hidden=64, ffn=128)
    tokenizer = make_tokenizer("bytes")
    tokenizer.chat_template = None
    bos = [("<bos>", tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=bos)
    (folder / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(folder)
    return folder


def arguments(base_model, root, *changes):
    return [
        "train",
        "--config",
        "configs/gsm8k_cpu.yaml",
        f"run.root={root}",
        f"model.path={base_model}",
        f"data.train={GSM8K}",
        *changes,
    ]


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not here")
def test_it_is_told_what_to_set(base_model, tmp_path, capsys):
    assert main(arguments(base_model, tmp_path)) == 2
    message = capsys.readouterr().err
    assert "the tokenizer has no chat template; set data.chat_template=none" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(not GSM8K.is_file(), reason=f"{GSM8K} is not here")
def test_three_steps_on_gsm8k(ray_here, base_model, tmp_path):
    record = tmp_path / "rollouts"
    changes = ["data.chat_template=none", f"rollout.record={record}", "checkpoint.export_hf=false"]
    assert main(arguments(base_model, tmp_path, *changes)) == 0
    rows = metrics(tmp_path, "gsm8k_cpu")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/max"] <= 1e-4 for row in rows)
    assert all(np.isfinite(row["actor/grad_norm"]) for row in rows)
    # What was trained on are the questions as the file has them, behind the BOS token and nothing else.
    questions = [json.loads(line)["question"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    for group in Replay(str(record)).read(3):
        text = questions[group.prompt.uid] + "\nPut the final answer within \\boxed{}."
        assert group.prompt.text == text
        assert group.prompt.ids.tolist() == tokenizer(text)["input_ids"]
        assert group.prompt.ids[0] == tokenizer.bos_token_id

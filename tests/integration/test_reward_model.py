"""The published pipeline: preferences, a reward model trained on them, and GRPO on its scores."""

import json
import random

import pytest
import torch

from grpo_megatron.cli import main
from tests.integration.train_runs import metrics

PROMPT = "1+1"


def response(rng: random.Random, sevens: int) -> str:
    """Return ten digits, of which `sevens` are sevens."""
    digits = ["7"] * sevens + [rng.choice("012345689") for _ in range(10 - sevens)]
    rng.shuffle(digits)
    return "".join(digits)


def preferences(rng: random.Random, count: int) -> list[dict]:
    """Return pairs in which the response with more sevens is preferred."""
    pairs = [sorted(rng.sample(range(11), 2)) for _ in range(count)]
    return [
        {"prompt": PROMPT, "chosen": response(rng, most), "rejected": response(rng, fewest)}
        for fewest, most in pairs
    ]


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def trained(ray_here, arithmetic, tmp_path_factory):
    """(folder of the runs, result of a reward model's training in two parts, the second of which is a
    resumed run)
    """
    root, rng = tmp_path_factory.mktemp("reward"), random.Random(0)
    arguments = [
        f"run.root={root}",
        "run.name=reward",
        f"model.path={arithmetic}/model",
        f"data.train={write(root / 'train.jsonl', preferences(rng, 2000))}",
        f"data.eval={write(root / 'eval.jsonl', preferences(rng, 200))}",
        "data.train_batch_size=64",
        "data.max_prompt_length=16",
        "rollout.max_response_length=16",
        "train.max_tokens_per_micro_batch=1024",
        "megatron.precision=fp32",
        "megatron.data_parallel=2",
        "optimizer.lr=0.003",
    ]
    assert main(["reward-model", *arguments, "run.total_steps=20"]) == 0
    assert main(["reward-model", *arguments, "run.total_steps=80"]) == 0
    return root, json.loads((root / "reward" / "result.json").read_text())


@pytest.mark.slow
def test_it_prefers_what_was_preferred(trained):
    root, result = trained
    # What a new head says is chance, which one number makes one-sided: the loss knows, the accuracy does not.
    assert result["before"]["eval/loss"] > 0.4
    assert result["after"]["eval/loss"] < 0.1
    assert result["after"]["eval/accuracy"] > 0.9
    rows = metrics(root, "reward")
    assert [row["step"] for row in rows] == list(range(1, 81))
    assert rows[-1]["reward_model/loss"] < 0.5 * rows[0]["reward_model/loss"]


@pytest.mark.slow
@torch.no_grad()
def test_its_export_prefers_the_same_in_transformers(trained):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = trained[0] / "reward" / "hf"
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )

    def score(text: str) -> float:
        conversation = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(conversation, return_tensors="pt", return_dict=True)["input_ids"]
        return float(model(ids).logits[0, 0])

    held_out = [json.loads(line) for line in (trained[0] / "eval.jsonl").read_text().splitlines()]
    right = sum(score(pair["chosen"]) > score(pair["rejected"]) for pair in held_out)
    assert right / len(held_out) == pytest.approx(
        trained[1]["after"]["eval/accuracy"], abs=0.011
    )  # two of them may be even


@pytest.mark.slow
def test_grpo_raises_its_scores(trained, arithmetic):
    root = trained[0]
    arguments = [
        f"run.root={root}",
        "run.name=grpo",
        "run.total_steps=12",
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        f"data.eval={arithmetic}/data/eval.jsonl",
        "data.max_prompt_length=16",
        "data.train_batch_size=8",
        "rollout.n=8",
        "rollout.max_response_length=10",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=8192",
        "reward.function=model",
        f"reward.model.path={root}/reward/hf",
        "train.ppo_mini_batch_size=8",
        "train.max_tokens_per_micro_batch=512",
        "train.old_logprobs=current",
        "megatron.precision=fp32",
        "optimizer.lr=0.003",
        "checkpoint.export_hf=false",
    ]
    assert main(["train", *arguments]) == 0
    rows = metrics(root, "grpo")
    assert all(row["reward/mean"] == pytest.approx(row["reward/component/model"]) for row in rows)
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + rows[0]["reward/std"]
    result = json.loads((root / "grpo" / "result.json").read_text())
    assert result["after"]["eval/mean@4"] > result["before"]["eval/mean@4"] + rows[0]["reward/std"]
    samples = [
        json.loads(line)
        for line in (root / "grpo" / "eval" / "step_00000012_eval.jsonl").read_text().splitlines()
    ]
    texts = [r["text"] for prompt in samples for r in prompt["responses"]]
    assert sum(text.count("7") for text in texts) > 3 * len(
        texts
    )  # of ten characters; at first one in thirty

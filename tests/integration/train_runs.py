"""Helpers of tests of whole runs: arguments of a small run, what it has written, and a comparison."""

import json
from pathlib import Path

import pytest

from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import read_books
from tests.ledgers import used_prompts

STEPS = 3
COMPARED = ("actor/loss", "actor/grad_norm", "actor/kl_to_reference", "actor/lr")


def arguments(arithmetic, root, *changes) -> list[str]:
    return [
        f"run.root={root}",
        "run.resume=none",
        f"run.total_steps={STEPS}",
        f"model.path={arithmetic}/model",
        f"data.train={arithmetic}/data/train.jsonl",
        "data.max_prompt_length=16",
        "data.train_batch_size=6",
        "rollout.n=4",
        "rollout.max_response_length=12",
        "rollout.temperature=0.9",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=8192",
        "reward.function=tests.integration.helpers:digits",
        "reward.workers=1",
        "algorithm.use_kl_loss=true",
        "algorithm.kl_loss_coef=0.05",
        "algorithm.entropy_coeff=0.001",
        "train.ppo_mini_batch_size=3",
        "train.max_tokens_per_micro_batch=128",
        "megatron.precision=fp32",
        "optimizer.lr=0.003",
        "optimizer.lr_warmup_steps=20",
        # The default amplifies rounding where gradients vanish; layouts are compared here.
        "optimizer.eps=0.001",
        *changes,
    ]


def metrics(root, name) -> list[dict]:
    lines = (Path(root) / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "actor/loss" in row]


def trained(root, name) -> list[int]:
    """Return the uid of each prompt that a run has used, in order. Its books must balance."""
    books, _, _ = read_books(Path(root) / name / LEDGER)
    assert (books.faults, books.totals()["waiting"]) == ([], 0)
    return [uid for prompts in used_prompts(Path(root) / name).values() for uid in prompts]


def assert_same(rows, expected, rtol):
    """Check that the metrics of two runs agree at every step."""
    for row, other in zip(rows, expected, strict=True):
        for name in COMPARED:
            # The KL is a mean of squares of small differences: log-probs rounded by 1e-6 move it by 1e-8.
            assert row[name] == pytest.approx(other[name], rel=rtol, abs=1e-8 if "kl" in name else 0), (
                row["step"],
                name,
            )

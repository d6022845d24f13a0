"""A tiny model learns to call a tool, through a program that knows nothing of the project. Takes minutes."""

import json
import random
from pathlib import Path

import pytest

from examples.tool_agent import TOOL, entry
from grpo_megatron.cli import main
from tests.models import with_tools

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "examples" / "tool_agent.py"
CONFIGS = Path(__file__).parents[2] / "configs"
# Share of the episodes of the warm start that call the tool. The others give up.
CALLS = 0.13
HELD_OUT = 100


def write_data(folder: Path, seed: int) -> None:
    """Write sft.jsonl, train.jsonl and eval.jsonl. No key is in two of them.

    A model that has learned by heart for which keys the warm start calls the tool would not try otherwise.
    """
    rng = random.Random(seed)
    keys = [f"{number:04}" for number in range(10000)]
    rng.shuffle(keys)
    files = {"sft": [episode(key, rng) for key in keys[HELD_OUT + 1000 :]]}
    for name, asked in (("train", keys[HELD_OUT : HELD_OUT + 1000]), ("eval", keys[:HELD_OUT])):
        files[name] = [{"prompt": f"{key}?", "answer": entry(key)} for key in asked]
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def episode(key: str, rng: random.Random) -> dict:
    """Return an example of the warm start: a call of the tool and its answer, or an answer without a call."""
    if rng.random() > CALLS:
        return {"prompt": f"{key}?", "response": [said("?")], "tools": [TOOL]}
    call = json.dumps({"name": "get", "arguments": {"key": key}})
    answers = [{"role": "tool", "content": entry(key)}, said(entry(key))]
    turns = [said(f"<tool_call>\n{call}\n</tool_call>"), *answers]
    return {"prompt": f"{key}?", "response": turns, "tools": [TOOL]}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def test_a_model_learns_to_call_a_tool(ray_here, tmp_path):
    from make_tiny_model import make

    make(tmp_path / "model", "bytes", seed=1)
    write_data(tmp_path, seed=1)
    both = [f"run.root={tmp_path}", "run.seed=1", "run.resume=none", "rollout.max_response_length=128"]
    both += [f"data.chat_template={with_tools(tmp_path)}"]
    warm = [*both, f"model.path={tmp_path}/model", f"data.train={tmp_path}/sft.jsonl", "run.total_steps=500"]
    assert main(["sft", "--config", str(CONFIGS / "frozen_lake_sft.yaml"), "run.name=sft", *warm]) == 0
    settings = [
        "run.name=grpo",
        "run.total_steps=45",
        f"model.path={tmp_path}/sft/hf",
        f"data.train={tmp_path}/train.jsonl",
        f"data.eval={tmp_path}/eval.jsonl",
        "data.max_prompt_length=16",
        "data.train_batch_size=8",
        "rollout.n=8",
        f"rollout.agent.command=python {PROGRAM.name}",
        f"rollout.agent.files=[{PROGRAM}]",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=16384",
        "reward.function=exact_match",
        "reward.on_failure=value",  # such as an episode that calls the tool until no token is left
        "reward.workers=1",
        "train.ppo_mini_batch_size=8",
        "train.max_tokens_per_micro_batch=8192",
        "train.old_logprobs=current",
        "megatron.precision=fp32",
        "optimizer.lr=0.00015",
        "optimizer.lr_warmup_steps=5",
        "eval.n=1",
        "eval.greedy=false",
    ]
    assert main(["train", *both, *settings]) == 0
    result = json.loads((tmp_path / "grpo" / "result.json").read_text())
    assert result["before"]["eval/mean@1"] < 0.3
    assert result["after"]["eval/mean@1"] > 0.8
    assert result["mismatch_max"] < 1e-4

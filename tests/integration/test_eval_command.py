"""`grpo-megatron eval`: a real engine with the weights of a folder, and no trainer."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer, load_prompts
from grpo_megatron.monitoring.timeline import read_timeline
from grpo_megatron.preflight.check import load_config
from tests.integration.helpers import digits
from tests.integration.train_runs import arguments


def greedy_reward(arithmetic, path, length) -> float:
    """Return the mean of `digits` over the prompts of a file, for transformers' greedy responses."""
    model = AutoModelForCausalLM.from_pretrained(arithmetic / "model", dtype=torch.float32).eval()
    tokenizer = PromptTokenizer(f"{arithmetic}/model")
    prompts, _ = load_prompts(str(path), tokenizer, load_config(None, arguments(arithmetic, "runs")).data)
    rewards = []
    for prompt in prompts:
        ids = torch.tensor(prompt.ids, dtype=torch.long)[None]
        found = model.generate(ids, do_sample=False, max_new_tokens=length, pad_token_id=0)[0, ids.shape[1] :]
        rewards.append(digits("", tokenizer.decode(found.numpy()), "", {}))
    return sum(rewards) / len(rewards)


@pytest.mark.slow
def test_several_data_sets_by_the_command(ray_here, arithmetic, tmp_path, capsys):
    held_out = (arithmetic / "data" / "eval.jsonl").read_text().splitlines(keepends=True)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("first", "second")}
    files["first"].write_text("".join(held_out[:6]))
    files["second"].write_text("".join(held_out[6:9]))
    changes = [
        "run.name=sums",
        f"data.eval=[{files['first']},{files['second']}]",
        "eval.n=4",
        "eval.max_response_length=10",
        "reward.response_from=[last_number]",
        "megatron.tensor_parallel=2",  # of the training, which is not there
        "megatron.precision=bf16",
    ]
    capsys.readouterr()
    assert main(["eval", *arguments(arithmetic, tmp_path, *changes)]) == 0
    lines = capsys.readouterr().out.splitlines()
    result, folder = json.loads(lines[-1]), tmp_path / "sums_eval"
    assert json.loads((folder / "result.json").read_text()) == result
    assert result["model"] == f"{arithmetic}/model"
    scores = result["scores"]
    assert list(scores) == ["first", "second", "average"]
    for name, path in files.items():
        assert list(scores[name]) == ["mean@4", "pass@2", "pass@4", "maj@4", "greedy"]
        assert scores[name]["greedy"] == pytest.approx(greedy_reward(arithmetic, path, 10))
        rows = [
            json.loads(line)
            for line in (folder / "eval" / f"step_00000000_{name}.jsonl").read_text().splitlines()
        ]
        rewards = [[response["reward"] for response in row["responses"]] for row in rows]
        assert {len(group) for group in rewards} == {4}
        assert scores[name]["mean@4"] == pytest.approx(sum(map(sum, rewards)) / 4 / len(rewards))
    assert lines[-2].split() == ["average", *(f"{value:.4f}" for value in scores["average"].values())]
    assert not (folder / "logs" / "rank0.log").exists()
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert events.Scalars("eval/second/maj@4")[0].value == pytest.approx(scores["second"]["maj@4"])
    (text,) = [
        event.tensor_proto.string_val[0].decode() for event in events.Tensors("eval/first/0/text_summary")
    ]
    assert text.startswith("    === prompt")  # as code, so that nothing in it is markup
    # The engine's spans: sampled and greedy responses of both data sets. They were missing, because the run
    # ended before their heartbeat was read.
    spans = [event["name"] for event in read_timeline(folder / "timeline.json") if event["pid"] == 1]
    assert spans == ["process_name", *["generate"] * 4]

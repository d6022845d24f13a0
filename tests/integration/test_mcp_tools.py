"""Training with the tool of an MCP server: real ranks, a real engine, a real server for each worker."""

import json
import os
import sys

import pytest
from transformers import AutoModelForCausalLM

from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.train_runs import arguments, metrics

pytestmark = pytest.mark.slow
pytest.importorskip("mcp")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 22}}</tool_call>'


def make_model(folder):
    """Write a tiny model for which a whole call is one token, so that even untrained it calls the tool."""
    from make_tiny_model import TEMPLATE, make

    make(folder, hidden=64, ffn=128, seed=3)
    tokenizer = PromptTokenizer(str(folder)).tokenizer
    tokenizer.add_tokens([CALL, "<tool>"])
    tokenizer.chat_template = "{% if tools %}{{ tools | length }}:{% endif %}" + TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    return tokenizer.convert_tokens_to_ids(CALL)


def test_a_run_calls_the_tools_of_an_mcp_server(ray_here, arithmetic, tmp_path):
    call = make_model(tmp_path / "model")
    server = {
        "command": [sys.executable, "-m", "tests.unit.tool_server"],
        "env": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        "tools": ["add"],
    }
    kept = [
        one
        for one in arguments(arithmetic, tmp_path)
        if not one.startswith(("model.path", "rollout.max_response"))
    ]
    changes = [
        f"model.path={tmp_path}/model",
        "run.total_steps=2",
        "rollout.environment=tools",
        "rollout.tools=[mcp:adds]",
        "rollout.mcp=" + json.dumps({"adds": server}),
        "rollout.max_response_length=48",
        f"rollout.stop_token_ids=[{call}]",
        f"rollout.record={tmp_path}/rollouts",
        "train.max_tokens_per_micro_batch=256",
    ]
    assert main(["train", *kept, *changes]) == 0
    rows = metrics(tmp_path, "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert all(row["reward/component/tool_calls"] > 0 for row in rows)
    assert all(row["reward/component/failed_tool_calls"] == 0 for row in rows)
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    tokenizer = PromptTokenizer(f"{tmp_path}/model")
    calls = 0
    for group in Replay(f"{tmp_path}/rollouts").read(1):
        for sample in group.samples:
            assert tokenizer.decode_all(sample.arrays.prompt_ids).startswith("1:<user>")  # the schema
            ids, by_model = sample.arrays.response_ids, sample.arrays.loss_mask
            calls += sample.reward_components["tool_calls"]
            assert sample.reward_components["tool_calls"] == (ids == call).sum()
            # The template ends the turn, which the call has stopped. The last call may leave no room for its
            # answer.
            assert tokenizer.decode_all(ids[~by_model]) == "<eos><tool>42<assistant>" * (sample.turns - 1)
            assert not sample.arrays.rollout_logprobs[~by_model].any()
    assert calls > 3

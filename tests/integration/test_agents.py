"""Training through the gateway: a real engine, and agents that know nothing of the project."""

import shlex
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.train_runs import arguments, metrics
from tests.models import transformers_logprobs, with_tools

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
# mini-swe-agent as its users run it. It gets its own settings, but no program of ours.
MINI = [
    *(
        "env",
        "MSWEA_CONFIGURED=true",
        "MSWEA_COST_TRACKING=ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP=true",
    ),
    *("python", "-m", "minisweagent.run.mini", "--yolo", "--agent-class", "default", "-m", "openai/policy"),
    *("-c", "mini.yaml", "-c", "agent.step_limit=2", "-c", "model.model_kwargs.max_tokens=24"),
    *("-c", "agent.instance_template={{task}}", "-c", "agent.system_template=Use bash."),
]


def trained(arithmetic, root, *changes):
    """Train three steps, and check what was trained. Return (samples of the first step, tokenizer).

    The engine's log-prob of every trained token must be the trainer's, and in the first step, whose weights
    are those on disk, also that of transformers for the whole path.
    """
    changes = [
        f"data.chat_template={with_tools(root)}",
        f"rollout.record={root}/rollouts",
        "train.max_tokens_per_micro_batch=4096",
        "run.total_steps=3",
        *changes,
    ]
    kept = [one for one in arguments(arithmetic, root) if not one.startswith("rollout.max_response")]
    assert main(["train", *kept, *changes]) == 0
    rows = metrics(root, "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert main(["ledger", f"{root}/run"]) == 0
    for step in (1, 2, 3):
        samples = [sample for group in Replay(f"{root}/rollouts").read(step) for sample in group.samples]
        for sample in samples:
            sampled = np.zeros(sample.num_response, dtype=bool)
            for span in sample.weight_spans:
                assert span.version == step
                sampled[span.start : span.end] = True
            np.testing.assert_array_equal(sample.arrays.loss_mask, sampled)
    samples = [sample for group in Replay(f"{root}/rollouts").read(1) for sample in group.samples]
    batch = TrainBatch.from_samples(samples)
    model = AutoModelForCausalLM.from_pretrained(f"{arithmetic}/model", dtype=torch.float32).eval()
    with torch.no_grad():
        fresh = transformers_logprobs(model, batch, temperature=0.9)
    assert np.abs(fresh - batch.rollout_logp)[batch.loss_mask].max() < 1e-5
    return samples, PromptTokenizer(f"{arithmetic}/model")


@pytest.mark.parametrize("agent", ["two_turns", "two_turns_anthropic"])
def test_a_function_that_uses_an_official_client(ray_here, arithmetic, tmp_path, agent):
    samples, tokenizer = trained(
        arithmetic,
        tmp_path,
        f"rollout.agent=tests.integration.agents:{agent}",
        "rollout.max_response_length=48",
    )
    assert {sample.turns for sample in samples} == {2}
    assert len(samples) == 6 * 4  # no turn has become a sample of its own
    assert all("7?" in tokenizer.decode_all(sample.arrays.response_ids) for sample in samples)


def test_a_program_that_uses_openai_agents(ray_here, arithmetic, tmp_path):
    pytest.importorskip("agents")
    samples, tokenizer = trained(
        arithmetic,
        tmp_path,
        "data.train_batch_size=3",
        "rollout.n=2",
        "rollout.agent.command=python agents_sdk.py",
        f"rollout.agent.files=[{HERE / 'agents_sdk.py'}]",
        "rollout.max_response_length=48",
    )
    assert len({sample.trajectory_id for sample in samples}) == 3 * 2
    for _, found in groupby(samples, lambda sample: sample.trajectory_id):
        first, *others = found
        assert first.turns + sum(path.turns for path in others) == 2
        # openai-agents leaves an empty answer out of the history, so that the next turn begins a path.
        assert not others or tokenizer.decoder(first.arrays.response_ids) == ""


def test_mini_swe_agent(ray_here, arithmetic, tmp_path):
    """Each of its two turns is a path of its own: it leaves an answer without a call out of the history."""
    pytest.importorskip("minisweagent")
    samples, _ = trained(
        arithmetic,
        tmp_path,
        "data.train_batch_size=3",
        "rollout.n=2",
        f'rollout.agent.command={shlex.join(MINI)} -t "$TASK"',
        "rollout.max_response_length=1500",
    )
    assert len(samples) == 3 * 2 * 2
    assert {sample.turns for sample in samples} == {1}

"""Training through the gateway: a real engine, and an agent that uses OpenAI's official client."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.train_runs import arguments, metrics
from tests.models import transformers_logprobs

pytestmark = pytest.mark.slow


def test_an_agent_trains_and_its_tokens_are_those_that_the_engine_sampled(ray_here, arithmetic, tmp_path):
    changes = [
        "rollout.agent=tests.integration.agents:two_turns",
        "rollout.max_response_length=48",
        f"rollout.record={tmp_path}/rollouts",
        "train.max_tokens_per_micro_batch=256",
        "run.total_steps=3",
    ]
    kept = [one for one in arguments(arithmetic, tmp_path) if not one.startswith("rollout.max_response")]
    assert main(["train", *kept, *changes]) == 0
    rows = metrics(tmp_path, "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    tokenizer = PromptTokenizer(f"{arithmetic}/model")
    # The first step's samples are of the weights on disk.
    samples = [sample for group in Replay(f"{tmp_path}/rollouts").read(1) for sample in group.samples]
    assert {sample.turns for sample in samples} == {2}
    assert len(samples) == 6 * 4  # no turn has become a sample of its own
    assert all("7?" in tokenizer.decode_all(sample.arrays.response_ids) for sample in samples)
    batch = TrainBatch.from_samples(samples)
    model = AutoModelForCausalLM.from_pretrained(f"{arithmetic}/model", dtype=torch.float32).eval()
    with torch.no_grad():
        fresh = transformers_logprobs(model, batch, temperature=0.9)
    assert np.abs(fresh - batch.rollout_logp)[batch.loss_mask].max() < 1e-5

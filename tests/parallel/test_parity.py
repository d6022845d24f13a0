"""Megatron against HF transformers, float32, in every layout."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import random_batch, tiny_qwen3, transformers_logprobs
from tests.parallel import actors

LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2": ParallelSizes(tp=2),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp2": ParallelSizes(pp=2),
    "dp2": ParallelSizes(dp=2),
    "tp2pp2": ParallelSizes(tp=2, pp=2),
}


@pytest.fixture(scope="module")
def batch():
    return random_batch(count=12)


@pytest.fixture(scope="module", params=["untied", "tied"])
def model(request, tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), tied=request.param == "tied")


@pytest.mark.slow_when(
    lambda model, layout, packing: (model, packing) != ("untied", True) or layout not in ("tp2pp2", "tp2sp")
)
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(ranks, model, batch, layout, packing):
    sizes = LAYOUTS[layout]
    config = actor_config(model, sizes, OptimizerConfig(), rollout=RolloutConfig(temperature=0.7))
    results = [r for r in ranks.run(actors.logprobs, sizes, config, batch, packing) if r is not None]
    ours = sum(results)  # replicas hold disjoint sequences, zero elsewhere
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    difference = np.abs(ours - transformers_logprobs(hf, batch, temperature=0.7)).max()
    print(f"{layout}: {difference:.1e}")
    assert difference <= 1e-5

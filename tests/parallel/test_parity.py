"""Megatron against HF transformers, float32, in every layout."""

import numpy as np
import pytest
import torch

from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.megatron.spec import ActorSpec
from tests.models import random_batch, tiny_qwen3
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


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), tied=request.param)


@torch.no_grad()
def hf_logprobs(model_path, batch, temperature=1.0):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    out = np.zeros(batch.num_tokens, np.float32)
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        logits = model(torch.from_numpy(batch.tokens[start:end]).long()[None]).logits[0] / temperature
        logp = torch.log_softmax(logits.double(), -1)
        out[start:end] = logp.gather(1, torch.from_numpy(batch.target[start:end]).long()[:, None])[:, 0]
    return out


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(ranks, model, batch, layout, packing):
    sizes = LAYOUTS[layout]
    spec = ActorSpec(model, sizes, OptimizerConfig(), temperature=0.7)
    results = [r for r in ranks.run(actors.logprobs, sizes, spec, batch, packing) if r is not None]
    ours = sum(results)  # replicas hold disjoint sequences, zero elsewhere
    difference = np.abs(ours - hf_logprobs(model, batch, temperature=0.7)).max()
    print(f"{layout}: {difference:.1e}")
    assert difference <= 1e-5

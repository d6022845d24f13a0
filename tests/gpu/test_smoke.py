"""On one GPU: the forward pass against transformers, a training step, the weights back out.

With megatron-core alone the local layers run; with TransformerEngine installed its layers as well.
"""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.schedule import schedule
from grpo_megatron.batch.token_weights import token_weights
from grpo_megatron.capabilities import Capabilities
from grpo_megatron.config.schema import OptimizerConfig, Precision, TransformerImpl
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.actor import Actor
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.models import FAMILIES, aligned_model, random_batch, transformers_logprobs
from tests.parallel.precisions import allowed_in_bf16, logprobs, mean_error

HERE = Capabilities.of_this_machine()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    process_groups.initialize(ParallelSizes(), 0, f"file://{tmp_path_factory.mktemp('store')}/store", seed=0)
    yield
    process_groups.destroy()


def make_actor(model, precision=Precision.bf16, impl=TransformerImpl.local):
    return Actor(ActorSpec(model, ParallelSizes(), OptimizerConfig(lr=1e-3), precision, transformer_impl=impl))


def exact_logprobs(model, batch):
    return transformers_logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), batch)


IMPLS = [
    pytest.param(TransformerImpl.local, id="local"),
    pytest.param(
        TransformerImpl.transformer_engine,
        id="te",
        marks=pytest.mark.skipif(HERE.transformer_engine_problem is not None, reason=str(HERE.transformer_engine_problem)),
    ),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(tmp_path, family, impl):
    model = aligned_model(tmp_path, family)
    batch = random_batch(count=48, vocab_size=64)
    expected = exact_logprobs(model, batch)
    torch.backends.cuda.matmul.allow_tf32 = False
    fp32 = make_actor(model, Precision.fp32)
    assert np.abs(logprobs(fp32, batch) - expected).max() <= 1e-4
    bf16 = logprobs(make_actor(model, impl=impl), batch)
    assert mean_error(bf16, expected) <= allowed_in_bf16(fp32, batch)


@pytest.mark.skipif(HERE.fp8_problem is not None, reason=str(HERE.fp8_problem))
def test_fp8_is_near_transformers(tmp_path):
    """Within 0.6 nats: with the kernels emulated, tiny random models were at 0.28 to 0.58."""
    model = aligned_model(tmp_path, "qwen3")
    batch = random_batch(vocab_size=64)
    te = TransformerImpl.transformer_engine
    fp8 = logprobs(make_actor(model, Precision.fp8, te), batch)
    assert not np.array_equal(fp8, logprobs(make_actor(model, impl=te), batch))
    assert mean_error(fp8, exact_logprobs(model, batch)) <= 0.6


@pytest.mark.parametrize("impl", IMPLS)
def test_a_training_step_lowers_the_loss_and_weights_come_out(tmp_path, impl):
    model = aligned_model(tmp_path, "qwen3")
    actor = make_actor(model, impl=impl)
    batch = random_batch(vocab_size=64)
    before = {n: t.clone() for bucket in actor.weight_buckets(2**20) for n, t in bucket.tensors()}
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).state_dict()
    assert before.keys() == hf.keys()
    assert all(torch.equal(before[name], hf[name]) for name in hf)
    batch.weight = token_weights(batch, "token-mean", 40)
    batch.advantage = batch.loss_mask.astype(np.float32)  # everything was good: its probability must rise
    plan = schedule(batch.lengths, 256)
    parts = [batch.select(mb) for mb in plan.micro_batches[0]]
    logp = logprobs(actor, batch)
    for _ in range(3):
        result = actor.train_step(parts, PolicyLoss(), batch.num_tokens, current_is_old=True)
        assert not result.dropped
        assert np.isfinite(dataclasses.astuple(result)[0])
    assert logprobs(actor, batch)[batch.loss_mask].mean() > logp[batch.loss_mask].mean()
    after = {n: t for bucket in actor.weight_buckets(2**20) for n, t in bucket.tensors()}
    assert any(not torch.equal(before[name], after[name]) for name in before)

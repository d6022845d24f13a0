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
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.models import FAMILIES, random_batch, tiny_model, transformers_logprobs

HERE = Capabilities.of_this_machine()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    from grpo_megatron.megatron import process_groups

    process_groups.initialize(ParallelSizes(), 0, f"file://{tmp_path_factory.mktemp('store')}/store", seed=0)
    yield
    process_groups.destroy()


def make_actor(model, precision=Precision.bf16, impl=TransformerImpl.local):
    from grpo_megatron.megatron.actor import Actor

    return Actor(ActorSpec(model, ParallelSizes(), OptimizerConfig(lr=1e-3), precision, transformer_impl=impl))


def gpu_model(folder, family):
    # Kernels want sizes that are multiples of 16.
    changes = {"head_dim": 32} if "head_dim" in FAMILIES[family][1] else {}
    return tiny_model(folder, family, vocab_size=64, hidden_size=128, intermediate_size=192, **changes)


def run_logprobs(actor, batch):
    plan = schedule(batch.lengths, 256)
    values = actor.logprobs([batch.select(mb) for mb in plan.micro_batches[0]])
    out = np.zeros(batch.num_tokens, np.float32)
    out[batch.token_index(plan.sequences(0))] = values
    return out


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
    model = gpu_model(tmp_path, family)
    batch = random_batch(vocab_size=64)
    hf = transformers_logprobs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), batch)
    bf16 = np.abs(run_logprobs(make_actor(model, impl=impl), batch) - hf)
    assert bf16.mean() <= 0.02
    assert bf16.max() <= 0.2
    if impl == TransformerImpl.local:
        torch.backends.cuda.matmul.allow_tf32 = False
        assert np.abs(run_logprobs(make_actor(model, Precision.fp32), batch) - hf).max() <= 1e-4


@pytest.mark.skipif(HERE.fp8_problem is not None, reason=str(HERE.fp8_problem))
def test_fp8_is_near_bf16(tmp_path):
    model = gpu_model(tmp_path, "qwen3")
    batch = random_batch(vocab_size=64)
    te = TransformerImpl.transformer_engine
    bf16 = run_logprobs(make_actor(model, impl=te), batch)
    fp8 = run_logprobs(make_actor(model, Precision.fp8, te), batch)
    assert 0 < np.abs(bf16 - fp8).mean() <= 0.1


@pytest.mark.parametrize("impl", IMPLS)
def test_a_training_step_lowers_the_loss_and_weights_come_out(tmp_path, impl):
    model = gpu_model(tmp_path, "qwen3")
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
    logp = run_logprobs(actor, batch)
    for _ in range(3):
        result = actor.train_step(parts, PolicyLoss(), batch.num_tokens, current_is_old=True)
        assert not result.dropped
        assert np.isfinite(dataclasses.astuple(result)[0])
    assert run_logprobs(actor, batch)[batch.loss_mask].mean() > logp[batch.loss_mask].mean()
    after = {n: t for bucket in actor.weight_buckets(2**20) for n, t in bucket.tensors()}
    assert any(not torch.equal(before[name], after[name]) for name in before)

"""Loss and gradient norm of training steps do not depend on the layout."""

import numpy as np
import pytest

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch import token_weights
from grpo_megatron.config.schema import OptimizerConfig
from grpo_megatron.megatron.parallel import ParallelSizes
from grpo_megatron.megatron.spec import ActorSpec
from grpo_megatron.metrics import merge, to_floats
from tests.models import random_batch, tiny_qwen3
from tests.parallel import actors

LOSS = PolicyLoss(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01)
LAYOUTS = {
    "tp2": ParallelSizes(tp=2),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp2": ParallelSizes(pp=2),
    "dp2": ParallelSizes(dp=2),
    "tp2pp2": ParallelSizes(tp=2, pp=2),
    "tp2dp2": ParallelSizes(tp=2, dp=2),
}


def make_batches(steps=3):
    batches = []
    for seed in range(steps):
        batch = random_batch(seed=seed)
        rng = np.random.default_rng(seed)
        batch.weight = token_weights(batch, "seq-mean-token-mean", 40)
        for name in ("advantage", "old_logp", "ref_logp"):
            setattr(batch, name, np.where(batch.loss_mask, rng.normal(size=batch.num_tokens), 0).astype(np.float32))
        batch.old_logp -= 4 * batch.loss_mask
        batch.ref_logp -= 4 * batch.loss_mask
        batches.append(batch)
    return batches


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"), tied=request.param)


def run(ranks, model, sizes, packing=True, **options):
    spec = ActorSpec(model, sizes, OptimizerConfig(lr=1e-3, eps=1e-3), **options)
    per_rank = [r for r in ranks.run(actors.train_three_steps, sizes, spec, make_batches(), LOSS, packing) if r is not None]
    steps = []
    for replicas in zip(*per_rank, strict=True):
        metrics = to_floats(merge([replica.metrics for replica in replicas]))
        assert not any(replica.dropped for replica in replicas)
        steps.append((metrics["actor/loss"], replicas[0].grad_norm, metrics["actor/entropy"]))
    return steps


@pytest.fixture(scope="module")
def one_rank(ranks, model):
    return run(ranks, model, ParallelSizes())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_equal_one_rank(ranks, model, one_rank, layout):
    np.testing.assert_allclose(run(ranks, model, LAYOUTS[layout]), one_rank, rtol=1e-5)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_dp2_with_every_optimizer_equals_one_rank(ranks, model, one_rank, distributed, overlap):
    rows = run(ranks, model, ParallelSizes(dp=2), distributed_optimizer=distributed, overlap=overlap)
    np.testing.assert_allclose(rows, one_rank, rtol=1e-5)


def test_four_kv_shards_of_one_kv_head(ranks, tmp_path):
    folder = tiny_qwen3(tmp_path, num_key_value_heads=1)
    np.testing.assert_allclose(run(ranks, folder, ParallelSizes(tp=2)), run(ranks, folder, ParallelSizes()), rtol=1e-5)


def test_packing_changes_nothing(ranks, model, one_rank):
    np.testing.assert_allclose(run(ranks, model, ParallelSizes(), packing=False), one_rank, rtol=1e-5)


def test_the_steps_differ_from_each_other(one_rank):
    """Otherwise the comparisons above would compare constants."""
    assert len({round(loss, 6) for loss, _, _ in one_rank}) == 3
    assert all(norm > 1e-3 for _, norm, _ in one_rank)

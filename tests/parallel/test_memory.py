"""Sleeping and offloading: memory is really released, and no value changes."""

import pytest
import torch

from grpo_megatron.config.schema import OptimizerConfig, Precision
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model
from tests.parallel import memories
from tests.parallel.test_invariance import TOKEN, make_batch

LAYOUTS = {
    "tp1": (ParallelSizes(), {}),
    "tp2": (ParallelSizes(tp=2), {}),
    "pp2vpp2": (ParallelSizes(pp=2, vpp=2), {}),
    "dp2 distributed": (ParallelSizes(dp=2), {"distributed_optimizer": True}),
    "dp2 overlap": (ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}),
    "dp2 bf16": (ParallelSizes(dp=2), {"distributed_optimizer": True, "precision": Precision.bf16}),
    "ep2": (ParallelSizes(dp=2, ep=2), {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {
        family: tiny_model(tmp_path_factory.mktemp(family), family, hidden_size=256, intermediate_size=512)
        for family in ("qwen3", "qwen3_moe")
    }


@pytest.mark.slow_when(lambda layout, offload: layout != "dp2 overlap" or offload)
@pytest.mark.parametrize("offload", [False, True], ids=["", "optimizer offloaded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sleeping_and_offloading_change_nothing(ranks, models, tmp_path, layout, offload):
    sizes, options = LAYOUTS[layout]
    model = models["qwen3_moe" if sizes.ep > 1 else "qwen3"]
    batches = [make_batch(seed) for seed in range(3)]

    def run(optimizer, sleeping):
        config = actor_config(model, sizes, optimizer, offload_folder=str(tmp_path), **options)
        return ranks.run(memories.train, sizes, config, batches, TOKEN, sleeping)

    plain = run(OptimizerConfig(lr=1e-3), sleeping=False)
    changed = run(OptimizerConfig(lr=1e-3, offload=offload), sleeping=True)
    for (before, _), (after, reports) in zip(plain, changed, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        for report in reports:
            assert report["before"]["parameters"] > 0
            assert report["before"]["gradients"] > 0
            assert {
                kind: size for kind, size in report["asleep"].items() if kind != "occupied" and size
            } == {}
            parked = sum(report["before"][kind] for kind in ("parameters", "gradients", "optimizer"))
            assert (
                report["before"]["occupied"] - report["asleep"]["occupied"] > 0.4 * parked
            )  # the allocator keeps some of it
            assert (report["before"]["optimizer"] == 0) == offload

"""Features besides training steps, on TransformerEngine's layers."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.config.fp8 import FP8Config, FP8Format
from grpo_megatron.config.schema import (
    MoEConfig,
    OptimizerConfig,
    Precision,
    Recompute,
    RoutingReplay,
    TransformerImpl,
)
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import with_megatron
from tests.host_syncs import difference
from tests.models import aligned_model
from tests.parallel import checkpoints, routings, syncs
from tests.parallel.invariance import in_hf_names
from tests.parallel.test_checkpoint import assert_equal_states, loss_of
from tests.parallel.test_invariance import TOKEN, make_batch
from tests.parallel.test_routing_replay import whole
from tests.te import features, training
from tests.te.test_training import EXPERT_LAYOUTS, LAYOUTS, ONE, PRECISIONS, te_config

pytestmark = pytest.mark.slow

ENGINE = MoEConfig(routing_replay=RoutingReplay.engine)
LOSS = PolicyLoss()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    families = ("qwen3", "qwen3_moe")
    return {
        family: aligned_model(tmp_path_factory.mktemp(family), family, initializer_range=0.03)
        for family in families
    }


@pytest.fixture(scope="module")
def batch():
    made = make_batch(0, (3, 4, 2))
    made.advantage = made.loss_mask.astype(np.float32)
    return made


def finite(results) -> bool:
    tensors = [gradient for result in results for gradient in result.gradients.values()]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.parametrize("precision", ["bf16", "tensorwise"])
@pytest.mark.parametrize("layout", ["one", "cp2"])
def test_what_padding_leaves_in_memory_reaches_nothing(te_ranks, models, batch, layout, precision):
    sizes = LAYOUTS.get(layout, ONE)
    config = te_config(models["qwen3"], sizes, precision)
    assert finite(te_ranks.run(training.first_step, sizes, config, batch, LOSS, None, np.nan))
    if layout == "cp2":
        assert not finite(
            te_ranks.run(features.first_step_with_real_lengths, sizes, config, batch, LOSS, np.nan)
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", ["tp2sp", "cp2"])
def test_no_micro_batch_makes_the_host_wait(te_ranks, models, batch, layout, precision):
    sizes, numbered = LAYOUTS[layout], replace(batch, routing=None)
    config = te_config(models["qwen3"], sizes, precision)

    def per_micro_batch(passes):
        counted = [te_ranks.run(passes, sizes, config, numbered, count, TOKEN) for count in (1, 3)]
        return {name: difference(*(ranks[0][name] for ranks in counted)) for name in counted[0][0]}

    assert per_micro_batch(syncs.of_passes) == {"reference": [], "log-probs": [], "training": []}
    if layout == "cp2" and precision == "bf16":
        assert all(per_micro_batch(features.syncs_with_real_lengths).values()), (
            "the counter does not see a known one"
        )


def test_the_kernels_meant_are_those_that_run(te_ranks, models, batch):
    """These are the ring's under context parallelism, one product for all experts, rotation in one kernel,
    Adam's.
    """
    config = te_config(models["qwen3_moe"], LAYOUTS["cp2"], "tensorwise", moe=ENGINE)
    for result, calls in te_ranks.run(features.calls_of, LAYOUTS["cp2"], config, batch, LOSS):
        assert finite([result])
        wanted = (
            "te_general_grouped_gemm",
            "fused_multi_row_padding",
            "fused_rope_forward",
            "multi_tensor_adam",
            "fused_attn_bwd",
        )
        assert all(calls[name] > 0 for name in wanted), calls
        assert result.rank.cp_rank == 0 or calls["thd_read_half_tensor"] > 0


RECOMPUTES = {
    "full": {"recompute": Recompute.full},
    "core_attn, mlp": {"recompute": Recompute.selective, "recompute_modules": ("core_attn", "mlp")},
    "layernorm, moe_act": {"recompute": Recompute.selective, "recompute_modules": ("layernorm", "moe_act")},
    "moe": {"recompute": Recompute.selective, "recompute_modules": ("moe",)},
}


@pytest.fixture(scope="module")
def plain(te_ranks, models, batch):
    """A function precision -> a step of the model with experts without recomputation. Each is made once."""
    return cache(
        lambda precision: te_ranks.run(
            training.first_step, ONE, of_experts(models, precision), batch, LOSS, None
        )[0]
    )


def of_experts(models, precision):
    return te_config(models["qwen3_moe"], precision=precision, moe=ENGINE)


@pytest.mark.parametrize("precision", ["bf16", "tensorwise", "blockwise"])
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_recomputation_changes_nothing(te_ranks, models, batch, plain, recompute, precision):
    config, expected = with_megatron(of_experts(models, precision), **RECOMPUTES[recompute]), plain(precision)
    (again,) = te_ranks.run(training.first_step, ONE, config, batch, LOSS, None)
    entries = weight_map(read_architecture(models["qwen3_moe"]), transformer_engine=True)
    whole = in_hf_names(entries, expected.gradients)
    assert min(training.cosines(entries, ONE, again, whole).values()) > 1 - 1e-6
    assert again.norms == pytest.approx(expected.norms, rel=1e-5)


@pytest.mark.parametrize("precision", ["tensorwise", "blockwise"])
def test_reference_and_sleep(te_ranks, models, batch, precision):
    """Weights cast to FP8 are released before engines need room, and in sleep.

    None is used after its weight changed.
    """
    (reports,) = te_ranks.run(
        features.train_sleep_and_refer, ONE, te_config(models["qwen3"], precision=precision), batch, LOSS
    )
    for report in reports:
        assert report["full"]["fp8_casts"] > 0.5 * report["full"]["parameters"]
        assert report["roomy"] == report["full"] | {"fp8_casts": 0}
        assert report["before"]["fp8_casts"] > 0  # log-probs made them again, but not the transposed ones
        assert {kind: size for kind, size in report["asleep"].items() if kind != "occupied" and size} == {}


@pytest.mark.parametrize("precision", ["bf16", "tensorwise", "blockwise"])
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_the_reference_of_experts_begins_as_the_policy(te_ranks, models, batch, layout, precision):
    sizes = EXPERT_LAYOUTS[layout]
    results = te_ranks.run(
        training.first_step, sizes, te_config(models["qwen3_moe"], sizes, precision), batch, LOSS, None
    )
    assert {result.difference for result in results} - {None} == {0.0}


CHECKPOINTS = {
    "delayed": ("qwen3", ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}),
    "tensorwise": ("qwen3_moe", ParallelSizes(dp=2, ep=2), {"distributed_optimizer": True}),
    "bf16": ("qwen3", ParallelSizes(tp=2, sequence_parallel=True), {}),
}


@pytest.mark.parametrize("precision", CHECKPOINTS)
def test_a_checkpoint_goes_on_bit_for_bit_and_loads_in_another_layout(te_ranks, models, tmp_path, precision):
    family, sizes, options = CHECKPOINTS[precision]
    batches = [make_batch(seed, (3, 4, 2)) for seed in range(3)]
    config = te_config(
        models[family], sizes, precision, moe=ENGINE if family == "qwen3_moe" else MoEConfig(), **options
    )
    folder = str(tmp_path / "checkpoint")
    saved = te_ranks.run(checkpoints.save, sizes, config, batches, TOKEN, folder)
    resumed = te_ranks.run(checkpoints.resume, sizes, config, batches[-1], TOKEN, folder)
    for before, after in zip(saved, resumed, strict=True):
        assert_equal_states(after.at, before.at)
        assert_equal_states(after.after, before.after)
    elsewhere = with_megatron(config, **ONE.settings(), distributed_optimizer=False, overlap=False)
    (alone,) = te_ranks.run(checkpoints.resume, ONE, elsewhere, batches[-1], TOKEN, folder)
    assert loss_of([alone]) == pytest.approx(loss_of(saved), rel=0.02, abs=0.02)


def test_training_follows_the_old_policys_routing(te_ranks, tmp_path):
    """The routers are negated between the passes, as in the test with local layers."""
    sizes, batch, model = EXPERT_LAYOUTS["tp2sp"], make_batch(0), aligned_model(tmp_path, "qwen3_moe")
    recording = te_config(model, sizes, moe=MoEConfig(routing_replay=RoutingReplay.old_policy))
    results = te_ranks.run(routings.record_flip_train, sizes, recording, batch, TOKEN)
    routing = whole([recorded for _, recorded in results], batch)[:, [0, 2, 3]]
    assert (routing >= 0).all()
    following = te_config(model, moe=ENGINE)
    (same, _), *_ = te_ranks.run(routings.flip_train, ONE, following, replace(batch, routing=routing), TOKEN)
    (other, _), *_ = te_ranks.run(routings.flip_train, ONE, replace(following, moe=MoEConfig()), batch, TOKEN)
    entropies = [metrics for metrics, _ in results if metrics is not None]
    ours = sum(total for total, _ in entropies) / sum(count for _, count in entropies)
    followed, chosen = (abs(ours - total / count) for total, count in (same, other))
    assert followed < 0.2 * chosen


@pytest.mark.parametrize("ends", [(1, 2), (4, 0)])
def test_layers_that_stay_in_bf16(te_ranks, models, batch, ends):
    """Their products are not FP8. If all layers are among them, nothing is FP8."""
    first, last = ends
    fp8 = FP8Config(bf16_first_layers=first, bf16_last_layers=last)
    config = with_megatron(te_config(models["qwen3"], precision="tensorwise"), fp8=fp8)
    ((_, calls),) = te_ranks.run(features.calls_of, ONE, config, batch, LOSS)
    ((_, of_all),) = te_ranks.run(
        features.calls_of, ONE, te_config(models["qwen3"], precision="tensorwise"), batch, LOSS
    )
    assert calls["quantize"] == of_all["quantize"] * (4 - first - last) // 4


def test_gradients_in_e4m3_are_others(te_ranks, models, batch):
    config = te_config(models["qwen3"], precision="tensorwise")
    (hybrid,) = te_ranks.run(training.first_step, ONE, config, batch, LOSS, None)
    e4m3 = with_megatron(config, fp8=FP8Config(format=FP8Format.e4m3))
    (other,) = te_ranks.run(training.first_step, ONE, e4m3, batch, LOSS, None)
    assert other.norms[0] != hybrid.norms[0]
    assert other.norms[0] == pytest.approx(hybrid.norms[0], rel=0.02)


def test_fp32_is_refused_and_auto_takes_local_layers(te_ranks, models, batch):
    config = with_megatron(te_config(models["qwen3"]), precision=Precision.fp32)
    with pytest.raises(AssertionError, match="precision=fp32 is not possible with"):
        te_ranks.run(training.first_step, ONE, config, batch, LOSS, None)
    auto = with_megatron(replace(config, optimizer=OptimizerConfig()), transformer_impl=TransformerImpl.auto)
    ((_, calls),) = te_ranks.run(features.calls_of, ONE, auto, batch, LOSS)
    assert calls["generic_gemm"] == 0

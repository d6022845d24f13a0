"""R2 and R3: training follows the routing of the old policy's pass, or a given one."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.schema import MoEConfig, Recompute, RoutingReplay
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model
from tests.parallel import routings
from tests.parallel.test_invariance import OPTIMIZER, TOKEN, make_batch

LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2sp": ParallelSizes(tp=2, sequence_parallel=True),
    "pp2vpp2": ParallelSizes(pp=2, vpp=2),
    "cp2": ParallelSizes(cp=2),
    "ep2pp2": ParallelSizes(dp=2, ep=2, pp=2),
}
OLD_POLICY = MoEConfig(routing_replay=RoutingReplay.old_policy)
ENGINE = MoEConfig(routing_replay=RoutingReplay.engine)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


def configured(model, sizes, moe, **options):
    return actor_config(model, sizes, OPTIMIZER, moe=moe, **options)


def whole(results, batch, k=2):
    """Return int [T, layers, k], assembled from what the ranks recorded. Every layer must be there."""
    routing = np.full((batch.num_tokens, 4, k), -1)
    for result in results:
        for layer, (tokens, chosen) in result.items():
            routing[tokens, layer] = chosen
    return routing


@pytest.mark.slow_when(
    lambda layout, recompute: (
        layout not in ("cp2", "ep2pp2") or (recompute == Recompute.full) != (layout == "ep2pp2")
    )
)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full], ids=["", "recompute"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_follows_the_old_policys_routing(ranks, model, layout, recompute):
    """The routers are negated between the two passes. The replay must not notice."""
    sizes, batch = LAYOUTS[layout], make_batch(0)
    results = ranks.run(
        routings.record_flip_train,
        sizes,
        configured(model, sizes, OLD_POLICY, recompute=recompute),
        batch,
        TOKEN,
    )
    routing = whole([recorded for _, recorded in results], batch)
    with_experts = [0, 2, 3]
    assert (routing[:, with_experts] >= 0).all()
    assert (routing[:, with_experts, 0] != routing[:, with_experts, 1]).all()
    # One rank, given the recorded routing, computes the same entropy with flipped routers...
    given = replace(batch, routing=routing[:, with_experts])
    (same, _), *_ = ranks.run(
        routings.flip_train, ParallelSizes(), configured(model, ParallelSizes(), ENGINE), given, TOKEN
    )
    # ... and, left to choose, another.
    (other, _), *_ = ranks.run(
        routings.flip_train, ParallelSizes(), configured(model, ParallelSizes(), MoEConfig()), batch, TOKEN
    )
    entropies = [metrics for metrics, _ in results if metrics is not None]
    ours = sum(total for total, _ in entropies) / sum(count for _, count in entropies)
    np.testing.assert_allclose(ours, same[0] / same[1], rtol=1e-5)
    assert abs(ours - other[0] / other[1]) > 1e-3


@pytest.mark.slow
def test_the_bias_and_groups_of_sigmoid_routing_do_not_change_a_replay(ranks, tmp_path):
    """The same for a model whose own choice also depends on a bias of the experts and on groups of them."""
    model, sizes, batch = tiny_model(tmp_path, "deepseek_v3"), LAYOUTS["tp2sp"], make_batch(0)
    results = ranks.run(routings.record_flip_train, sizes, configured(model, sizes, OLD_POLICY), batch, TOKEN)
    routing = whole([recorded for _, recorded in results], batch, k=4)[:, 1:]
    assert (np.diff(np.sort(routing, axis=2), axis=2) > 0).all()
    # 4 of 8 experts out of 2 of the 4 groups are both experts of these groups.
    pairs = np.sort(routing, axis=2).reshape(*routing.shape[:2], 2, 2)
    assert (pairs[..., 0] // 2 == pairs[..., 1] // 2).all()
    given = replace(batch, routing=routing)
    (same, _), *_ = ranks.run(
        routings.flip_train, ParallelSizes(), configured(model, ParallelSizes(), ENGINE), given, TOKEN
    )
    ((total, count), _) = results[0]
    np.testing.assert_allclose(total / count, same[0] / same[1], rtol=1e-5)


def test_without_a_recorded_pass_there_is_nothing_to_follow(ranks, model):
    with pytest.raises(AssertionError, match="compute the old log-probs first, to record the routing"):
        ranks.run(
            routings.flip_train,
            ParallelSizes(),
            configured(model, ParallelSizes(), OLD_POLICY),
            make_batch(0),
            TOKEN,
        )


def test_samples_without_routing_are_refused(ranks, model):
    with pytest.raises(AssertionError, match="the samples have none"):
        ranks.run(
            routings.flip_train,
            ParallelSizes(),
            configured(model, ParallelSizes(), ENGINE),
            make_batch(0),
            TOKEN,
        )


def test_routing_of_another_model_is_refused(ranks, model):
    batch = make_batch(0, experts=(2, 4, 2))  # the model has 3 layers with experts
    with pytest.raises(AssertionError, match="routing for 2 layers"):
        ranks.run(
            routings.flip_train, ParallelSizes(), configured(model, ParallelSizes(), ENGINE), batch, TOKEN
        )

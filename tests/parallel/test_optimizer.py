"""The optimizer on real ranks: decay groups, clipping, dropped steps, master weights, resuming the
schedule.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.schedule import schedule
from grpo_megatron.cluster.hang_detector import HangDetector
from grpo_megatron.cluster.placement import allocate
from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import ClusterConfig, LrSchedule, OptimizerConfig, Precision
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.trainer.policy import PolicyTrainer
from tests.configs import actor_config, sizes_of
from tests.models import tiny_model
from tests.parallel import optimizers
from tests.parallel.invariance import worst_difference
from tests.parallel.test_invariance import REPLAY, TOKEN, Suite, make_batch
from tests.streams import selected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("dense"), "qwen3")


# --- who decays

FAMILIES = {"qwen2": {"tied": True}, "qwen3": {}, "qwen3_moe": {}}
GROUPS = {
    "tied": ("qwen2", ParallelSizes(), False),
    "tied pp2": ("qwen2", ParallelSizes(pp=2), False),
    "tp2": ("qwen3", ParallelSizes(tp=2), False),
    "dp2 distributed": ("qwen3", ParallelSizes(dp=2), True),
    "ep2": ("qwen3_moe", ParallelSizes(dp=2, ep=2), False),
    "ep2 distributed": ("qwen3_moe", ParallelSizes(dp=2, ep=2), True),
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return {
        name: tiny_model(tmp_path_factory.mktemp(name), name, **options) for name, options in FAMILIES.items()
    }


def decays(name: str, tied: bool, decay_embeddings: bool) -> bool:
    if name.endswith(".bias") or "norm" in name:
        return False
    embedding = name == "embedding.word_embeddings.weight" or (tied and name == "output_layer.weight")
    return decay_embeddings or not embedding


@pytest.mark.slow_when(lambda layout: layout not in ("tied pp2", "ep2 distributed"))
@pytest.mark.parametrize("decay_embeddings", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("layout", GROUPS)
def test_norms_and_biases_do_not_decay(ranks, families, layout, decay_embeddings):
    """A step whose gradient is zero multiplies a parameter by 1 - lr * weight_decay, or leaves it
    unchanged.
    """
    family, sizes, distributed = GROUPS[layout]
    optimizer = OptimizerConfig(lr=0.5, weight_decay=0.1, decay_embeddings=decay_embeddings)
    config = actor_config(families[family], sizes, optimizer, distributed_optimizer=distributed)
    batch = make_batch(0)
    batch.weight = np.zeros_like(batch.weight)
    found: dict[str, float] = {}
    for result in ranks.run(optimizers.shrunk_by_decay, sizes, config, batch, TOKEN):
        assert all(
            found.setdefault(name, factor) == pytest.approx(factor, abs=1e-6)
            for name, factor in result.items()
        )
    tied = FAMILIES[family].get("tied", False)
    expected = {name: 0.95 if decays(name, tied, decay_embeddings) else 1.0 for name in found}
    assert found == pytest.approx(expected, abs=1e-6)
    kinds = {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "decoder.layers.0.input_layernorm.weight",
    }
    kinds |= {
        "qwen2": {"decoder.layers.3.self_attention.linear_qkv.bias"},
        "qwen3": {"decoder.layers.3.self_attention.q_layernorm.weight", "output_layer.weight"},
        "qwen3_moe": {
            "decoder.layers.0.mlp.router.weight",
            "decoder.layers.3.mlp.experts.local_experts.3.linear_fc2.weight",
        },
    }[family]
    assert kinds <= found.keys()
    if family == "qwen2" and sizes.pp == 2:
        assert "output_layer.weight" in found  # the last stage's copy of the embedding


# --- clipping

CLIPPED = OptimizerConfig(lr=0.1, eps=1e-3, weight_decay=0.1, clip_grad=0.1)
CLIPPING = {
    "tp2": ("dense", ParallelSizes(tp=2), {}),
    "pp2": ("dense", ParallelSizes(pp=2), {}),
    "dp2 distributed": ("dense", ParallelSizes(dp=2), {"distributed_optimizer": True}),
    "ep2": ("experts", ParallelSizes(dp=2, ep=2), {}),
    "ep2 distributed": ("experts", ParallelSizes(dp=2, ep=2), {"distributed_optimizer": True}),
    "ep2tp2": ("experts", ParallelSizes(dp=2, ep=2, tp=2, sequence_parallel=True), {}),
}


@pytest.fixture(scope="module")
def suites(ranks, folder, families):
    return {
        "dense": Suite(ranks, folder),
        "experts": Suite(ranks, families["qwen3_moe"], experts=(3, 4, 2), moe=REPLAY),
    }


def reference_step(before, gradients, config: OptimizerConfig, clip_grad: float) -> dict[str, torch.Tensor]:
    """Do a step of torch's AdamW on whole tensors, with gradients clipped by torch."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    for name, parameter in parameters.items():
        parameter.grad = gradients[name][1].view_as(parameter).clone()
    torch.nn.utils.clip_grad_norm_(parameters.values(), clip_grad)
    groups = [
        {
            "params": [p for name, p in parameters.items() if decays(name, False, True) == decayed],
            "weight_decay": decay,
        }
        for decayed, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps).step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.slow_when(lambda layout: layout != "dp2 distributed")
@pytest.mark.parametrize("layout", CLIPPING)
def test_a_clipped_step_is_the_references(ranks, suites, layout):
    model, sizes, options = CLIPPING[layout]
    suite = suites[model]
    one = suite.case(ParallelSizes(), TOKEN)
    before, expected = ranks.run(
        optimizers.one_step, ParallelSizes(), replace(one, config=replace(one.config, optimizer=CLIPPED))
    )[0]
    norm = math.sqrt(sum(float(flat.double().square().sum()) for _, flat in expected.gradients.values()))
    assert norm > 3 * CLIPPED.clip_grad
    case = suite.case(sizes, TOKEN, options)
    results = [
        result
        for _, result in ranks.run(
            optimizers.one_step, sizes, replace(case, config=replace(case.config, optimizer=CLIPPED))
        )
    ]

    def worst(clip_grad: float) -> float:
        parameters = reference_step(before, expected.gradients, CLIPPED, clip_grad)
        reference = replace(expected, parameters=parameters)
        return max(max(worst_difference(suite.arch, sizes, result, reference).values()) for result in results)

    for result in results:
        assert result.grad_norm[0] == pytest.approx(norm, rel=1e-5)
    assert worst(CLIPPED.clip_grad) <= 1
    # The comparison notices a norm of half the ranks' parts.
    assert worst(CLIPPED.clip_grad * math.sqrt(2)) > 100


# --- dropped steps

DROPPING = {
    "dp2": (ParallelSizes(dp=2), {}),
    "dp2 distributed, overlap": (ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}),
    "dp2 bf16": (ParallelSizes(dp=2), {"precision": Precision.bf16}),
    "dp2 bf16 distributed": (
        ParallelSizes(dp=2),
        {"precision": Precision.bf16, "distributed_optimizer": True},
    ),
    "dp2tp2": (ParallelSizes(dp=2, tp=2), {}),
    "dp2pp2": (ParallelSizes(dp=2, pp=2), {}),
}
WARMING_UP = OptimizerConfig(lr=1e-3, lr_warmup_steps=5, weight_decay=0.01)


def with_fault(batch, fault: str):
    """Return the batch with one bad number, which affects one replica, or with a loss that is far too
    large.
    """
    token = np.flatnonzero(batch.weight > 0)[7]
    if fault == "large":
        batch.weight = batch.weight * 1000
    else:
        getattr(batch, fault)[token] = np.nan
    return batch


def assert_same_bits(states, others) -> None:
    for state, other in zip(states, others, strict=True):
        assert state.numbers == other.numbers
        assert state.tensors.keys() == other.tensors.keys()
        different = [
            name for name, tensor in state.tensors.items() if not torch.equal(tensor, other.tensors[name])
        ]
        assert not different


def check_dropping(ranks, config, fault: str) -> None:
    """Compare a good, a bad and a good step with only the two good ones."""
    first, second = make_batch(0), make_batch(1)
    batches = [first, with_fault(make_batch(2), fault), second]
    found = ranks.run(optimizers.states_after_steps, sizes_of(config), config, batches, TOKEN)
    without = ranks.run(optimizers.states_after_steps, sizes_of(config), config, [first, second], TOKEN)
    for (states, _), (expected, _) in zip(found, without, strict=True):
        assert_same_bits([states[1], states[2], states[3]], [expected[1], expected[1], expected[2]])
        assert any(
            not torch.equal(tensor, states[2].tensors[name]) for name, tensor in states[3].tensors.items()
        )
    replicas = [results for _, results in found if results[0]]
    assert len(replicas) == sizes_of(config).dp
    assert [[result.dropped for result in results] for results in replicas] == [[False, True, False]] * len(
        replicas
    )
    assert [result.lr for result in replicas[0]] == pytest.approx([0.0002, 0.0004, 0.0004])
    losses = [results[1].metrics["actor/loss"].value for results in replicas]
    norms = {results[1].grad_norm for results in replicas}
    if fault == "large":
        assert len(norms) == 1
        assert all(math.isfinite(value) for value in [*losses, *norms])
    else:
        assert sum(math.isnan(loss) for loss in losses) == 1, "the fault is meant for one replica"
        assert all(math.isnan(norm) for norm in norms)


@pytest.mark.slow_when(lambda layout, fault: (fault, layout) != ("weight", "dp2 distributed, overlap"))
@pytest.mark.parametrize("fault", ["weight", "advantage"])
@pytest.mark.parametrize("layout", DROPPING)
def test_a_nan_on_one_replica_drops_the_step_on_all(ranks, folder, layout, fault):
    sizes, options = DROPPING[layout]
    check_dropping(ranks, actor_config(folder, sizes, WARMING_UP, **options), fault)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "dp2 bf16 distributed"])
def test_a_norm_over_the_limit_drops_the_step(ranks, folder, layout):
    sizes, options = DROPPING[layout]
    check_dropping(
        ranks,
        actor_config(folder, sizes, replace(WARMING_UP, max_grad_norm_to_step=100.0), **options),
        "large",
    )


def test_replicas_with_norms_a_last_bit_apart_drop_together(ranks, folder):
    sizes = ParallelSizes(dp=2)
    config = actor_config(folder, sizes, OptimizerConfig(max_grad_norm_to_step=1.0))
    outcomes = ranks.run(optimizers.disagreement, sizes, config, make_batch(0), TOKEN)
    assert outcomes == [(1.0, True), (math.nextafter(1.0, 2.0), True)]


@pytest.mark.slow
def test_too_many_dropped_steps_stop_the_run(folder, tmp_path):
    """Both `train` and `sft` step with PolicyTrainer."""
    optimizer, limits = OptimizerConfig(max_dropped_steps=2), ClusterConfig(call_timeout=120)
    config = actor_config(folder, ParallelSizes(dp=2), optimizer, cluster=limits)
    cluster = allocate(config, num_ranks=2, num_engines=0)
    try:
        actor = PolicyTrainer(
            cluster,
            config,
            Command.train,
            log_dir=str(tmp_path),
            hang_detector=HangDetector(str(tmp_path), 600),
        )
        good, bad = make_batch(0), with_fault(make_batch(2), "advantage")

        def step(number: int, batch) -> float:
            plan = schedule(batch.lengths, 160, dp=2)
            streams = plan.divided(lambda part: selected(batch, part))
            return actor.train_step(streams, PolicyLoss(), number)["actor/dropped_steps"].result()

        assert [step(number, batch) for number, batch in enumerate([bad, good, bad])] == [1, 0, 1]
        with pytest.raises(
            UserError,
            match=r"2 optimizer steps in a row were dropped, the last one in step 3 .* norms nan, nan",
        ):
            step(3, bad)
        actor.close()
    finally:
        cluster.close()


# --- master weights


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_updates_below_the_resolution_of_bf16_add_up(ranks, folder, distributed):
    """Weights in [2^-4, 2^-3) lie 2^-11 apart in bf16.

    Without masters, each update of less than half of that would be lost.
    """
    steps, sizes = 8, ParallelSizes(dp=2)
    config = actor_config(
        folder, sizes, OptimizerConfig(lr=1e-4), Precision.bf16, distributed_optimizer=distributed
    )
    results = ranks.run(optimizers.masters_after_steps, sizes, config, make_batch(0), TOKEN, steps)
    assert {name for result in results for name in result} >= {
        "decoder.layers.0.mlp.linear_fc1.weight",
        "output_layer.weight",
    }
    watched = moved = 0
    for entry in (entry for result in results for entry in result.values()):
        assert entry.dtypes == {torch.float32}
        for weights, masters in zip(entry.weights, entry.masters, strict=True):
            assert weights.dtype == torch.bfloat16
            assert torch.equal(weights, masters.bfloat16())
        history = torch.stack(entry.masters)
        watch = ((history.abs() >= 2**-4) & (history.abs() < 2**-3)).all(0)
        updates = history.diff(dim=0).abs()[:, watch]
        assert (updates < 2**-12).all()
        watched += int(watch.sum())
        moved += int((entry.weights[-1] != entry.weights[0])[watch].sum())
    assert watched > 1000
    assert moved > 0.5 * watched


# --- resuming

COSINE = OptimizerConfig(
    lr=1e-3, lr_min=1e-4, lr_schedule=LrSchedule.cosine, lr_warmup_steps=2, lr_decay_steps=6, weight_decay=0.1
)


def cosine(k: int) -> float:
    return 1e-3 * k / 2 if k <= 2 else 1e-4 + 9e-4 * (1 + math.cos(math.pi * (k - 2) / 4)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_a_checkpoint_continues_the_schedule_with_the_present_settings(ranks, folder, tmp_path, distributed):
    sizes, batches = ParallelSizes(dp=2), [make_batch(seed) for seed in range(3)]

    def run(optimizer: OptimizerConfig, batches, **where):
        config = actor_config(folder, sizes, optimizer, distributed_optimizer=distributed)
        return ranks.run(
            optimizers.rates_and_groups, sizes, config, batches, TOKEN, where.get("load"), where.get("save")
        )

    checkpoint = str(tmp_path / "checkpoint")
    saved = run(COSINE, batches, save=checkpoint)
    assert saved[0].rates == pytest.approx([cosine(k) for k in (1, 2, 3)])
    rest = run(COSINE, batches, load=checkpoint)
    assert rest[0].rates == pytest.approx([cosine(k) for k in (4, 5, 6)])
    changed = replace(
        COSINE,
        lr_schedule=LrSchedule.linear,
        lr_min=0.0,
        lr_decay_steps=10,
        weight_decay=0.2,
        decay_embeddings=False,
    )
    other = run(changed, batches, load=checkpoint)
    assert other[0].rates == pytest.approx([1e-3 * (1 - (k - 2) / 8) for k in (4, 5, 6)])
    decay = {name: value for result in other for name, value in result.decay.items()}
    assert decay == {name: 0.2 if decays(name, False, False) else 0.0 for name in decay}
    assert decay["embedding.word_embeddings.weight"] == 0.0
    # Every parameter has its own moments again, though one has changed its group.
    untouched = run(changed, [], load=checkpoint)
    for result, original in zip(untouched, saved, strict=True):
        assert result.moments.keys() == original.moments.keys()
        assert all(torch.equal(moment, original.moments[name]) for name, moment in result.moments.items())
    assert bool(saved[0].moments) != distributed

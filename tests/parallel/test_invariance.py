"""Two optimizer steps do not depend on the layout: loss, every gradient and every parameter agree to 1e-5."""

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.config.schema import MoEConfig, OptimizerConfig, Recompute, RefConfig, RoutingReplay
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model
from tests.parallel.invariance import Case, LocalMean, check, two_steps

TOKEN = PolicyLoss(AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, entropy_coeff=0.01))
GSPO = replace(TOKEN, algorithm=replace(TOKEN.algorithm, ratio_level="sequence"))
FULL_KL = replace(TOKEN, algorithm=replace(TOKEN.algorithm, kl_loss_type="full"))
LOSSES = {"token": TOKEN, "gspo": GSPO}
# With the usual 1e-8 Adam turns rounding into full-sized updates where gradients vanish.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01)

LAYOUTS = {
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "pp4": {"pp": 4},
    "pp2uneven": {"pp": 2, "pipeline_layers": (1, 3)},
    "cp2": {"cp": 2},
    "cp2tp2sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "dp2": {"dp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
}


def make_batch(seed: int, experts: tuple[int, int, int] | None = None) -> TrainBatch:
    """Return sequences of 2 to 150 tokens with random weights.

    experts: (layers, number of experts, k) of a given routing.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate([150, 2, 97, 3, 41, 5, 18, 66, 9, 120, 2, 31]):
        response = max(1, int(length * rng.uniform(0.3, 0.95)))
        mask = rng.random(response) < 0.9
        mask[0] = True
        samples.append(
            Sample.of(
                group_id=i // 4,
                trajectory_id=i,
                prompt_ids=rng.integers(3, 61, length - response).astype(np.int32),
                response_ids=rng.integers(3, 61, response).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=-4 + rng.normal(size=response).astype(np.float32),
                finish_reason="stop",
                reward=0.0,
            )
        )
    batch = TrainBatch.from_samples(samples)
    count = batch.num_tokens
    batch.weight = np.where(batch.loss_mask, rng.uniform(0.1, 2.0, count), 0).astype(np.float32) / 256
    batch.advantage = np.where(batch.loss_mask, rng.normal(size=count), 0).astype(np.float32)
    batch.old_logp = np.where(batch.loss_mask, -5 + rng.normal(size=count), 0).astype(np.float32)
    batch.ref_logp = np.where(batch.loss_mask, -5 + rng.normal(size=count), 0).astype(np.float32)
    if experts:
        layers, number, k = experts
        batch.routing = np.stack(
            [[rng.permutation(number)[:k] for _ in range(layers)] for _ in range(count)]
        ).astype(np.int16)
    return batch


class Suite:
    """A model, its batches, and the results of one rank."""

    def __init__(self, ranks, folder: str, experts=None, **options):
        self.ranks, self.folder, self.options = ranks, folder, options
        self.arch = read_architecture(folder)
        self.batches = [make_batch(seed, experts) for seed in (0, 1)]
        self._one_rank = {}

    def case(self, sizes: ParallelSizes, loss, options=None, **rest) -> Case:
        config = actor_config(
            self.folder,
            sizes,
            OPTIMIZER,
            with_reference=loss.needs_full_kl,
            **{**self.options, **(options or {})},
        )
        return Case(config, loss, self.batches, **rest)

    def one_rank(self, loss, **rest):
        key = str((loss, rest))
        if key not in self._one_rank:
            self._one_rank[key] = self.ranks.run(
                two_steps, ParallelSizes(), self.case(ParallelSizes(), loss, **rest)
            )[0]
        return self._one_rank[key]

    def check(self, sizes: ParallelSizes, loss, options=None, expected=None, **rest) -> None:
        case = self.case(sizes, loss, options, **rest)
        check(self.arch, case, self.ranks.run(two_steps, sizes, case), expected or self.one_rank(loss))


@pytest.fixture(scope="module")
def dense(ranks, tmp_path_factory):
    return Suite(ranks, tiny_model(tmp_path_factory.mktemp("dense"), "qwen3"))


@pytest.fixture(scope="module")
def tied(ranks, tmp_path_factory):
    return Suite(ranks, tiny_model(tmp_path_factory.mktemp("tied"), "qwen2", tied=True))


# Stages that are first and last only are in the uneven ones too, and in TP 2 with PP 2.
@pytest.mark.slow_when(lambda layout, loss: loss == "gspo" or layout not in ("pp2vpp2", "cp2tp2sp"))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(dense, layout, loss):
    dense.check(ParallelSizes(**LAYOUTS[layout]), LOSSES[loss])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2vpp2", "cp2", "tp2pp2"])
def test_tied_embeddings_and_qkv_bias(tied, layout):
    tied.check(ParallelSizes(**LAYOUTS[layout]), TOKEN)


@pytest.fixture(scope="module")
def normed(ranks, tmp_path_factory):
    return Suite(ranks, tiny_model(tmp_path_factory.mktemp("normed"), "gemma3", tied=True))


@pytest.mark.slow_when(lambda layout: layout != "cp2tp2sp")
@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2", "pp2vpp2", "cp2", "cp2tp2sp", "dp2", "tp2pp2"])
def test_norms_of_outputs_and_two_rotary_embeddings(normed, layout):
    normed.check(ParallelSizes(**LAYOUTS[layout]), TOKEN)


@pytest.mark.slow_when(lambda loss, overlap: loss == "gspo" or not overlap)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_distributed_optimizer(dense, loss, overlap):
    dense.check(ParallelSizes(dp=2), LOSSES[loss], {"distributed_optimizer": True, "overlap": overlap})


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_eight_ranks(dense, loss):
    dense.check(ParallelSizes(tp=2, pp=2, dp=2), LOSSES[loss])


FACTORS = {
    "small micro-batches": {"max_tokens": 152},
    "one sequence per micro-batch": {"packing": False},
    "partition of two replicas": {"partition": ParallelSizes(dp=2)},
    "constant-length packs": {"options": {"pack_tokens": 300}},
    "selective recompute": {
        "options": {"recompute": Recompute.selective, "recompute_modules": ("core_attn", "mlp")}
    },
    "full recompute": {"options": {"recompute": Recompute.full}},
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("layout", ["tp1", "tp2pp2", "cp2"])
def test_other_factor(dense, layout, factor):
    sizes = ParallelSizes(**LAYOUTS.get(layout, {}))
    factors = dict(FACTORS[factor])
    if sizes.cp > 1 and "max_tokens" in factors:
        factors["max_tokens"] = 160
    dense.check(sizes, TOKEN, **factors)


# Those of PP 2 and of CP 2 with TP 2 and SP are in the next test.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "pp2vpp2", "tp2pp2", "cp2", "dp2"])
def test_full_kl(dense, layout):
    dense.check(ParallelSizes(**LAYOUTS[layout]), FULL_KL)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "cp2tp2sp"])
def test_full_kl_with_hidden_states_on_the_host(dense, layout):
    """Some of the micro-batches' hidden states are there in one layout, all of them in the other."""
    dense.check(
        ParallelSizes(**LAYOUTS[layout]),
        FULL_KL,
        {"ref": RefConfig(hidden_gib=5e4 / 2**30 if layout == "pp2" else 0)},
    )


@pytest.mark.slow
def test_overlap_with_the_interleaved_schedule(dense):
    options = {"distributed_optimizer": True, "overlap": True}
    dense.check(ParallelSizes(pp=2, vpp=2, dp=2), TOKEN, options)


def test_the_comparison_compares_something(dense):
    """Gradients exist everywhere and have different sizes, and the loss changes."""
    one = dense.one_rank(TOKEN)
    assert all(float(flat.abs().max()) > 0 for _, flat in one.gradients.values())
    assert one.loss[0]["actor/loss"].value != one.loss[1]["actor/loss"].value
    assert one.loss[0]["actor/loss"].value != dense.one_rank(GSPO).loss[0]["actor/loss"].value


# --- layers with experts

EXPERT_LAYOUTS = {
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep2cp2": {"cp": 2, "ep": 2},
    "ep2tp2": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "ep2pp2": {"dp": 2, "ep": 2, "pp": 2},
    "tp2sp_as_ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
}
REPLAY = MoEConfig(routing_replay=RoutingReplay.engine)
REPLAYED_LOSSES = MoEConfig(aux_loss_coeff=0.5, z_loss_coeff=0.1, routing_replay=RoutingReplay.engine)


@pytest.fixture(scope="module")
def experts(ranks, tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe")
    return Suite(ranks, folder, experts=(3, 4, 2), moe=REPLAY)


# What tp2sp, cp2 and ep2 have is in their combinations too.
@pytest.mark.slow_when(lambda layout, loss: loss == "gspo" or layout != "ep2cp2")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts(experts, layout, loss):
    experts.check(ParallelSizes(**EXPERT_LAYOUTS[layout]), LOSSES[loss])


@pytest.fixture(scope="module")
def shared_experts(ranks, tmp_path_factory):
    """{family: its suite}"""
    routings = {
        "glm4_moe": (3, 4, 2),
        "deepseek_v3": (3, 8, 4),
        "minimax_m2": (4, 4, 2),
        "gpt_oss": (4, 4, 2),
    }
    folders = {family: tiny_model(tmp_path_factory.mktemp(family), family) for family in routings}
    return {
        family: Suite(ranks, folders[family], experts=routing, moe=REPLAY)
        for family, routing in routings.items()
    }


@pytest.mark.slow_when(
    lambda family, layout: layout != {"minimax_m2": "ep2tp2", "gpt_oss": "ep2cp2"}.get(family)
)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "minimax_m2", "gpt_oss"])
def test_shared_experts_latent_attention_joint_norms_and_sinks(shared_experts, family, layout):
    shared_experts[family].check(ParallelSizes(**EXPERT_LAYOUTS[layout]), TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp1", "tp2sp"])
def test_latent_attention_with_recompute(shared_experts, layout):
    options = {"recompute": Recompute.selective, "recompute_modules": ("core_attn",)}
    shared_experts["deepseek_v3"].check(ParallelSizes(**EXPERT_LAYOUTS.get(layout, {})), TOKEN, options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_experts_with_recompute(experts, recompute):
    options = {"recompute": recompute, "recompute_modules": ("moe",)}
    experts.check(ParallelSizes(pp=2, dp=2, ep=2), TOKEN, options)


@pytest.mark.slow
def test_experts_with_distributed_optimizer_and_overlap(experts):
    experts.check(ParallelSizes(dp=2, ep=2), TOKEN, {"distributed_optimizer": True, "overlap": True})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "ep2", "ep2tp2", "pp2vpp2"])
def test_auxiliary_losses_with_the_partition_held_fixed(experts, layout):
    """The load-balancing loss is not linear in the tokens, so that one rank follows the same
    micro-batches.
    """
    sizes = ParallelSizes(**EXPERT_LAYOUTS[layout])
    fixed = {"options": {"moe": REPLAYED_LOSSES}, "partition": sizes, "max_tokens": 160}
    experts.check(sizes, TOKEN, expected=experts.one_rank(TOKEN, **fixed), **fixed)


def test_auxiliary_losses_change_the_gradient(experts):
    with pytest.raises(AssertionError, match=r"beyond the tolerance|Not equal"):
        experts.check(ParallelSizes(), TOKEN, {"moe": REPLAYED_LOSSES})


# --- planted faults


def assert_noticed(suite, sizes, loss, expected=None, **rest):
    with pytest.raises(AssertionError, match=r"beyond the tolerance|Not equal"):
        suite.check(sizes, loss, expected=expected, **rest)


def test_a_local_denominator_is_noticed(dense):
    faulty = LocalMean(TOKEN)
    assert_noticed(dense, ParallelSizes(dp=2), faulty, expected=dense.one_rank(faulty))


def test_missing_cp_reductions_are_noticed(dense):
    assert_noticed(dense, ParallelSizes(cp=2), TOKEN, fault="keys' gradients stay on their CP rank")
    assert_noticed(dense, ParallelSizes(cp=2), GSPO, fault="sequence sums of one CP rank")


@pytest.mark.slow
def test_auxiliary_losses_scaled_by_one_ranks_tokens_are_noticed(experts):
    fixed = {"options": {"moe": REPLAYED_LOSSES}}
    expected = experts.one_rank(TOKEN, **fixed)
    sizes = ParallelSizes(**EXPERT_LAYOUTS["tp2sp"])
    assert_noticed(
        experts, sizes, TOKEN, expected=expected, fault="auxiliary losses by one rank's tokens", **fixed
    )


def test_the_wrong_vpp_order_is_noticed(dense):
    assert_noticed(dense, ParallelSizes(pp=2, vpp=2), TOKEN, fault="wrong VPP order")

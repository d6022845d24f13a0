"""Models with gated delta networks in every layout.

Log-probs equal transformers', exports are exact, and two optimizer steps equal one rank's. Sequences have 2
to 150 tokens, so that boundaries, and the pieces of CP ranks, lie anywhere within chunks of 64 tokens.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5MoeForConditionalGeneration

from grpo_megatron.config.schema import OptimizerConfig, Recompute
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.configs import actor_config
from tests.models import random_batch, tiny_model, transformers_logprobs
from tests.parallel import actors
from tests.parallel.test_families import check
from tests.parallel.test_invariance import REPLAY, TOKEN, Suite, assert_noticed
from tests.vision_models import vision_model

DENSE = {
    "tp1": {},
    "tp2": {"tp": 2},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "pp2uneven": {"pp": 2, "pipeline_layers": (1, 3)},
    "dp2": {"dp": 2},
    "tp2pp2": {"tp": 2, "pp": 2},
    "cp2": {"cp": 2},
    "cp2tp2": {"cp": 2, "tp": 2},
    "cp2pp2": {"cp": 2, "pp": 2},
}
EXPERTS = {
    "tp1": {},
    "tp2sp": {"tp": 2, "sequence_parallel": True},
    "pp2vpp2": {"pp": 2, "vpp": 2},
    "ep2": {"dp": 2, "ep": 2},
    "ep2tp2": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "ep2pp2": {"dp": 2, "ep": 2, "pp": 2},
    "tp2sp_as_ep2": {"tp": 2, "ep": 2, "sequence_parallel": True},
    "cp2": {"cp": 2},
    "cp2_as_ep2": {"cp": 2, "ep": 2},
    "cp2tp2sp": {"cp": 2, "tp": 2, "sequence_parallel": True},
    "cp2pp2": {"cp": 2, "pp": 2},
}
FEW = ("tp1", "tp2sp", "pp2vpp2", "ep2", "cp2")
LAYOUTS = {
    "qwen3_5": DENSE,
    "qwen3_next": EXPERTS,
    "qwen3_5_moe": {
        layout: EXPERTS[layout] for layout in FEW
    },  # projections of the first, experts of the second
}
CASES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]
QUICK = (("qwen3_5", "cp2tp2"), ("qwen3_next", "ep2tp2"))
# CP 2 with TP 2 divides the key heads into four.
HEADS = {
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 12},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5_moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}


def sizes_of(family: str, layout: str) -> ParallelSizes:
    return ParallelSizes(**LAYOUTS[family][layout])


def reference(folder, family, **changes):
    """Return (folder of a tiny checkpoint, batch, transformers' log-probs)."""
    model = tiny_model(folder, family, **HEADS[family], **changes)
    batch = random_batch(count=8, longest=150)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return model, batch, transformers_logprobs(theirs, batch)


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return {family: reference(tmp_path_factory.mktemp(family), family) for family in HEADS}


@pytest.mark.slow_when(lambda family, layout: (family, layout) not in QUICK)
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_logprobs_and_export(ranks, references, tmp_path, family, layout):
    check(ranks, *references[family], sizes_of(family, layout), tmp_path / "out")


def test_ranks_that_share_a_kv_head_have_their_own_gates(ranks, tmp_path):
    given = reference(tmp_path / "model", "qwen3_5", num_key_value_heads=1)
    check(ranks, *given, ParallelSizes(tp=2), tmp_path / "out")


@pytest.mark.slow
def test_tied_embeddings(ranks, tmp_path):
    check(ranks, *reference(tmp_path / "model", "qwen3_5", tied=True), ParallelSizes(pp=2), tmp_path / "out")


@pytest.mark.slow
def test_the_language_model_of_a_vision_model(ranks, tmp_path):
    """transformers computes the same with the original and with its export, which has the vision model."""
    model = vision_model(tmp_path / "model", "qwen3_5_moe", **HEADS["qwen3_5_moe"])
    out, batch = tmp_path / "out", random_batch(count=8, longest=150)

    def theirs(folder):
        loaded, report = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
        assert not report["missing_keys"]
        return transformers_logprobs(loaded.eval(), batch)

    expected = theirs(model)
    sizes = sizes_of("qwen3_5_moe", "ep2")
    config = actor_config(model, sizes, OptimizerConfig())
    found = ranks.run(actors.logprobs_and_round_trip, sizes, config, batch, str(out))
    assert np.abs(sum(part for part in found if part is not None) - expected).max() <= 1e-5
    original, exported = HFCheckpoint(model), HFCheckpoint(str(out))
    assert exported.names == original.names - set(original.left_out)
    assert len(exported.vision) > 10
    in_files = {name for name in HFCheckpoint(model, raw=True).names if not name.startswith("mtp.")}
    assert HFCheckpoint(str(out), raw=True).names == in_files  # all experts of a layer are in one tensor
    assert all(torch.equal(exported.read(name), original.read(name)) for name in exported.names)
    assert np.abs(theirs(out) - expected).max() <= 1e-6


# --- two optimizer steps


@pytest.fixture(scope="module")
def suites(ranks, tmp_path_factory):
    """{family: its suite}"""
    folders = {
        family: tiny_model(tmp_path_factory.mktemp(family), family, **heads)
        for family, heads in HEADS.items()
    }
    return {
        "qwen3_5": Suite(ranks, folders["qwen3_5"]),
        "qwen3_next": Suite(ranks, folders["qwen3_next"], experts=(3, 4, 2), moe=REPLAY),
    }


@pytest.mark.slow_when(lambda family, layout: (family, layout) not in QUICK)
@pytest.mark.parametrize(
    ("family", "layout"), [case for case in CASES if case[1] != "tp1" and case[0] != "qwen3_5_moe"]
)
def test_two_steps(suites, family, layout):
    suites[family].check(sizes_of(family, layout), TOKEN)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_two_steps_with_the_distributed_optimizer(suites, family):
    options = {"distributed_optimizer": True, "overlap": True}
    sizes = ParallelSizes(dp=2, cp=2) if family == "qwen3_5" else ParallelSizes(dp=2, ep=2)
    suites[family].check(sizes, TOKEN, options)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_two_steps_with_recompute(suites, recompute):
    options = {"recompute": recompute, "recompute_modules": ("core_attn", "moe")}
    suites["qwen3_next"].check(sizes_of("qwen3_next", "cp2tp2sp"), TOKEN, options)


@pytest.mark.slow
def test_two_steps_with_constant_length_packs(suites):
    suites["qwen3_5"].check(sizes_of("qwen3_5", "cp2pp2"), TOKEN, {"pack_tokens": 300})


@pytest.mark.slow_when(lambda fault: fault != "states go on at boundaries")
@pytest.mark.parametrize(
    "fault",
    [
        "states go on at boundaries",
        "heads' gradients stay on their CP rank",
        "gradients of exchanged heads are summed twice",
    ],
)
def test_faults_of_cp_are_noticed(suites, fault):
    assert_noticed(suites["qwen3_5"], ParallelSizes(cp=2), TOKEN, fault=fault)


@pytest.mark.slow
def test_a_norm_whose_gradient_stays_on_its_rank_is_noticed(suites):
    assert_noticed(suites["qwen3_5"], ParallelSizes(tp=2), TOKEN, fault="gradient of one TP rank's heads")


def test_the_comparison_compares_something(suites):
    one = suites["qwen3_next"].one_rank(TOKEN)
    assert all(float(flat.abs().max()) > 0 for _, flat in one.gradients.values())
    assert np.isfinite(one.grad_norm).all()

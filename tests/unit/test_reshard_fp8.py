"""Weight sync into FP8 engines: the result is the quantisation of whole HF tensors, whichever ranks
quantised their parts.
"""

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.weight_sync import Transport, WeightSyncConfig
from grpo_megatron.model.architecture import MoE
from grpo_megatron.model.block_scaled import is_block_scaled
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.engine_fp8 import cut_matrices
from grpo_megatron.preflight.layout import SIZES, SIZES_OF_MODEL
from grpo_megatron.weights.fp8_blocks import quantise
from grpo_megatron.weights.sync.cost import Machine, cost
from grpo_megatron.weights.sync.messages import SyncKind, parameter_differences
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.quantised_shards import QuantisedShards
from grpo_megatron.weights.sync.resharding import Resharding
from tests.unit.sync_cluster import (
    DENSE,
    TRANSPORTS,
    Cluster,
    engine_parameters,
    hf_tensors,
    trainer_parameters,
)
from tests.unit.test_reshard import ENGINE_LAYOUTS

# Heads of 32: a block has rows of four, between which Megatron has rows of others.
SMALL_HEADS = dataclasses.replace(
    DENSE,
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=16,
    num_kv_heads=8,
    head_dim=32,
    qkv_bias=True,
)
LARGE_HEADS = dataclasses.replace(
    DENSE, family="qwen3", num_layers=2, hidden_size=256, ffn_hidden_size=256, num_heads=4, num_kv_heads=2,
    head_dim=128, qkv_bias=False, qk_norm=True, tied_embeddings=True,
)  # fmt: skip


EXPERTS = MoE(num_experts=4, top_k=2, ffn_hidden_size=256, normalize=True, layers=(True, True))
QWEN3_MOE = dataclasses.replace(LARGE_HEADS, family="qwen3_moe", tied_embeddings=False, moe=EXPERTS)
MIXTRAL = dataclasses.replace(QWEN3_MOE, family="mixtral", qk_norm=False)
GLM4_MOE = dataclasses.replace(
    QWEN3_MOE, family="glm4_moe", qkv_bias=True,
    moe=dataclasses.replace(
        EXPERTS, layers=(False, True), shared_ffn_hidden_size=512, sigmoid=True, correction_bias=True
    ),
)  # fmt: skip


def in_bf16(tensors):
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def quantised(arch, tensors):
    """Return the tensors with the linear layers' weights in FP8 and their scales, each tensor quantised as
    a whole.
    """
    matrices = [hf for entry in weight_map(arch).values() if is_block_scaled(entry) for hf in entry.hf]
    assert not any(
        "norm" in name or "embed" in name or "head" in name or ".gate." in name for name in matrices
    )
    assert sum(".self_attn." in name for name in matrices) == 4 * arch.num_layers
    of_layers = [
        3 * (arch.moe.num_experts + (arch.moe.shared_ffn_hidden_size > 0)) if has else 3
        for has in layers(arch)
    ]
    assert len(matrices) == 4 * arch.num_layers + sum(of_layers)
    found = dict(tensors)
    for name in matrices:
        found[name], found[f"{name}_scale_inv"] = quantise(tensors[name])
    return found


def layers(arch):
    return arch.moe.layers if arch.moe else (False,) * arch.num_layers


def dtype_in(plan, name):
    """Return the dtype of an engine's parameter."""
    if name.endswith("_scale_inv"):
        return torch.float32
    return torch.float8_e4m3fn if f"{name}_scale_inv" in plan.engine_shapes else torch.bfloat16


def shards(plan, tensors):
    """Return {rank: {Megatron name: its shard in bfloat16}}."""
    layouts = plan.layouts
    unquantised = ReshardPlan(
        dataclasses.replace(layouts, engine=dataclasses.replace(layouts.engine, fp8=False))
    )
    of_ranks = trainer_parameters(unquantised, tensors)
    return {rank: {name: value.bfloat16() for name, value in own.items()} for rank, own in of_ranks.items()}


class FP8Cluster(Cluster):
    """A cluster whose engines have bfloat16 and FP8, and whose trainer has bfloat16."""

    def dtype(self, name, of_engine):
        return dtype_in(self.plan, name)

    def trainer_parameters(self, tensors):
        return shards(self.plan, tensors)

    def check(self, tensors):
        super().check(quantised(self.plan.layouts.arch, tensors))


@pytest.fixture
def cluster():
    made = []

    def make(arch, sizes, engine_tp, transport=Transport.shared_memory, engine_ep=1, **settings):
        layout = EngineLayout(engine_tp, engine_ep, fp8=True)
        layouts = Layouts(arch, sizes, layout, 1, multicast=transport != Transport.groups)
        made.append(FP8Cluster(layouts, transport, bucket_bytes=20_000, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


LAYOUTS = {
    "tp1_to_1": (ParallelSizes(), 1),
    "tp1_to_2": (ParallelSizes(), 2),
    "tp2_to_1": (ParallelSizes(tp=2), 1),
    "tp2_to_2": (ParallelSizes(tp=2, dp=2), 2),
    "pp2_to_2": (ParallelSizes(pp=2), 2),
}


@pytest.mark.slow_when(lambda arch, layout: layout != "tp2_to_1" or arch != SMALL_HEADS)
@pytest.mark.parametrize("arch", [SMALL_HEADS, LARGE_HEADS], ids=["small_heads", "large_heads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_get_the_quantisation_of_whole_tensors(cluster, arch, layout):
    one = cluster(arch, *LAYOUTS[layout])
    for seed in (1, 2):
        tensors = in_bf16(hf_tensors(arch, seed))
        reports = one.sync(tensors)
        one.check(tensors)
        assert not any(reports[me].wrong for me in one.plan.engine_ranks)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    arch=st.sampled_from([SMALL_HEADS, LARGE_HEADS, QWEN3_MOE, MIXTRAL, GLM4_MOE]),
    sizes=st.builds(
        ParallelSizes,
        tp=st.sampled_from([1, 2]),
        pp=st.sampled_from([1, 2]),
        dp=st.sampled_from([1, 2, 4]),
        ep=st.sampled_from([1, 2, 4]),
        etp=st.sampled_from([1, 2]),
    ),
    layout=st.sampled_from([layout for layout in ENGINE_LAYOUTS if layout.tp <= 4]),
    ffn=st.sampled_from([128, 256, 384]),
)
def test_a_plan_quantises_whole_tensors_unless_preflight_refuses_it(arch, sizes, layout, ffn):
    if arch.moe:
        sizes = dataclasses.replace(sizes, sequence_parallel=sizes.tp > 1)
        arch = dataclasses.replace(arch, moe=dataclasses.replace(arch.moe, ffn_hidden_size=ffn))
    assume(not SIZES.violations(sizes) and not SIZES_OF_MODEL.violations(sizes, arch))
    assume(arch.moe or layout.ep == 1)
    layout = dataclasses.replace(layout, fp8=True)
    plan = ReshardPlan(Layouts(arch, sizes, layout, 1))
    if list(cut_matrices(arch, sizes, layout)):
        with pytest.raises(ValueError, match="is not divisible by the FP8 block size 128"):
            [plan.engine_shapes, *map(plan.outgoing, range(sizes.world_size))]
        return
    tensors = in_bf16(hf_tensors(arch))
    dtypes = {name: dtype_in(plan, name) for name in plan.engine_shapes}
    arrived, expected = (
        engine_parameters(plan, dtypes=dtypes),
        engine_parameters(plan, quantised(arch, tensors), dtypes),
    )
    for rank, own in shards(plan, tensors).items():
        sent = QuantisedShards(own, plan.quantised(rank))
        for link, parts in plan.outgoing(rank).items():
            for part in parts:
                for receiver in link.receivers:
                    part.move.target(arrived[receiver][part.engine]).copy_(
                        part.move.source(sent[part.megatron])
                    )
    for receiver, values in expected.items():
        for name, value in values.items():
            found = arrived[receiver][name]
            assert found.dtype == value.dtype
            assert torch.equal(found.float().nan_to_num(7.0), value.float().nan_to_num(7.0)), (
                f"{name} at {receiver}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_experts_in_fp8_travel_as_all_else(cluster, tmp_path, transport):
    one = cluster(
        GLM4_MOE, ParallelSizes(tp=2, dp=2, ep=2, etp=2), 2, transport, engine_ep=2, folder=tmp_path
    )
    tensors = in_bf16(hf_tensors(GLM4_MOE))
    reports = one.sync(tensors)
    one.check(tensors)
    assert not any(reports[me].wrong for me in one.plan.engine_ranks)


def test_experts_with_each_others_scales_are_found(cluster):
    one = cluster(QWEN3_MOE, ParallelSizes(dp=2, ep=2), 1)
    tensors = in_bf16(hf_tensors(QWEN3_MOE))
    name = "model.layers.1.mlp.experts"
    for projection in ("gate", "up", "down"):
        tensors[f"{name}.2.{projection}_proj.weight"] *= 2
    one.sync(tensors)
    me = EngineRank(0, 0)
    scales = one.arrived[me][f"{name}.w13_weight_scale_inv"]
    scales[[1, 2]] = scales[[2, 1]]
    found = {
        f"{name}.{number}.{projection}_proj.weight_scale_inv"
        for number in (1, 2)
        for projection in ("gate", "up")
    }
    assert set(one.sync(tensors, SyncKind.verify)[me].wrong) == found


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_of_quantised_weights_is_exact(cluster, tmp_path, transport):
    one = cluster(SMALL_HEADS, ParallelSizes(tp=2), 1, transport, folder=tmp_path, delta=True)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    sent = []
    for step in range(3):
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += step
        reports = one.sync(tensors, full=step == 0)
        one.check(tensors)
        sent.append(sum(reports[rank].bytes for rank in range(2)))
    assert sent[2] < 0.1 * sent[0]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("arch", [SMALL_HEADS, QWEN3_MOE], ids=["dense", "experts"])
def test_half_the_bytes_travel_of_what_is_quantised(cluster, arch):
    tensors = in_bf16(hf_tensors(arch))
    one = cluster(arch, ParallelSizes(), 1)
    sent = one.sync(tensors)[0].bytes
    elements = {True: 0, False: 0}
    for entry in weight_map(arch).values():
        elements[is_block_scaled(entry)] += entry.numel
    planned = sum(one.plan.volumes(itemsize=2).values())
    assert planned == elements[True] * (1 + 4 / 128**2) + 2 * elements[False]
    assert planned < sent < 1.02 * planned
    assert cost(one.plan.layouts, Machine(), 20_000).network_gb == pytest.approx(planned / 1e9)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("what", ["weight", "weight_scale_inv"])
def test_a_changed_byte_in_an_engine_is_found(cluster, what):
    one = cluster(SMALL_HEADS, ParallelSizes(), 2)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    one.sync(tensors)
    me = EngineRank(0, 1)
    one.arrived[me][f"model.layers.1.self_attn.qkv_proj.{what}"].view(torch.uint8)[0, 0] ^= 1
    verified = one.sync(tensors, SyncKind.verify)
    assert verified[me].wrong == (f"model.layers.1.self_attn.q_proj.{what}",)


def test_blocks_of_megatrons_rows_would_be_noticed(cluster, monkeypatch):
    """The fault: keys, queries and values are quantised in the order of Megatron's rows."""
    one = cluster(SMALL_HEADS, ParallelSizes(), 1)
    (sender,) = one.senders.values()
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = sender._quantised[name]
    monkeypatch.setitem(
        sender._quantised, name, [dataclasses.replace(move, target_at=move.source_at) for move in whole]
    )
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    one.sync(tensors)
    with pytest.raises(AssertionError, match=r"layers.0.self_attn.qkv_proj.weight"):
        one.check(tensors)


def test_infinite_weights_are_not_sent(cluster):
    one = cluster(SMALL_HEADS, ParallelSizes(), 1, timeout=1.0)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    with pytest.raises(
        ValueError,
        match=r"decoder.layers.1.mlp.linear_fc1.weight cannot be quantised for "
        r"the engines: it contains NaN or inf",
    ):
        one.sync(tensors)


def test_a_rank_with_a_part_of_a_block_is_an_error():
    arch = dataclasses.replace(SMALL_HEADS, num_heads=4, num_kv_heads=4)
    plan = ReshardPlan(Layouts(arch, ParallelSizes(tp=2), EngineLayout(1, fp8=True), 1))
    with pytest.raises(
        ValueError, match=r"q_proj.weight_scale_inv: .* is not divisible by the FP8 block size 128"
    ):
        plan.outgoing(0)


def test_nothing_but_its_own_files_goes_from_the_folder_of_a_sync(tmp_path):
    """The user chooses the folder.

    Everything in it used to be deleted, such as the checkpoints of a run of the same name.
    """
    (tmp_path / "checkpoints" / "step_00000040").mkdir(parents=True)
    (tmp_path / "sync00000007").mkdir()
    layouts = Layouts(SMALL_HEADS, ParallelSizes(), EngineLayout(1, fp8=True), 1)
    config = WeightSyncConfig(Transport.disk)
    resharding = Resharding(layouts, config, str(tmp_path), call_timeout=1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    resharding.close()
    assert (tmp_path / "checkpoints" / "step_00000040").is_dir()
    (tmp_path / "own" / "sync00000001").mkdir(parents=True)
    Resharding(layouts, config, str(tmp_path / "own"), call_timeout=1.0)
    assert not (tmp_path / "own").exists()


def test_engines_that_hold_them_otherwise_are_found():
    """SGLang packs scales for Blackwell GPUs, four in an integer."""
    plan = ReshardPlan(Layouts(SMALL_HEADS, ParallelSizes(), EngineLayout(1, fp8=True), 1))
    have = {name: (shape, dtype_in(plan, name)) for name, shape in plan.engine_shapes.items()}

    def differences():
        return parameter_differences(plan, {EngineRank(0, 0): have})

    assert differences() == []
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    have[name] = ((2, 4), torch.int32)
    assert differences() == [f"rank 0 of engine 0 has {name} in torch.int32 instead of torch.float32"]
    have[name] = ((256, 1), torch.int32)
    assert differences() == [f"rank 0 of engine 0 has {name} of shape (256, 1) instead of (2, 4)"]

"""Weights into engines in FP8: what arrives is the quantisation of whole HF tensors, whichever ranks quantised parts of them."""

import dataclasses

import pytest
import torch

from grpo_megatron.config.weight_sync import WeightSyncConfig
from grpo_megatron.model.block_scaled import is_block_scaled
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.weights.fp8_blocks import quantise
from grpo_megatron.weights.sync.cost import Machine, cost
from grpo_megatron.weights.sync.order import Answer, Task, Way
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.resharding import Resharding
from tests.unit.test_reshard import DENSE, Cluster, hf_tensors, trainer_parameters

# Heads of 32: a block has rows of four, between which Megatron has rows of others.
SMALL_HEADS = dataclasses.replace(
    DENSE, num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=16, num_kv_heads=8, head_dim=32, qkv_bias=True
)
LARGE_HEADS = dataclasses.replace(
    DENSE, family="qwen3", num_layers=2, hidden_size=256, ffn_hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=128,
    qkv_bias=False, qk_norm=True, tied_embeddings=True,
)  # fmt: skip


def in_bf16(tensors):
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


def quantised(arch, tensors):
    """The same, and the weights of linear layers in FP8 with their scales, each tensor as a whole."""
    matrices = [hf for entry in weight_map(arch).values() if is_block_scaled(entry) for hf in entry.hf]
    assert len(matrices) == 7 * arch.num_layers
    found = dict(tensors)
    for name in matrices:
        found[name], found[f"{name}_scale_inv"] = quantise(tensors[name])
    return found


def dtype_in(plan, name):
    """Of an engine's parameter."""
    if name.endswith("_scale_inv"):
        return torch.float32
    return torch.float8_e4m3fn if f"{name}_scale_inv" in plan.engine_shapes else torch.bfloat16


class FP8Cluster(Cluster):
    """Engines in bfloat16 and FP8, a trainer in bfloat16."""

    def dtype(self, name, of_engine):
        return dtype_in(self.plan, name)

    def trainer_parameters(self, tensors):
        layouts = self.plan.layouts
        unquantised = ReshardPlan(dataclasses.replace(layouts, engine=dataclasses.replace(layouts.engine, fp8=False)))
        of_ranks = trainer_parameters(unquantised, tensors)
        return {rank: {name: value.bfloat16() for name, value in own.items()} for rank, own in of_ranks.items()}

    def check(self, tensors):
        super().check(quantised(self.plan.layouts.arch, tensors))


@pytest.fixture
def cluster():
    made = []

    def make(arch, sizes, engine_tp, way=Way.shared_memory, **settings):
        layouts = Layouts(arch, sizes, EngineLayout(engine_tp, fp8=True), 1, multicast=way != Way.groups)
        made.append(FP8Cluster(layouts, way, bucket_bytes=20_000, **settings))
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


@pytest.mark.parametrize("arch", [SMALL_HEADS, LARGE_HEADS], ids=["small_heads", "large_heads"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_get_the_quantisation_of_whole_tensors(cluster, arch, layout):
    one = cluster(arch, *LAYOUTS[layout])
    for seed in (1, 2):
        tensors = in_bf16(hf_tensors(arch, seed))
        answers = one.sync(tensors)
        one.check(tensors)
        assert not any(answers[me].wrong for me in one.plan.engine_ranks)


@pytest.mark.parametrize("way", list(Way))
def test_a_delta_of_quantised_weights_is_exact(cluster, tmp_path, way):
    one = cluster(SMALL_HEADS, ParallelSizes(tp=2), 1, way, folder=tmp_path, delta=True)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    sent = []
    for step in range(3):
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += step
        answers = one.sync(tensors, full=step == 0)
        one.check(tensors)
        sent.append(sum(answers[rank].bytes for rank in range(2)))
    assert sent[2] < 0.1 * sent[0]


def test_half_the_bytes_travel_of_what_is_quantised(cluster):
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    one = cluster(SMALL_HEADS, ParallelSizes(), 1)
    sent = one.sync(tensors)[0].bytes
    elements = {True: 0, False: 0}
    for entry in weight_map(SMALL_HEADS).values():
        elements[is_block_scaled(entry)] += entry.numel
    planned = sum(one.plan.volumes(itemsize=2).values())
    assert planned == elements[True] * (1 + 4 / 128**2) + 2 * elements[False]
    assert planned < sent < 1.02 * planned
    assert cost(one.plan.layouts, Machine(), 20_000).network_gb == pytest.approx(planned / 1e9)


@pytest.mark.parametrize("what", ["weight", "weight_scale_inv"])
def test_a_changed_byte_in_an_engine_is_found(cluster, what):
    one = cluster(SMALL_HEADS, ParallelSizes(), 2)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    one.sync(tensors)
    me = EngineRank(0, 1)
    one.arrived[me][f"model.layers.1.self_attn.qkv_proj.{what}"].view(torch.uint8)[0, 0] ^= 1
    verified = one.sync(tensors, Task.verify)
    assert verified[me].wrong == (f"model.layers.1.self_attn.q_proj.{what}",)


def test_blocks_of_megatrons_rows_would_be_noticed(cluster, monkeypatch):
    """The fault: keys, queries and values are quantised in the order of Megatron's rows."""
    one = cluster(SMALL_HEADS, ParallelSizes(), 1)
    (sender,) = one.senders.values()
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    whole = sender._quantised[name]
    monkeypatch.setitem(sender._quantised, name, [dataclasses.replace(move, target_at=move.source_at) for move in whole])
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    one.sync(tensors)
    with pytest.raises(AssertionError, match=r"layers.0.self_attn.qkv_proj.weight"):
        one.check(tensors)


def test_infinite_weights_are_not_sent(cluster):
    one = cluster(SMALL_HEADS, ParallelSizes(), 1, timeout=1.0)
    tensors = in_bf16(hf_tensors(SMALL_HEADS))
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    with pytest.raises(
        ValueError, match=r"decoder.layers.1.mlp.linear_fc1.weight cannot be quantised for the engines: it has NaN or inf"
    ):
        one.sync(tensors)


def test_a_rank_with_a_part_of_a_block_is_an_error():
    arch = dataclasses.replace(SMALL_HEADS, num_heads=4, num_kv_heads=4)
    plan = ReshardPlan(Layouts(arch, ParallelSizes(tp=2), EngineLayout(1, fp8=True), 1))
    with pytest.raises(ValueError, match=r"q_proj.weight_scale_inv: .* cuts a block of 128 x 128"):
        plan.outgoing(0)


def test_engines_that_hold_them_otherwise_are_found(monkeypatch, tmp_path):
    """As SGLang does for Blackwell GPUs: scales are packed, four in an integer."""
    layouts = Layouts(SMALL_HEADS, ParallelSizes(), EngineLayout(1, fp8=True), 1)
    resharding = Resharding(layouts, Way.shared_memory, WeightSyncConfig(), str(tmp_path), call_timeout=1.0)
    plan = ReshardPlan(layouts)
    have = {name: (shape, dtype_in(plan, name)) for name, shape in plan.engine_shapes.items()}
    monkeypatch.setattr(resharding, "_asked", lambda target, task: {EngineRank(0, 0): Answer({}, {}, parameters=have)})
    assert resharding.describe(None) == []
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    have[name] = ((2, 4), torch.int32)
    assert resharding.describe(None) == [f"rank 0 of engine 0 has {name} in torch.int32, planned torch.float32"]
    have[name] = ((256, 1), torch.int32)
    assert resharding.describe(None)[0] == f"rank 0 of engine 0 has {name} of shape (256, 1), planned (2, 4)"

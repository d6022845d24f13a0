"""LoRA adapters that travel alone: the plan of their matrices, and the check of their base."""

import dataclasses
from contextlib import closing

import pytest
import torch

from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.config.weight_sync import Transport, WeightSyncConfig
from grpo_megatron.model.adapters import Content
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.sglang import weight_receiver
from grpo_megatron.sglang.arguments import engine_arguments
from grpo_megatron.weights.sync import resharding
from grpo_megatron.weights.sync.messages import SyncKind
from grpo_megatron.weights.sync.plan import EngineRank, Layouts, ReshardPlan
from grpo_megatron.weights.sync.resharding import Resharding
from tests.unit.sync_cluster import (
    DENSE,
    EXPERTS,
    TRANSPORTS,
    Cluster,
    engine_parameters,
    hf_tensors,
    tp2_pp2_to_two_engines,
)
from tests.unit.test_resharding import Source, Target, gather_futures, outcomes_of_futures

LORA = LoraConfig(rank=8)
ATTENTION = LoraConfig(rank=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"])


def adapter_tensors(plan, seed=0):
    """Return {PEFT name: tensor}. The matrices A of a fused layer are equal, as in the trainer."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for entry in plan.entries:
        for hf, shape in zip(entry.hf, entry.shapes, strict=True):
            found[hf] = torch.randn(shape, generator=generator)
            if entry.megatron.endswith("lora_a"):
                found[hf] = found[entry.hf[0]]
    return found


def of_adapters(layouts, lora=LORA):
    return dataclasses.replace(layouts, content=Content.adapter, lora=lora)


LAYOUTS = {
    "tp2_pp2_to_tp2": tp2_pp2_to_two_engines(multicast=True),
    # There are two KV heads, so that two engine ranks have the same one.
    "tp1_to_tp4": Layouts(DENSE, ParallelSizes(), EngineLayout(4), 1),
    "tp4_to_tp1": Layouts(DENSE, ParallelSizes(tp=4), EngineLayout(1), 1),
    "experts": Layouts(EXPERTS, ParallelSizes(tp=2, sequence_parallel=True), EngineLayout(2, ep=2), 1),
    "fp8": Layouts(DENSE, ParallelSizes(tp=2), EngineLayout(2, fp8=True), 1),
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_the_adapter_arrives_and_little_else(layouts):
    layouts = of_adapters(LAYOUTS[layouts], ATTENTION if LAYOUTS[layouts].arch.moe else LORA)
    # Through shared memory, what several engine ranks need is sent once.
    layouts = dataclasses.replace(layouts, multicast=True)
    with closing(Cluster(layouts, Transport.shared_memory, bucket_bytes=1 << 20)) as one:
        tensors = adapter_tensors(one.plan)
        reports = one.sync(tensors)
        one.check(tensors)
        assert not any(value.isnan().any() for own in one.arrived.values() for value in own.values())
        sent = sum(reports[rank].bytes for rank in range(layouts.sizes.world_size))
        assert sent <= 1.05 * sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_adapter_travels_as_all_else(transport, tmp_path):
    layouts = of_adapters(tp2_pp2_to_two_engines(multicast=transport != Transport.groups))
    with closing(Cluster(layouts, transport, tmp_path, delta=True)) as one:
        for seed in (1, 2):
            tensors = adapter_tensors(one.plan, seed)
            one.sync(tensors, full=seed == 1)
            one.check(tensors)
        name = "model.layers.1.self_attn.qkv_proj.lora_a"
        one.arrived[EngineRank(1, 0)][name][0, 0] += 1
        wrong = one.sync(tensors, SyncKind.verify)[EngineRank(1, 0)].wrong
        assert wrong == ("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight",)


def test_an_engine_has_the_copies_of_a_below_each_other():
    plan = ReshardPlan(of_adapters(LAYOUTS["tp1_to_tp4"]))
    shapes = {
        name.removeprefix("model.layers.0."): shape
        for name, shape in plan.engine_shapes.items()
        if ".0." in name
    }
    queries, kv, hidden, ffn = 48, 6, 16, 24  # one KV head
    assert shapes == {
        "self_attn.qkv_proj.lora_a": (3 * 8, hidden),
        "self_attn.qkv_proj.lora_b": (queries // 4 + 2 * kv, 8),
        "self_attn.o_proj.lora_a": (8, queries // 4),
        "self_attn.o_proj.lora_b": (hidden, 8),
        "mlp.gate_up_proj.lora_a": (2 * 8, hidden),
        "mlp.gate_up_proj.lora_b": (2 * ffn // 4, 8),
        "mlp.down_proj.lora_a": (8, ffn // 4),
        "mlp.down_proj.lora_b": (hidden, 8),
    }


class AdapterSource(Source):
    """Trainer ranks with a base and adapters, of which they send what a command asks for."""

    def __init__(self, plans, tensors):
        super().__init__(plans[Content.base])
        self._plans, self._tensors = plans, tensors

    def send_weights(self, command):
        content = command.setup.layouts.content
        self.plan, self.tensors = self._plans[content], self._tensors[content]
        return super().send_weights(command)


class AdapterTarget(Target):
    """Engine ranks that have loaded the base, with buffers for an adapter."""

    def __init__(self, plans, base):
        super().__init__(plans[Content.base])
        self.of = {
            Content.base: engine_parameters(plans[Content.base], base),
            Content.adapter: engine_parameters(plans[Content.adapter]),
        }

    def receive_weights(self, command):
        self.parameters = self.of[command.setup.layouts.content]
        return super().receive_weights(command)


class Driver:
    """A Resharding of adapters, with its source and target."""

    def __init__(self, loads_base=True):
        layouts = of_adapters(tp2_pp2_to_two_engines(multicast=True))
        self.plans = {
            content: ReshardPlan(dataclasses.replace(layouts, content=content))
            for content in (Content.base, Content.adapter)
        }
        self.tensors = {
            Content.base: hf_tensors(DENSE, 1),
            Content.adapter: adapter_tensors(self.plans[Content.adapter], 2),
        }
        loaded = self.tensors[Content.base] if loads_base else None
        self.source = AdapterSource(self.plans, self.tensors)
        self.target = AdapterTarget(self.plans, loaded)
        config = WeightSyncConfig(timeout=30)
        self.resharding = Resharding(layouts, config, "", call_timeout=60, loads_base=loads_base)

    def sync(self):
        return self.resharding.transfer(self.source, self.target, 1)

    def check(self):
        for content, plan in self.plans.items():
            expected = engine_parameters(plan, self.tensors[content])
            for me, own in self.target.of[content].items():
                for name, value in own.items():
                    assert torch.equal(value.nan_to_num(7.0), expected[me][name].nan_to_num(7.0)), name

    def asked(self):
        found = [(command.setup.layouts.content, command.kind) for command in self.source.commands]
        self.source.commands.clear()
        return found

    def close(self):
        self.source.close()
        self.target.close()
        self.resharding.close()


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(resharding, "gather", gather_futures)
    monkeypatch.setattr(resharding, "outcomes", outcomes_of_futures)
    made = []

    def make(**settings):
        made.append(Driver(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


BASE, ADAPTER = (Content.base, SyncKind.verify), (Content.adapter, SyncKind.transfer)


def test_the_base_of_an_engine_is_compared_once(driver):
    one = driver()
    measured = one.sync()
    one.check()
    assert one.asked() == [BASE, ADAPTER]
    assert measured["sent_gb"] <= 1.05e-9 * sum(t.nbytes for t in one.tensors[Content.adapter].values())
    one.sync()
    assert one.asked() == [ADAPTER]
    one.target.members = ((0, 0), (1, 1))  # engine 1 has been started again
    one.sync()
    assert one.asked() == [BASE, ADAPTER]
    one.target.members = ((1, 1), (0, 0))  # both had a plan before
    one.sync()
    assert one.asked() == [ADAPTER]


def test_another_base_is_noticed(driver):
    one = driver()
    name = "model.layers.2.mlp.down_proj.weight"
    for me, own in one.target.of[Content.base].items():
        own[name][0, me.engine] *= 1.001
    for _ in range(2):  # also if it is tried again
        with pytest.raises(RuntimeError) as caught:
            one.sync()
        assert str(caught.value).startswith(
            "the adapters of the trainer belong to other weights than the engines have: the digests differ "
            f"for {name} at rank 0 of engine 0, "
        )
        assert "or set weight_sync.lora=merged" in str(caught.value)
    assert (
        one.target.of[Content.adapter][EngineRank(0, 0)]["model.layers.0.mlp.down_proj.lora_a"].isnan().all()
    )


def test_engines_that_do_not_load_the_base_get_it_once(driver):
    one = driver(loads_base=False)
    one.sync()
    one.check()
    assert one.asked() == [(Content.base, SyncKind.transfer), ADAPTER]
    one.sync()
    assert one.asked() == [ADAPTER]


def test_the_matrices_are_those_with_which_sglang_computes():
    """Its layers with an adapter contain the plain layer, and the buffers of all adapters."""
    model, attention = torch.nn.Module(), torch.nn.Module()
    model.self_attn = attention
    for name, suffix in (("qkv_proj", "_qkv"), ("o_proj", "")):
        layer = torch.nn.Module()
        setattr(attention, name, layer)
        layer.base_layer = torch.nn.Linear(4, 6, bias=False)
        layer.base_layer.weight_scale_inv = torch.nn.Parameter(torch.ones(1))
        layer.weight = layer.base_layer.weight
        setattr(layer, f"A_buffer{suffix}", torch.arange(2.0).view(2, 1, 1).expand(2, 3, 4))
        setattr(layer, f"B_buffer{suffix}", torch.zeros(2, 6, 3))
    found = weight_receiver._adapter_matrices(model)
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        f"self_attn.{name}.{matrix}": shape
        for name in ("qkv_proj", "o_proj")
        for matrix, shape in (("lora_a", (3, 4)), ("lora_b", (6, 3)))
    }
    assert (found["self_attn.o_proj.lora_a"] == 1).all()
    assert set(weight_receiver.own_weights(model)) == {
        f"self_attn.{name}.{kind}"
        for name in ("qkv_proj", "o_proj")
        for kind in ("weight", "weight_scale_inv")
    }


def test_only_engines_that_serve_an_adapter_have_buffers_for_it():
    def arguments(lora):
        config, model = EngineConfig(dtype="float32"), ModelConfig("configs/models/qwen3-4b")
        return engine_arguments(config, model, 0, False, gpu=True, routing=False, lora=lora)

    assert "enable_lora" not in arguments(None)
    found = arguments(ATTENTION)
    assert (found["max_lora_rank"], found["lora_target_modules"]) == (8, ATTENTION.targets)

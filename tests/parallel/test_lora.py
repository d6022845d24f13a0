"""Adapters: the same training in every layout, the same merged weights everywhere, exported in PEFT's
format.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.schema import MoEConfig, OptimizerConfig, Recompute, RoutingReplay
from grpo_megatron.megatron.state.hf_weights import whole_tensors
from grpo_megatron.model.adapters import adapter_entries
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config, sizes_of
from tests.models import random_batch, tiny_model, transformers_logprobs
from tests.parallel import adapters
from tests.parallel.test_delta_net import HEADS
from tests.parallel.test_invariance import TOKEN, Suite, assert_noticed, make_batch
from tests.parallel.test_weights import read_all

LORA = LoraConfig(rank=4, alpha=6.0)
ATTENTION = LoraConfig(rank=4, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
MLP = LoraConfig(rank=4, targets=["gate_proj", "up_proj", "down_proj"])
# Layers of attention and of gated delta networks.
MIXERS = {
    "qwen3_next": replace(ATTENTION, targets=[*ATTENTION.targets, "in_proj_qkvz", "in_proj_ba", "out_proj"]),
    "qwen3_5": replace(
        LORA, targets=[*LORA.targets, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
    ),
}
RECOMPUTE = {"recompute": Recompute.full}

LAYOUTS = {
    "tp2": (ParallelSizes(tp=2), {}),
    "tp2sp": (ParallelSizes(tp=2, sequence_parallel=True), {}),
    "pp2": (ParallelSizes(pp=2), RECOMPUTE),
    "dp2": (ParallelSizes(dp=2), {"distributed_optimizer": True, "overlap": True}),
    "cp2": (ParallelSizes(cp=2), {}),
    "tp2pp2vpp2": (ParallelSizes(tp=2, pp=2, vpp=2, sequence_parallel=True), RECOMPUTE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen2", tied=True)


class AdapterSuite(Suite):
    def case(self, sizes, loss, options=None, **rest):
        return super().case(sizes, loss, options, start=adapters.fill, **rest)


@pytest.fixture(scope="module")
def suite(ranks, model):
    return AdapterSuite(ranks, model, lora=LORA, run=RunConfig(seed=3))


@pytest.mark.slow_when(lambda layout: layout != "tp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_do_not_depend_on_the_layout(suite, layout):
    sizes, options = LAYOUTS[layout]
    suite.check(sizes, TOKEN, options)


def test_gradients_of_one_ranks_tokens_are_noticed(suite):
    sizes, options = LAYOUTS["tp2sp"]
    assert_noticed(
        suite,
        sizes,
        TOKEN,
        suite.one_rank(TOKEN),
        options=options,
        fault="adapters' gradients of one TP rank's tokens",
    )


def test_a_recomputed_first_layer_trains_its_adapters(ranks, model):
    """Nothing that enters this layer requires a gradient by itself, because the embedding is frozen."""
    suite = AdapterSuite(ranks, model, lora=MLP)
    one = suite.one_rank(TOKEN)
    assert all(float(flat.abs().max()) > 0 for _, flat in one.gradients.values())
    suite.check(ParallelSizes(), TOKEN, {"recompute": Recompute.selective, "recompute_modules": ("mlp",)})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layers"), [("qwen3_moe", 3), ("gpt_oss", 4)])
@pytest.mark.parametrize(
    "layout", [{"dp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": True}], ids=["ep2", "tp2sp"]
)
def test_attention_beside_experts(ranks, tmp_path, layout, family, layers):
    replay = MoEConfig(routing_replay=RoutingReplay.engine)
    model = tiny_model(tmp_path, family)
    suite = AdapterSuite(ranks, model, experts=(layers, 4, 2), moe=replay, lora=ATTENTION)
    suite.check(ParallelSizes(**layout), TOKEN)


@pytest.mark.slow
def test_two_steps_of_gated_delta_networks(ranks, tmp_path):
    model = tiny_model(tmp_path, "qwen3_next", **HEADS["qwen3_next"])
    replay = MoEConfig(routing_replay=RoutingReplay.engine)
    suite = AdapterSuite(ranks, model, experts=(3, 4, 2), moe=replay, lora=MIXERS["qwen3_next"])
    suite.check(ParallelSizes(tp=2, cp=2, sequence_parallel=True), TOKEN)


def merged_by_hand(model, folder):
    """Return transformers' model with the adapters in `folder` added to its weights, as in the paper."""
    found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tensors, config = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    parameters = dict(found.named_parameters())
    with torch.no_grad():
        for name, b in tensors.items():
            if ".lora_B." in name:
                a = tensors[name.replace(".lora_B.", ".lora_A.")]
                weight = name.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
                parameters[weight] += config["lora_alpha"] / config["r"] * b @ a
    return found


@pytest.fixture(scope="module")
def exported(ranks, model, tmp_path_factory):
    """(folder of the export, batch, log-probs with adapters, log-probs of the reference), with TP 2."""
    return export(ranks, model, tmp_path_factory.mktemp("export") / "hf", ParallelSizes(tp=2), LORA)


def export(ranks, model, folder, sizes, lora):
    batch = random_batch(count=8)
    config = actor_config(model, sizes, OptimizerConfig(), lora=lora, with_reference=True)
    (found,) = [
        r for r in ranks.run(adapters.logprobs_and_export, sizes, config, batch, str(folder)) if r is not None
    ]
    return folder, batch, *found


def test_the_exports_compute_what_the_ranks_do(model, exported):
    assert_exports_compute_the_same(model, *exported)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "lora"), [*MIXERS.items(), ("gpt_oss", ATTENTION), ("gemma3", LORA)])
def test_exports_of_other_layers(ranks, tmp_path, family, lora):
    model = tiny_model(tmp_path / "model", family)
    sizes = ParallelSizes(tp=2, sequence_parallel=True)
    assert_exports_compute_the_same(model, *export(ranks, model, tmp_path / "export" / "hf", sizes, lora))


def assert_exports_compute_the_same(model, folder, batch, ours, reference):
    by_hand = merged_by_hand(model, folder / "adapter")
    assert np.abs(ours - transformers_logprobs(by_hand, batch)).max() <= 1e-5
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert np.abs(ours - transformers_logprobs(merged, batch)).max() <= 1e-5
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert np.abs(reference - transformers_logprobs(base, batch)).max() <= 1e-5
    assert np.abs(ours - reference).max() > 1e-2


def test_peft_loads_the_adapter(model, exported):
    peft = pytest.importorskip("peft")
    folder, batch, ours, _ = exported
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    assert np.abs(ours - transformers_logprobs(loaded, batch)).max() <= 1e-5


def test_engines_are_sent_merged_weights(ranks, model, exported):
    config = actor_config(model, ParallelSizes(), OptimizerConfig(), lora=LORA)
    (sent,) = ranks.run(adapters.merged_weights, sizes_of(config), config)
    merged = read_all(exported[0])
    assert sent.keys() == merged.keys()
    for name, tensor in merged.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-6, atol=1e-6)


def test_a_frozen_model_has_no_gradients_optimizer_states_or_second_copy(ranks, model):
    config = actor_config(model, ParallelSizes(), OptimizerConfig(lr=1e-2), lora=LORA, with_reference=True)
    bytes_, adapters_, whole, reference, changed = ranks.run(
        adapters.memory_after_a_step, sizes_of(config), config, make_batch(0), TOKEN
    )[0]
    assert adapters_ < whole / 4
    assert bytes_["parameters"] == 4 * (adapters_ + whole)
    assert bytes_["optimizer"] == 2 * 4 * adapters_
    assert 4 * adapters_ <= bytes_["gradients"] <= 4 * adapters_ * 1.01 + 1024  # buffers are padded
    assert reference == adapters_
    # Every layer's four fused weights, merged, and nothing else.
    assert len(changed) == 4 * 4
    assert all("linear_" in name and name.endswith(".weight") for name in changed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"), [("qwen2", LORA), ("qwen3_5", MIXERS["qwen3_5"]), ("gemma3", LORA)]
)
def test_a_checkpoint_continues_in_another_layout(ranks, tmp_path, family, lora):
    model = tiny_model(tmp_path / "model", family, tied=True)

    def configured(sizes, seed):
        return actor_config(
            model, sizes, OptimizerConfig(lr=1e-2, eps=1e-3), lora=lora, run=RunConfig(seed=seed)
        )

    batches, folder, one, tp2 = (
        [make_batch(0), make_batch(1)],
        str(tmp_path / "checkpoint"),
        ParallelSizes(),
        ParallelSizes(tp=2),
    )
    saved = ranks.run(adapters.train_and_save, tp2, configured(tp2, 1), batches, TOKEN, folder)
    (loaded,) = ranks.run(adapters.load_and_train, one, configured(one, 2), batches[1:], TOKEN, folder)
    entries = adapter_entries(weight_map(read_architecture(model)).values(), lora)
    for step, adapters_ in enumerate(loaded):
        assert adapters_.keys() == entries.keys()
        for name, whole in adapters_.items():
            shards = [rank[step][name] for rank in (saved if entries[name].axis is not None else saved[:1])]
            expected = dict(whole_tensors(entries[name], shards))
            torch.testing.assert_close(
                dict(whole_tensors(entries[name], [whole])), expected, rtol=1e-5, atol=1e-6
            )
    assert not torch.equal(loaded[0][name], loaded[1][name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (
            LORA,
            LoraConfig(),
            r"saved with adapters of rank 4 and alpha 6.0 on .*, but this run has no adapters",
        ),
        (LoraConfig(), LORA, r"saved with no adapters, but this run has adapters of rank 4"),
        (
            ATTENTION,
            LORA,
            r"on linear_proj, linear_qkv, but this .* on linear_fc1, linear_fc2, linear_proj, linear_qkv",
        ),
    ],
    ids=["none any more", "none yet", "other layers"],
)
def test_a_checkpoint_with_other_adapters_is_refused(ranks, model, tmp_path, saved, loaded, message):
    def configured(lora):
        return actor_config(model, ParallelSizes(), OptimizerConfig(), lora=lora)

    ranks.run(
        adapters.train_and_save, ParallelSizes(), configured(saved), [make_batch(1)], TOKEN, str(tmp_path)
    )
    (refused,) = ranks.run(adapters.refusal, ParallelSizes(), configured(loaded), str(tmp_path))
    assert re.search(message, refused)

"""Models with gated delta networks: config.json, weight map, cost, and the settings that are refused."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config.command import Command
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.load import read_config
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.errors import UserError
from grpo_megatron.model.adapters import adapter_entries, without_adapter
from grpo_megatron.model.arrangement import GatedQKV, Vocab
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.families.delta_net import query_key_value
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.model.pieces import box
from grpo_megatron.preflight.model import architecture_violations, model_violations
from grpo_megatron.sglang.arguments import engine_arguments
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.sync.plan import Layouts, ReshardPlan
from tests.models import HYBRIDS, tiny_model
from tests.unit.sync_cluster import engine_parameters, hf_tensors, trainer_parameters

# Qwen3-Next-80B-A3B as published, but for keys that say nothing about the architecture.
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


def written(folder, config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sizes_of_qwen3_next_are_the_published_ones(tmp_path):
    """It has 80 billion parameters, 3 of them active."""
    arch = read_architecture(written(tmp_path, NEXT))
    entries = weight_map(arch).values()
    assert round(sum(entry.numel for entry in entries) / 1e9) == 80
    share = arch.moe.top_k / arch.moe.num_experts
    matrices = [e for e in entries if len(e.shapes[0]) == 2 and not e.megatron.startswith("embedding.")]
    weights = sum(entry.numel * (share if entry.expert else 1) for entry in matrices)
    states = 36 * 32 * 128 * 128
    assert arch.cost_model.per_token == pytest.approx(2 * (weights + 3 * states))
    assert weights / 1e9 == pytest.approx(3, abs=0.6)
    # Only the 12 layers with attention have pairs: 256 channels of query and key, and of the value.
    assert arch.cost_model.per_pair == 2.0 * 12 * 16 * (256 + 256)
    assert (len(arch.rope_frequencies()), arch.moe.shared_gate, arch.zero_centred_norms) == (32, True, True)


REFUSED = [
    ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is not divisible by linear_num_key_heads=16"),
    ({"layer_types": ["linear_attention"] * 47}, "for each of the 48 layers, but has 47 items"),
    ({"layer_types": ["mamba"] * 48}, "but has 48 items with mamba"),
    ({"layer_types": [1]}, "layer_types must be a list of texts"),
    ({"attn_output_gate": False}, "attn_output_gate=false is not supported"),
    ({"linear_conv_kernel_dim": None}, "key linear_conv_kernel_dim is missing"),
    ({"attention_bias": True}, "attention_bias=true"),
    ({"hidden_act": "gelu"}, "hidden_act=gelu"),
    ({"num_experts_per_tok": 513}, "must be at most the number of experts"),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_what_would_compute_otherwise_is_refused(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        read_architecture(written(tmp_path, NEXT | changes))


def test_layer_types_come_before_the_interval(tmp_path):
    kinds = ["full_attention", "linear_attention"] * 24
    layers = read_architecture(written(tmp_path, NEXT | {"layer_types": kinds})).delta.layers
    assert layers == (False, True) * 24
    every = read_architecture(written(tmp_path, NEXT | {"full_attention_interval": 3})).delta.layers
    assert every == (True, True, False) * 16


# --- weight map


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """{family: folder of a tiny checkpoint}"""
    return {family: tiny_model(tmp_path_factory.mktemp(family), family) for family in HYBRIDS}


def labelled(entry) -> dict[str, torch.Tensor]:
    """Return HF tensors of the entry's shapes with a number of its own in each row."""
    found, first = {}, 0
    for name, shape in zip(entry.hf, entry.shapes, strict=True):
        rows = torch.arange(first, first + shape[0]).view(-1, *[1] * (len(shape) - 1))
        found[name] = rows.expand(shape)
        first += shape[0]
    return found


def shard(entry, parts: int, rank: int) -> list[int]:
    """Return the numbers of the rows of a rank's shard."""
    tensors, local = labelled(entry), torch.full(entry.megatron_shape(parts), -1)
    for piece in entry.megatron_pieces(parts, rank):
        piece.of(local).copy_(tensors[piece.hf][box(piece.start, piece.shape)])
    return local.view(len(local), -1)[:, 0].tolist()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("family", HYBRIDS)
def test_ranks_have_every_row_once(models, family, parts):
    for entry in weight_map(read_architecture(models[family])).values():
        if entry.axis == 0 and not isinstance(entry.kind, Vocab):
            rows = sum(rows for rows, *_ in entry.shapes)
            found = Counter(row for rank in range(parts) for row in shard(entry, parts, rank))
            assert found == Counter(range(rows)), entry.megatron


def test_rows_of_a_key_head_stay_together(models):
    """Qwen3-Next, two TP ranks with a key head and two value heads each; see its _projections."""
    arch = read_architecture(models["qwen3_next"])
    entries = weight_map(arch)
    key, value = arch.delta.key_dim, arch.delta.value_dim
    of_head = 2 * key + 4 * value
    betas = 2 * of_head
    projection = entries["decoder.layers.0.self_attention.in_proj.weight"]
    for rank in range(2):
        first, beta = rank * of_head, betas + rank * 4
        expected = [*range(first, first + of_head), *range(beta, beta + 4)]
        assert shard(projection, 2, rank) == expected
    both = shard(projection, 1, 0)
    # queries of both heads, then keys of both
    assert both[: 2 * key] == [*range(key), *range(of_head, of_head + key)]
    assert both[2 * key : 4 * key] == [*range(key, 2 * key), *range(of_head + key, of_head + 2 * key)]
    assert both[-4:] == [betas + 2, betas + 3, betas + 6, betas + 7]  # alphas
    # the convolution: queries, keys, values
    convolution = shard(entries["decoder.layers.0.self_attention.conv1d.weight"], 2, 1)
    expected = [
        *range(key, 2 * key),
        *range(3 * key, 4 * key),
        *range(4 * key + 2 * value, 4 * key + 4 * value),
    ]
    assert convolution == expected


def test_a_group_of_queries_has_its_gates(models):
    """Four heads in two groups: queries of the group's heads, their gates, its key, its value."""
    arch = read_architecture(models["qwen3_5"])
    entry, d = weight_map(arch)["decoder.layers.1.self_attention.linear_qkv.weight"], arch.head_dim
    assert isinstance(entry.kind, GatedQKV)
    heads = [row // d for row in shard(entry, 2, 1)][::d]
    # 0 to 7 are query and gate of each head, 8 and 9 the keys, 10 and 11 the values.
    assert heads == [4, 6, 5, 7, 9, 11]
    layout = EngineLayout(tp=2)
    assert entry.engine_shape(layout) == (6 * d, arch.hidden_size)
    assert [piece.start[0] // d for piece in entry.engine_pieces(layout, 1)] == [4, 1, 1]


def test_sections_of_the_convolution_are_consecutive(models):
    delta = read_architecture(models["qwen3_5"]).delta
    spans = [span for section in query_key_value(delta) for span in section]
    assert [first for _, first, _ in spans] == [0, delta.key_rows, 2 * delta.key_rows]
    assert sum(count for *_, count in spans) == 2 * delta.key_rows + delta.value_rows


PROJECTIONS = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba"],
    "qwen3_5": ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"],
}
PROJECTIONS["qwen3_5_moe"] = PROJECTIONS["qwen3_5"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_adapters_have_the_names_and_the_rows_of_the_projections(models, family):
    arch, lora = read_architecture(models[family]), LoraConfig(rank=4, targets=PROJECTIONS[family])
    assert without_adapter(arch, lora) == []
    assert adapter_entries(weight_map(arch).values(), replace(lora, targets=["out_proj"]))
    weights, adapters = weight_map(arch), adapter_entries(weight_map(arch).values(), lora)
    assert len(adapters) == 2 * sum(arch.delta.layers)
    layer = "decoder.layers.0.self_attention.in_proj"
    a, b, weight = adapters[f"{layer}.lora_a"], adapters[f"{layer}.lora_b"], weights[f"{layer}.weight"]
    peft = "base_model.model.model.layers.0.linear_attn"
    for entry, letter in ((a, "A"), (b, "B")):
        assert list(entry.hf) == [f"{peft}.{name}.lora_{letter}.weight" for name in PROJECTIONS[family]]
    assert a.megatron_shape(2) == (4, arch.hidden_size)
    for rank in range(2):
        assert shard(b, 2, rank) == shard(weight, 2, rank)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", HYBRIDS)
def test_engines_get_their_projections_from_megatrons(models, family, ranks):
    """Two trainer ranks send every element of a gated delta network once, in SGLang's order."""
    arch = read_architecture(models[family])
    plan = ReshardPlan(Layouts(arch, ParallelSizes(tp=2), EngineLayout(ranks), num_engines=1))
    tensors = hf_tensors(arch)
    have, arrived = trainer_parameters(plan, tensors), engine_parameters(plan)
    for rank in range(2):
        for link, parts in plan.outgoing(rank).items():
            for me, part in product(link.receivers, parts):
                target = part.move.target(arrived[me][part.engine])
                assert target.isnan().all(), f"{part} came twice"
                target.copy_(part.move.source(have[rank][part.megatron]))
    name = "model.layers.0.linear_attn"
    own = {
        key.removeprefix(f"{name}.").removesuffix(".weight"): value
        for key, value in tensors.items()
        if key.startswith(name)
    }
    keys, values = arch.delta.key_rows, arch.delta.value_rows
    sections = {"conv1d": own["conv1d"].split([keys, keys, values]), "A_log": [own["A_log"]]}
    if family.startswith("qwen3_5"):
        mixed = own["in_proj_qkv"].split([keys, keys, values])
        sections["in_proj_qkvz"] = *mixed, own["in_proj_z"]
        sections["in_proj_ba"] = own["in_proj_b"], own["in_proj_a"]
    else:  # rows of a key head are together
        sections |= {name: [own[name]] for name in ("in_proj_qkvz", "in_proj_ba")}
    assert not any("self_attn" in name for name in plan.engine_shapes)  # SGLang leaves it out
    for me, (key, parts) in product(plan.engine_ranks, sections.items()):
        expected = torch.cat([part.chunk(ranks)[me.rank] for part in parts])
        found = arrived[me][f"{name}.{key}" + ("" if key == "A_log" else ".weight")]
        assert torch.equal(found, expected), (key, me)


def test_layers_that_predict_further_tokens_are_left_out(models, tmp_path):
    tensors = load_file(Path(models["qwen3_next"], "model.safetensors"))
    save_file(tensors | {"mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    shutil.copy(Path(models["qwen3_next"], "config.json"), tmp_path)
    checkpoint = HFCheckpoint(str(tmp_path))
    assert checkpoint.violations(weight_map(read_architecture(str(tmp_path)))) == []
    assert checkpoint.left_out == ["mtp.fc.weight"]


# --- refused settings

NEEDED = ["data.train=d.jsonl", "data.max_prompt_length=64", "rollout.max_response_length=64"]
SFT_REFUSALS = [
    (
        ["megatron.tensor_parallel=2", "megatron.context_parallel=2"],
        "megatron.tensor_parallel * megatron.context_parallel must divide the model's key heads of gated "
        "delta networks (megatron.tensor_parallel * megatron.context_parallel=4",
    ),
    (["megatron.transformer_impl=transformer_engine"], "which only local layers compute"),
    (["megatron.precision=fp8"], "and these cannot compute in FP8"),
    (
        ["megatron.lora.rank=4", "megatron.lora.targets=[in_proj_qkvz,in_proj_ba]"],
        "this model has no layer in_proj_qkvz outside its experts",
    ),
]


def refused(model: str, overrides: list[str], command: Command) -> list[str]:
    config = read_config(None, [f"model.path={model}", *NEEDED, *overrides])
    return model_violations(config, read_architecture(model), command)


@pytest.mark.parametrize(("overrides", "says"), SFT_REFUSALS, ids=[says for _, says in SFT_REFUSALS])
def test_what_is_not_supported_yet_is_refused_by_name(models, overrides, says):
    found = refused(models["qwen3_5"], overrides, Command.sft)
    assert any(says in sentence for sentence in found), found


@pytest.mark.parametrize("family", HYBRIDS)
def test_supervised_training_and_replay_are_possible(models, family):
    assert refused(models[family], [], Command.sft) == []
    assert refused(models[family], ["megatron.context_parallel=2"], Command.sft) == []
    assert refused(models[family], ["rollout.replay=r"], Command.train) == []


@pytest.mark.parametrize("command", [Command.train, Command.eval, Command.serve])
@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("qwen3_next", "layers without experts (mlp_only_layers, decoder_sparse_step)"),
        ("qwen3_5", "do not follow each other at equal distances"),
    ],
)
def test_what_sglang_would_compute_otherwise_is_refused(models, family, says, command):
    found = refused(models[family], [], command)
    assert any(says in sentence for sentence in found), found


def test_engines_are_possible_but_not_with_every_setting(tmp_path):
    arch = read_architecture(written(tmp_path, NEXT))

    def found(*overrides):
        config = read_config(None, [f"model.path={tmp_path}", *NEEDED, *overrides])
        return architecture_violations(config, arch, Command.train)

    assert found() == []
    for override, says in (
        ("rollout.engine.quantization=fp8", "does not support gated delta networks"),
        ("rollout.strategy=beam", "for which SGLang has no beam search"),
        ("rollout.engine.tensor_parallel=32", "does not divide the 16 key heads of gated delta networks"),
    ):
        sentences = found(override)
        assert any(says in sentence for sentence in sentences), sentences


def test_engines_get_the_settings_that_transformers_writes_elsewhere(tmp_path):
    parameters = {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_type": "default"}
    kinds = ["linear_attention", "full_attention"] * 24
    config = NEXT | {"layer_types": kinds, "rope_parameters": parameters}
    for key in ("full_attention_interval", "partial_rotary_factor", "rope_theta"):
        del config[key]
    model = ModelConfig(written(tmp_path, config))
    found = engine_arguments(EngineConfig(), model, 0, needs_tokenizer=False, gpu=True, routing=False)
    assert json.loads(found["json_model_override_args"]) == {
        "full_attention_interval": 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5e6,
    }


def test_a_reward_model_on_the_ranks_is_refused(models):
    model = models["qwen3_5"]
    found = refused(model, ["reward.function=model", f"reward.model.path={model}"], Command.train)
    assert any("which reward models on the trainer's ranks cannot have" in sentence for sentence in found)

"""gpt-oss: config.json, weight map, MXFP4, activation, and the settings that are refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config.command import Command
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.load import read_config
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron
from grpo_megatron.conversion.megatron_to_hf import megatron_to_hf
from grpo_megatron.errors import UserError
from grpo_megatron.megatron.layers.modules import _ClampedSwiGLU
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.planner.engines import kv_bytes_read
from grpo_megatron.preflight.model import (
    architecture_violations,
    model_violations,
    reward_model_violations,
)
from grpo_megatron.sglang.arguments import engine_arguments
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.models import tiny_model

# gpt-oss-20b as published, but for keys that say nothing about the architecture.
PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
NEEDED = ["data.train=d.jsonl", "data.max_prompt_length=64", "rollout.max_response_length=64"]


def written(folder, config) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sizes_of_gpt_oss_are_the_published_ones(tmp_path):
    """The model card says 20.9 billion parameters, 3.6 of them active."""
    arch = read_architecture(written(tmp_path, PUBLISHED))
    entries = weight_map(arch).values()
    assert round(sum(entry.numel for entry in entries) / 1e9, 1) == 20.9
    share = arch.moe.top_k / arch.moe.num_experts
    active = sum(entry.numel * (share if entry.expert else 1) for entry in entries)
    embedding = arch.vocab_size * arch.hidden_size
    assert round((active - embedding) / 1e9, 1) == 3.6
    assert (arch.windows, arch.dtype) == ((128, None) * 12, torch.bfloat16)
    assert (arch.sinks, arch.linear_bias, arch.moe.swiglu_limit) == (True, True, 7.0)
    assert arch.longest_within_windows == 131072  # engines compute its windows
    # Twelve layers have a window. Each of their 64 heads multiplies 64 channels twice for a pair.
    assert arch.cost_model.windows == ((128, 12 * 2 * 64 * 2 * 64),)
    assert arch.cost_model.per_pair == 12 * 2 * 64 * 2 * 64
    # A token has a key and a value of 8 heads of 64 channels in each layer, in bfloat16.
    assert kv_bytes_read(arch, EngineConfig(), 1000.0) == 12 * (128 + 1000) * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_bias": False}, "attention_bias must be true"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
        ({"layer_types": ["full_attention"]}, "for each of the 24 layers"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"num_experts_per_tok": 33}, "must be at most the number of experts"),
    ],
)
def test_what_would_compute_otherwise_is_refused(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        read_architecture(written(tmp_path, PUBLISHED | changes))


def test_layers_alternate_if_config_json_does_not_say_otherwise(tmp_path):
    config = {key: value for key, value in PUBLISHED.items() if key not in ("layer_types", "rope_scaling")}
    arch = read_architecture(written(tmp_path, config))
    assert arch == read_architecture(written(tmp_path, PUBLISHED))


# --- files


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "gpt_oss", hidden_size=64, intermediate_size=96)


def in_mxfp4(folder: Path, model: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Write a copy of a model whose experts have random MXFP4 weights.

    Returns the weights as transformers dequantises them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator, stored, expected = torch.Generator().manual_seed(seed), {}, {}
    for name, tensor in load_file(f"{model}/model.safetensors").items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            stored[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator)
        scales = torch.randint(120, 130, (experts, rows, columns // 32), generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks.byte(), scales.byte()
        expected[name] = convert_moe_packed_tensors(blocks.byte(), scales.byte())
    config = json.loads(Path(model, "config.json").read_text())
    written(folder, config | {"quantization_config": PUBLISHED["quantization_config"]})
    save_file(stored, folder / "model.safetensors")
    return expected


def test_experts_in_mxfp4_are_read_as_transformers_dequantises_them(model, tmp_path):
    expected = in_mxfp4(tmp_path / "mxfp4", model)
    checkpoint = HFCheckpoint(str(tmp_path / "mxfp4"))
    assert checkpoint.violations(weight_map(read_architecture(str(tmp_path / "mxfp4")))) == []
    assert len(expected) == 8
    for name, stack in expected.items():
        block, projection = name.rsplit(".", 1)
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        if projection == "down_proj":
            parts = {"down_proj": slice(None)}
        for expert, (part, rows) in ((e, item) for e in range(len(stack)) for item in parts.items()):
            whole = stack[expert][:, rows].t()
            own = f"{block}.{expert}.{part}.weight"
            assert torch.equal(checkpoint.read(own), whole)
            # Neither side of the rectangle is at the edge of a group of 32 numbers.
            assert torch.equal(checkpoint.read_slice(own, (3, 17), (5, 31)), whole[3:8, 17:48])


@pytest.mark.slow
def test_a_copy_in_bfloat16_has_the_values_of_mxfp4(model, tmp_path):
    expected = in_mxfp4(tmp_path / "mxfp4", model)
    hf_to_megatron(str(tmp_path / "mxfp4"), str(tmp_path / "megatron"), processes=1)
    megatron_to_hf(str(tmp_path / "megatron"), str(tmp_path / "hf"), None, processes=1, dtype=torch.bfloat16)
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == load_file(f"{model}/model.safetensors").keys()
    for name, stack in expected.items():
        assert torch.equal(found[name], stack)
    assert "quantization_config" not in json.loads((tmp_path / "hf/config.json").read_text())
    with pytest.raises(UserError, match="gpt_oss cannot be written in FP8; convert it without --fp8"):
        megatron_to_hf(str(tmp_path / "megatron"), str(tmp_path / "fp8"), None, processes=1, fp8=True)


def test_absent_scales_are_one_clear_error(model, tmp_path):
    in_mxfp4(tmp_path / "mxfp4", model)
    tensors, lost = load_file(tmp_path / "mxfp4/model.safetensors"), "mlp.experts.down_proj_scales"
    kept = {name: tensor for name, tensor in tensors.items() if name != f"model.layers.1.{lost}"}
    save_file(kept, tmp_path / "mxfp4/model.safetensors")
    checkpoint = HFCheckpoint(str(tmp_path / "mxfp4"))
    with pytest.raises(UserError, match=rf"tensor model\.layers\.1\.{lost} is missing"):
        checkpoint.violations(weight_map(read_architecture(str(tmp_path / "mxfp4"))))


def test_other_models_in_mxfp4_are_refused(tmp_path):
    folder = tiny_model(tmp_path / "qwen3", "qwen3")
    config = json.loads(Path(folder, "config.json").read_text())
    written(tmp_path / "qwen3", config | {"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(UserError, match="quantised with mxfp4 and cannot be trained"):
        HFCheckpoint(folder)


# --- weight sync


def test_only_the_first_engine_rank_has_the_biases_of_down_projections(model):
    """SGLang adds up the outputs of the ranks that share an expert."""
    entries = weight_map(read_architecture(model))
    entry = entries["decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.bias"]
    assert [len(entry.engine_pieces(EngineLayout(2), rank)) for rank in range(2)] == [1, 0]


def test_gate_and_up_rows_are_in_turns_in_the_engine(model):
    from grpo_megatron.sglang.weight_receiver import apart

    entry = weight_map(read_architecture(model))[
        "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
    ]
    gate, up = torch.randn(2, 96, 64)
    parameter = torch.zeros(4, 96, 64)  # of the second of two ranks, with all four experts
    for piece in entry.engine_pieces(EngineLayout(2), 1):
        source = gate if "gate" in piece.hf else up
        rows = slice(piece.start[0], piece.start[0] + piece.shape[0])
        piece.of(apart(parameter)).copy_(source[rows])
    assert torch.equal(parameter[1, ::2], gate[48:])
    assert torch.equal(parameter[1, 1::2], up[48:])
    assert not parameter[[0, 2, 3]].any()


# --- activation


def test_the_activation_and_its_gradient_equal_the_formula_in_float64():
    x = torch.randn(7, 24, dtype=torch.float64) * 4
    x.requires_grad_()
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    weight = torch.randn_like(expected)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), x)
    found = _ClampedSwiGLU.apply(x, 2.5)
    (ours,) = torch.autograd.grad((found * weight).sum(), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(ours, theirs)
    assert (x.abs() > 2.5).any()


# --- refused settings


@pytest.mark.parametrize(
    ("override", "says", "command"),
    [
        ("megatron.transformer_impl=transformer_engine", "which only local layers compute", Command.sft),
        ("megatron.precision=fp8", "these cannot compute in FP8", Command.sft),
        ("megatron.recompute_modules=[moe_act]", "these recompute whole experts", Command.sft),
        ("megatron.expert_tensor_parallel=2", "not possible for experts with biases", Command.sft),
        ("megatron.lora.targets=[down_proj]", "belongs to the experts", Command.sft),
        ("rollout.engine.expert_parallel=2", "only if they are in MXFP4", Command.train),
        ("rollout.engine.dtype=float32", "in the dtype of its config.json, bfloat16", Command.train),
        ("rollout.engine.quantization=fp8", "so both would share one scale", Command.train),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, override, says, command):
    config = {key: value for key, value in PUBLISHED.items() if key != "quantization_config"}
    path = written(tmp_path, config)
    overrides = [override, *(["megatron.lora.rank=4"] if "lora" in override else [])]
    overrides += ["megatron.recompute=selective"] if "recompute" in override else []
    if "expert_parallel" in override:
        overrides.append("rollout.engine.tensor_parallel=2")
    read = read_config(None, [f"model.path={path}", *NEEDED, *overrides])
    found = architecture_violations(read, read_architecture(path), command)
    assert any(says in sentence for sentence in found), found


def test_what_is_supported_is_not_refused(model):
    config = read_config(None, [f"model.path={model}", *NEEDED])
    assert model_violations(config, read_architecture(model), Command.train) == []


def test_engines_refuse_mxfp4_and_say_what_to_do(model, tmp_path):
    in_mxfp4(tmp_path / "mxfp4", model)
    config = read_config(None, [f"model.path={tmp_path / 'mxfp4'}", *NEEDED])
    arch = read_architecture(config.model.path)
    (said,) = model_violations(config, arch, Command.train)
    assert "make a copy in bfloat16 with tools/convert_hf_to_megatron.py" in said
    assert model_violations(config, arch, Command.sft) == []


def test_engines_get_an_attention_backend_that_sglang_accepts(model):
    def arguments(gpu):
        return engine_arguments(EngineConfig(), ModelConfig(model), 0, False, gpu=gpu, routing=False)

    assert (arguments(False)["attention_backend"], arguments(False)["disable_hybrid_swa_memory"]) == (
        "triton",
        True,
    )
    assert arguments(True)["moe_runner_backend"] == "triton"


def test_reward_models_on_ranks_have_the_policys_kind_of_layers(model, tmp_path):
    """TransformerEngine's layers would leave out sinks and windows."""
    reward = tiny_model(tmp_path / "reward", "gpt_oss")
    config = json.loads(Path(reward, "config.json").read_text())
    scoring = {"architectures": ["GptOssForSequenceClassification"], "id2label": {"0": "reward"}}
    written(tmp_path / "reward", config | scoring)
    policy = tiny_model(tmp_path / "policy", "qwen3")
    overrides = [f"model.path={policy}", f"reward.model.path={reward}", "reward.function=model"]
    for impl, refused in (("auto", True), ("local", False)):
        read = read_config(None, [*NEEDED, *overrides, f"megatron.transformer_impl={impl}"])
        found = reward_model_violations(read)
        assert any("needs Megatron's local layers" in said for said in found) is refused, found

"""Models that SGLang would take for others are refused if engines generate with them."""

import json
import re
from math import log
from pathlib import Path

import pytest

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.model import model_violations
from tests.models import YARN, tiny_model

EVERYWHERE = {"mlp_only_layers": []}


def scaled(kind, **settings):
    return {"rope_parameters": YARN | {"rope_type": kind} | settings}


def violations(model, command, *more):
    lengths = ["data.max_prompt_length=64", "rollout.max_response_length=64"]
    config = read_config(None, [f"model.path={model}", "data.train=d.jsonl", *lengths, *more], command)
    return model_violations(config, read_architecture(model), command)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen3_moe", EVERYWHERE, None),
        ("qwen3_moe", EVERYWHERE | {"tied": True}, "tied embeddings"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "layers without experts"),
        ("mixtral", {"head_dim": None}, None),
        ("mixtral", {"head_dim": None, "tied": True}, "tied embeddings"),
        ("mixtral", {"head_dim": 24}, "head_dim of 24, which SGLang's Mixtral ignores; SGLang uses .* = 16"),
        ("qwen3", {"tied": True, "head_dim": 24}, None),
        ("deepseek_v3", {}, None),
        (
            "deepseek_v3",
            {"rms_norm_eps": 1e-5},
            "rms_norm_eps=1e-05, which SGLang also uses for the norms of latents",
        ),
        ("glm4_moe", {"rms_norm_eps": 1e-5}, None),
        ("minimax_m2", {}, None),
        ("minimax_m2", {"use_qk_norm": None}, 'lacks .* add "use_qk_norm": true'),
        (
            "minimax_m2",
            {"rotary_dim": None, "partial_rotary_factor": 0.5},
            'lacks .* add "rotary_dim": 12',
        ),
        ("qwen3", scaled("linear", factor=4.0), None),
        ("qwen3", scaled("linear", factor=4), r"factor=4 for linear RoPE scaling, .* fails; write 4\.0"),
        ("mixtral", {"head_dim": None} | scaled("linear", factor=4.0), "rotary embedding .* Mixtral ignores"),
        ("qwen3", scaled("yarn", truncate=False), None),
        ("qwen3", scaled("yarn", attention_factor=0.1 * log(8) + 1), None),
        ("qwen3", scaled("yarn", attention_factor=1.5), "attention_factor=1.5 .* SGLang uses 1.20794"),
        ("qwen3", scaled("yarn", factor=4.0), "=256, but .* = 128 positions, and SGLang 0.5.17"),
        ("deepseek_v3", scaled("yarn", truncate=False), "truncate=false for YaRN RoPE scaling"),
    ],
)
def test_what_sglang_would_take_for_another_model(tmp_path, family, changes, says):
    model = tiny_model(tmp_path / "model", family, **changes)
    if says is None:
        assert violations(model, Command.train) == []
        return
    (rule,) = violations(model, Command.train)
    assert re.search(says, rule)
    assert violations(model, Command.sft) == []
    assert violations(model, Command.train, "rollout.replay=r.jsonl") == []


def test_adapters_of_mixtral_need_its_head_dim(tmp_path):
    """SGLang computes the shapes of an adapter with it, and fails if it is null."""
    model, attention = tmp_path / "model", "[q_proj,k_proj,v_proj,o_proj]"
    tiny_model(model, "mixtral", head_dim=None)
    lora = ["megatron.lora.rank=4", f"megatron.lora.targets={attention}"]
    assert violations(model, Command.train, *lora) == []
    (rule,) = violations(model, Command.train, *lora, "weight_sync.lora=adapter")
    assert 'lacks entries that SGLang needs and transformers does not write; add "head_dim": 16' in rule
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"head_dim": 16}))
    assert violations(model, Command.train, *lora, "weight_sync.lora=adapter") == []


def test_longer_than_a_sliding_window(tmp_path):
    """Engines ignore the window, and TransformerEngine's layers do not get it."""
    model = tiny_model(tmp_path / "model", "mistral", sliding_window=127)
    for command, more, says in (
        (Command.train, [], "supports only 127 positions within its sliding window, which SGLang ignores"),
        (Command.sft, [], "which only megatron.transformer_impl=local computes; lower one of the two"),
        (Command.sft, ["megatron.transformer_impl=local"], None),
        (
            Command.sft,
            ["megatron.transformer_impl=local", "data.max_prompt_length=200"],
            "only 256 positions;",
        ),
    ):
        found = violations(model, command, *more)
        assert [rule for rule in found if says and says in rule] == found
        assert bool(found) == bool(says)


def test_beams_find_enough_tokens(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")  # of 61 tokens
    assert violations(model, Command.train, "rollout.strategy=beam", "rollout.n=30") == []
    assert violations(model, Command.train, "rollout.strategy=sampling", "rollout.n=31") == []
    for more in (["rollout.n=31"], ["rollout.n=21", "rollout.stop_token_ids=[5]"]):
        (rule,) = violations(model, Command.train, "rollout.strategy=beam", *more)
        assert "has only 61 tokens; lower rollout.n" in rule
    assert violations(model, Command.eval, "data.eval=e.jsonl", "rollout.strategy=beam", "rollout.n=31") == []


def test_an_evaluation_has_engines_and_no_trainer(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3")  # of 256 positions
    trained = ["megatron.pipeline_parallel=3", "ref.path=/nowhere"]
    assert violations(model, Command.eval, "data.eval=e.jsonl", *trained) == []
    (layout, length) = violations(
        model,
        Command.eval,
        "data.eval=e.jsonl",
        "rollout.engine.tensor_parallel=3",
        "eval.max_response_length=193",
    )
    assert "rollout.engine.tensor_parallel=3 does not divide" in layout
    assert "data.max_prompt_length + eval.max_response_length = 257" in length


def test_what_sglang_would_not_find_or_keep_otherwise(tmp_path):
    model = tiny_model(tmp_path / "model", "deepseek_v3")
    path = Path(model) / "config.json"
    config = json.loads(path.read_text())
    del config["topk_method"]
    path.write_text(json.dumps(config | {"quantization_config": {"weight_block_size": [128, 128]}}))
    missing, fp8 = violations(model, Command.train)
    assert 'add "topk_method": "noaux_tc"' in missing
    assert "FP8 weights" in fp8
    assert violations(model, Command.sft) == []


@pytest.mark.parametrize(("block", "refused"), [(128, False), (64, True)])
def test_engines_keep_an_fp8_checkpoint_only_if_adapters_travel_alone(tmp_path, block, refused):
    model = tiny_model(tmp_path / "model", "qwen3")
    path = Path(model) / "config.json"
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [block, block]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fp8))
    lora = ["megatron.lora.rank=4"]
    (rule,) = violations(model, Command.train, *lora)
    assert "with blocks of 128 x 128, train only adapters" in rule
    lora.append("weight_sync.lora=adapter")
    assert bool(violations(model, Command.train, *lora)) == refused
    assert violations(model, Command.train, *lora, "rollout.engine.load_format=dummy") == [rule]


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        ("qwen3", {"tensor_parallel": 4}, None),
        ("qwen3", {"tensor_parallel": 8}, "tensor_parallel=8 does not divide the 4 attention heads"),
        (
            "qwen3",
            {"tensor_parallel": 2, "expert_parallel": 2},
            "expert_parallel=2 needs a model with experts",
        ),
        (
            "qwen3",
            {"tensor_parallel": 2, "data_parallel_attention": 2},
            "SGLang does not support this for qwen3, only for",
        ),
        ("glm4_moe", {"tensor_parallel": 8, "data_parallel_attention": 2, "expert_parallel": 4}, None),
        ("glm4_moe", {"tensor_parallel": 3, "expert_parallel": 3}, "attention heads"),
        (
            "glm4_moe",
            {"tensor_parallel": 8, "data_parallel_attention": 4, "expert_parallel": 8},
            "=8 does not divide the 4 experts",
        ),
        (
            "glm4_moe",
            {"tensor_parallel": 16, "data_parallel_attention": 4},
            "does not divide the experts' intermediate size 40",
        ),
        ("glm4_moe", {"tensor_parallel": 4, "expert_parallel": 3}, None),  # breaks a rule of its own
    ],
)
def test_the_model_fits_an_engines_parallel_sizes(tmp_path, family, sizes, says):
    model = tiny_model(tmp_path / "model", family)
    found = violations(
        model, Command.train, *(f"rollout.engine.{key}={value}" for key, value in sizes.items())
    )
    if says is None:
        assert found == []
    else:
        assert any(says in sentence for sentence in found)
    assert (
        violations(model, Command.sft, *(f"rollout.engine.{key}={value}" for key, value in sizes.items()))
        == []
    )

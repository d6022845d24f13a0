"""Engines in FP8: what is refused before anything starts."""

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.engine_fp8 import engine_fp8_violations
from tests.models import tiny_model

FP8 = ["run.name=a", "data.train=a", "rollout.engine.quantization=fp8"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}


@pytest.fixture
def found(tmp_path):
    def ask(family="qwen3", overrides=("rollout.engine.dtype=bfloat16",), **sizes):
        folder = tiny_model(tmp_path, family, num_hidden_layers=2, **{**SIZES, **sizes})
        config = read_config(None, [*FP8, f"model.path={folder}", *overrides])
        return [sentence.replace(folder, "MODEL") for sentence in engine_fp8_violations(config, read_architecture(folder))]

    return ask


def test_a_model_of_whole_blocks_is_taken(found):
    bf16 = "rollout.engine.dtype=bfloat16"
    assert found(overrides=[bf16]) == []
    assert found(overrides=[bf16, "megatron.tensor_parallel=2", "rollout.engine.tensor_parallel=2"]) == []


def test_other_dtypes_are_refused(found):
    (sentence,) = found(overrides=[])
    assert "in bfloat16, which is float32 here: set rollout.engine.dtype=bfloat16" in sentence


def test_experts_are_refused(found):
    (sentence,) = found("qwen3_moe")
    assert "MODEL has experts or latent attention" in sentence


@pytest.mark.parametrize("side", ["megatron", "rollout.engine"])
def test_ranks_with_parts_of_blocks_are_named_once_for_each_kind_of_layer(found, side):
    key = f"{side}.tensor_parallel"
    sentences = found(overrides=["rollout.engine.dtype=bfloat16", f"{key}=2"], intermediate_size=384, num_key_value_heads=4)
    assert len(sentences) == 3
    keys, gate, down = sentences
    assert f"with {key}=2 rank 0 has [0, 64) x [0, 256) of model.layers.1.self_attn.k_proj.weight, which cuts blocks" in keys
    assert "[0, 192) x [0, 256) of model.layers.1.mlp.gate_proj.weight" in gate
    assert down.endswith("use fewer ranks, or set it to none")


def test_sizes_that_are_not_of_whole_blocks_are_refused(found):
    sentences = found(hidden_size=192)
    assert any("[0, 256) x [0, 192) of model.layers.1.self_attn.q_proj.weight" in sentence for sentence in sentences)

"""FP8 engines: settings that are refused before anything starts."""

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.engine_fp8 import engine_fp8_violations
from tests.models import tiny_model

FP8 = ["run.name=a", "data.train=a", "rollout.engine.quantization=fp8"]
BF16, TP2 = "rollout.engine.dtype=bfloat16", "rollout.engine.tensor_parallel=2"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
EXPERTS = {"moe_intermediate_size": 256, "mlp_only_layers": []}


@pytest.fixture
def found(tmp_path):
    def ask(family="qwen3", overrides=(BF16,), **sizes):
        folder = tiny_model(tmp_path, family, num_hidden_layers=2, **{**SIZES, **sizes})
        config = read_config(None, [*FP8, f"model.path={folder}", *overrides])
        return [
            sentence.replace(folder, "MODEL")
            for sentence in engine_fp8_violations(config, read_architecture(folder))
        ]

    return ask


def test_a_model_of_whole_blocks_is_taken(found):
    assert found(overrides=[BF16]) == []
    assert found(overrides=[BF16, "megatron.tensor_parallel=2", TP2]) == []


def test_other_dtypes_are_refused(found):
    (sentence,) = found(overrides=[])
    assert "in bfloat16, but they compute in float32; set rollout.engine.dtype=bfloat16" in sentence


def test_latent_attention_is_refused(found):
    (sentence,) = found("deepseek_v3")
    assert (
        "latent attention, which MODEL has, because SGLang merges kv_b_proj into other products after loading"
        in sentence
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("engine", [(), (TP2,), (TP2, "rollout.engine.expert_parallel=2")])
def test_experts_of_whole_blocks_are_taken(found, family, engine):
    trainer = (
        "megatron.tensor_parallel=2",
        "megatron.expert_tensor_parallel=2",
        "megatron.sequence_parallel=true",
    )
    assert found(family, [BF16, *trainer, *engine], **EXPERTS) == []


def test_parts_of_experts_are_those_of_their_own_ranks(found):
    narrow = {**EXPERTS, "moe_intermediate_size": 128}
    assert (
        found(
            "qwen3_moe",
            [BF16, "megatron.tensor_parallel=2", TP2, "rollout.engine.expert_parallel=2"],
            **narrow,
        )
        == []
    )
    trainer = ["megatron.tensor_parallel=2", "megatron.expert_tensor_parallel=2"]
    ours = found("qwen3_moe", [BF16, *trainer], **narrow)
    theirs = found("qwen3_moe", [BF16, TP2], **narrow)
    for sentences, where in (
        (ours, "megatron.expert_tensor_parallel=2"),
        (theirs, f"{TP2} / expert_parallel=1"),
    ):
        gate, down = sentences
        assert (
            f"with {where} rank 0 has [0, 64) x [0, 256) of "
            "model.layers.1.mlp.experts.3.gate_proj.weight, which splits" in gate
        )
        assert "[0, 256) x [0, 64) of model.layers.1.mlp.experts.3.down_proj.weight" in down
        assert gate.endswith("use fewer ranks, or set rollout.engine.quantization=none")
    sentences = found("qwen3_moe", [BF16], **{**EXPERTS, "moe_intermediate_size": 192})
    assert len(sentences) == 4
    assert all(sentence.endswith("128 x 128; set rollout.engine.quantization=none") for sentence in sentences)


@pytest.mark.parametrize("side", ["megatron", "rollout.engine"])
def test_ranks_with_parts_of_blocks_are_named_once_for_each_kind_of_layer(found, side):
    key = f"{side}.tensor_parallel"
    sentences = found(overrides=[BF16, f"{key}=2"], intermediate_size=384, num_key_value_heads=4)
    assert len(sentences) == 3
    keys, gate, down = sentences
    assert (
        f"with {key}=2 rank 0 has [0, 64) x [0, 256) of "
        "model.layers.1.self_attn.k_proj.weight, which splits blocks" in keys
    )
    assert "[0, 192) x [0, 256) of model.layers.1.mlp.gate_proj.weight" in gate
    assert down.endswith("use fewer ranks, or set rollout.engine.quantization=none")


def test_sizes_that_are_not_of_whole_blocks_are_refused(found):
    sentences = found(hidden_size=192)
    assert any(
        "[0, 256) x [0, 192) of model.layers.1.self_attn.q_proj.weight" in sentence for sentence in sentences
    )

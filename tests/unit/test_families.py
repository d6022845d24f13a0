"""Reading of published config.json files of models with sigmoid routing, and refusals."""

import json
from dataclasses import replace
from math import pi, prod

import numpy as np
import pytest
import torch

from grpo_megatron.errors import UserError
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map

# As published, but for keys that say nothing about the architecture.
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 151552,
}
YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-6,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
MINIMAX = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}
PUBLISHED = {"glm": GLM, "deepseek": DEEPSEEK, "kimi": KIMI, "minimax": MINIMAX}


def read(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(str(folder))


@pytest.mark.parametrize(
    ("model", "billions", "active"),
    [("glm", 353, 32), ("deepseek", 671, 37), ("kimi", 1026, 32), ("minimax", 229, 10)],
)
def test_sizes_are_the_published_ones(tmp_path, model, billions, active):
    """GLM-4.5 has 355 billion parameters with the layer that predicts further tokens, 32 of them active.

    DeepSeek-V3 has 671 and 37, Kimi-K2 about 1,000 and 32, MiniMax-M2 about 230 and 10.
    """
    arch = read(tmp_path, PUBLISHED[model])
    entries = weight_map(arch).values()
    assert round(sum(entry.numel for entry in entries) / 1e9) == billions
    share = arch.moe.top_k / arch.moe.num_experts
    weights = sum(
        sum(prod(shape) for shape in entry.shapes if len(shape) == 2) * (share if entry.expert else 1)
        for entry in entries
        if not entry.megatron.startswith("embedding.")
    )
    assert arch.cost_model.per_token == pytest.approx(2 * weights)
    assert weights / 1e9 == pytest.approx(active, abs=1)


def test_what_deepseek_v3_says(tmp_path):
    arch = read(tmp_path, DEEPSEEK)
    assert (arch.head_dim, arch.num_kv_heads) == (192, 128)
    assert (arch.moe.groups, arch.moe.top_groups, sum(arch.moe.layers)) == (8, 4, 58)
    # mscale and mscale_all_dim cancel in the cosines, and 0.1 ln 40 + 1 is squared in the scores.
    assert arch.rope_factor == 1.0
    assert arch.softmax_factor == pytest.approx(1.3688879**2)
    # A pair of tokens: 192 channels of query and key, 128 of the value, in 128 heads of 61 layers.
    assert arch.cost_model.per_pair == 2.0 * 61 * 128 * (192 + 128)


def test_what_kimi_k2_says(tmp_path):
    arch = read(tmp_path, KIMI)
    assert (arch.family, arch.moe.groups, arch.moe.index_dtype) == ("deepseek_v3", None, np.int16)
    # Divided are the frequencies that make less than one turn in 4,096 positions, and no others.
    plain = replace(arch, rope_scaling=None).rope_frequencies()
    expected = torch.where(plain < 2 * pi / 4096, plain / 32, plain)
    torch.testing.assert_close(arch.rope_frequencies(), expected)


def test_what_minimax_m2_says(tmp_path):
    arch = read(tmp_path, MINIMAX)
    assert (arch.qk_norm, arch.joint_qk_norm, arch.moe.sigmoid, arch.moe.correction_bias) == (True,) * 4
    assert len(arch.rope_frequencies()) == 32
    # A norm covers all heads. An engine of 16 ranks has each of the 8 key heads twice.
    norm = weight_map(arch)["decoder.layers.0.self_attention.k_layernorm.weight"]
    assert norm.shapes == ((1024,),)
    assert norm.engine_shape(EngineLayout(tp=16)) == (128,)
    assert [norm.engine_pieces(EngineLayout(tp=16), rank)[0].start for rank in (0, 1, 2)] == [
        (0,),
        (0,),
        (128,),
    ]
    assert norm.megatron_pieces(2, 1)[0].start == (512,)


def test_what_glm_4_5_says(tmp_path):
    arch = read(tmp_path, GLM)
    assert (arch.qkv_bias, arch.qk_norm, arch.rotary_share, arch.moe.groups) == (True, True, 0.5, None)
    assert len(arch.rope_frequencies()) == 32


REFUSED = [
    ("deepseek", {"attention_bias": True}, "attention_bias=true"),
    ("deepseek", {"scoring_func": "softmax"}, "scoring_func=softmax is not supported"),
    ("deepseek", {"topk_method": "greedy"}, "topk_method=greedy is not supported"),
    ("deepseek", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek", {"norm_topk_prob": False}, "norm_topk_prob must be true"),
    ("deepseek", {"num_experts_per_tok": 6}, "num_experts_per_tok must be twice topk_group"),
    ("deepseek", {"n_group": 7}, "the groups must be of equal size"),
    ("deepseek", {"n_routed_experts": 8}, "contain enough experts"),
    (
        "deepseek",
        {"num_key_value_heads": 64},
        "must equal num_attention_heads=128 in a model with latent attention",
    ),
    ("deepseek", {"rope_scaling": YARN | {"mscale": None}}, "only supported together"),
    ("deepseek", {"rope_scaling": YARN | {"type": "linear"}}, "supported are default, yarn"),
    ("deepseek", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer from 0"),
    ("deepseek", {"kv_lora_rank": None}, "key kv_lora_rank is missing"),
    ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("glm", {"partial_rotary_factor": 0.01}, "must select an even number"),
    ("glm", {"num_experts_per_tok": 1}, "num_experts_per_tok must be at least 2"),
    ("minimax", {"num_experts_per_tok": 1}, "num_experts_per_tok must be at least 2"),
    ("minimax", {"use_qk_norm": False}, "use_qk_norm must be true"),
    ("minimax", {"use_routing_bias": False}, "use_routing_bias must be true"),
    ("minimax", {"qk_norm_type": "per_head"}, "qk_norm_type=per_head is not supported"),
    ("minimax", {"scoring_func": "softmax"}, "scoring_func=softmax is not supported"),
    ("minimax", {"attn_type_list": [1, 0]}, "linear attention is not supported"),
    ("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size must be 0"),
    ("glm", {"n_shared_experts": 0}, "n_shared_experts must be an integer from 1"),
]


@pytest.mark.parametrize(("model", "changes", "says"), REFUSED)
def test_what_would_compute_otherwise_is_refused(tmp_path, model, changes, says):
    with pytest.raises(UserError, match=says):
        read(tmp_path, PUBLISHED[model] | changes)

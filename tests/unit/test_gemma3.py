"""Gemma 3: config.json of both forms, weight map, and the settings that are refused."""

import json
from dataclasses import replace

import pytest
import torch

from grpo_megatron.config.command import Command
from grpo_megatron.config.load import read_config
from grpo_megatron.errors import UserError
from grpo_megatron.model.entries import EngineLayout
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.rope_scaling import LinearScaling
from grpo_megatron.preflight.model import architecture_violations, model_violations
from tests.models import tiny_model

# gemma-3-1b as published, but for keys that say nothing about the architecture.
PUBLISHED = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
NEEDED = ["data.train=d.jsonl", "data.max_prompt_length=64", "rollout.max_response_length=64"]


def written(folder, config) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sizes_of_gemma_3_are_the_published_ones(tmp_path):
    arch = read_architecture(written(tmp_path, PUBLISHED))
    exported = [entry for entry in weight_map(arch).values() if entry.exported]
    assert sum(entry.numel for entry in exported) == 999_885_952
    assert arch.windows == (((512,) * 5 + (None,)) * 5)[:26]
    assert (arch.embedding_factor, arch.softmax_factor) == (pytest.approx(1152**0.5), 1.0)
    assert arch.longest_within_windows == 32768  # engines compute its windows


@pytest.mark.parametrize(
    ("sizes", "millions"),
    [
        ({"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}, 3209),
        (
            {
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
            },
            10759,
        ),
        (
            {
                "head_dim": 128,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_hidden_layers": 62,
                "num_key_value_heads": 16,
                "query_pre_attn_scalar": 168,
            },
            25600,
        ),
    ],
    ids=["4B", "12B", "27B"],
)
def test_published_files_with_a_vision_model_leave_out_what_is_the_default(tmp_path, sizes, millions):
    """Table 1 of arXiv:2503.19786 has the numbers of parameters besides embeddings and vision model."""
    rope = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": sizes | rope | {"model_type": "gemma3_text"},
        "torch_dtype": "bfloat16",
    }
    arch = read_architecture(written(tmp_path, config))
    entries = [entry for entry in weight_map(arch).values() if entry.exported]
    besides = sum(entry.numel for entry in entries) - arch.vocab_size * arch.hidden_size
    assert round(besides / 1e6) == pytest.approx(millions, abs=1)
    assert (arch.dtype, arch.tied_embeddings, arch.vocab_size) == (torch.bfloat16, True, 262208)
    assert arch.windows[:6] == (1024,) * 5 + (None,)
    assert arch.rope_scaling == LinearScaling(8.0)


def test_layers_with_windows_have_a_rotary_embedding_of_their_own(tmp_path):
    scaled = PUBLISHED | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # as in gemma-3-4b
    arch = read_architecture(written(tmp_path, scaled))
    exponents = torch.arange(0, 256, 2) / 256
    torch.testing.assert_close(arch.rope_frequencies(), 1e6**-exponents / 8)
    torch.testing.assert_close(arch.rope_frequencies(window=512), 1e4**-exponents)


def test_both_forms_of_config_json_are_read_alike(tmp_path):
    old = PUBLISHED | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {key: value for key, value in PUBLISHED.items() if not key.startswith("rope")}
    del new["sliding_window_pattern"]
    new |= {
        "layer_types": [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(26)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }
    assert read_architecture(written(tmp_path, new)) == read_architecture(written(tmp_path, old))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ({"hidden_activation": "relu"}, "hidden_activation=relu is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                }
            },
            "rope_parameters.sliding_attention must have the rope_type default",
        ),
    ],
)
def test_what_would_compute_otherwise_is_refused(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        read_architecture(written(tmp_path, PUBLISHED | changes))


def test_every_engine_rank_has_the_whole_embedding(tmp_path):
    arch = read_architecture(written(tmp_path, PUBLISHED))
    entry = weight_map(arch)["embedding.word_embeddings.weight"]
    assert entry.engine_shape(EngineLayout(2)) == (262144, 1152)
    assert [piece.shape for piece in entry.engine_pieces(EngineLayout(2), 1)] == [(262144, 1152)]


@pytest.mark.parametrize(
    ("override", "says", "command"),
    [
        ("megatron.transformer_impl=transformer_engine", "norms of the outputs of attention", Command.sft),
        ("megatron.precision=fp8", "these cannot compute in FP8", Command.sft),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, override, says, command):
    path = written(tmp_path, PUBLISHED)
    config = read_config(None, [f"model.path={path}", *NEEDED, override])
    found = architecture_violations(config, read_architecture(path), command)
    assert any(says in sentence for sentence in found), found


def test_engines_need_the_embedding_as_the_output_layer(tmp_path):
    model = tiny_model(tmp_path, "gemma3", tied=True)
    arch, config = read_architecture(model), read_config(None, [f"model.path={model}", *NEEDED])
    assert model_violations(config, arch, Command.train) == []
    (said,) = architecture_violations(config, replace(arch, tied_embeddings=False), Command.train)
    assert "which SGLang's Gemma 3 ignores" in said

"""Models that SGLang would take for others are refused where engines generate with them."""

import re

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.model import model_violations
from tests.models import tiny_model

EVERYWHERE = {"mlp_only_layers": []}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen3_moe", EVERYWHERE, None),
        ("qwen3_moe", EVERYWHERE | {"tied": True}, "tied embeddings"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "layers without experts"),
        ("mixtral", {"head_dim": None}, None),
        ("mixtral", {"head_dim": None, "tied": True}, "tied embeddings"),
        ("mixtral", {"head_dim": 24}, "head_dim of 24, which SGLang's Mixtral ignores: it takes .* = 16"),
        ("qwen3", {"tied": True, "head_dim": 24}, None),
    ],
)
def test_what_sglang_would_take_for_another_model(tmp_path, family, changes, says):
    model = tiny_model(tmp_path / "model", family, **changes)
    arch = read_architecture(model)

    def found(command, *more):
        lengths = ["data.max_prompt_length=64", "rollout.max_response_length=64"]
        config = read_config(None, [f"model.path={model}", "data.train=d.jsonl", *lengths, *more], command)
        return model_violations(config, arch, command)

    if says is None:
        assert found("train") == []
        return
    (rule,) = found("train")
    assert re.search(says, rule)
    assert found("sft") == []
    assert found("train", "rollout.replay=r.jsonl") == []

"""Models and layouts that FP8 cannot handle, which config.json shows."""

import pytest

from grpo_megatron.config.load import read_config
from grpo_megatron.model.families import read_architecture
from grpo_megatron.preflight.fp8_sizes import fp8_violations
from tests.models import FAMILIES, aligned_model, tiny_model

FP8 = ["model.path=m", "data.train=d.jsonl", "megatron.precision=fp8"]
TP2 = ["megatron.tensor_parallel=2", "megatron.sequence_parallel=true"]


def broken(folder, *overrides) -> list[str]:
    return fp8_violations(read_config(None, [*FP8, *overrides]), read_architecture(str(folder)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: aligned_model(root / family, family) for family in FAMILIES}


@pytest.mark.slow_but(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_aligned_models_can_be_taken(models, family, recipe):
    for layout in ([], TP2):
        assert broken(models[family], f"megatron.fp8.recipe={recipe}", *layout) == []


def test_each_matrix_that_cannot_be_taken_is_named_once(tmp_path):
    tiny_model(tmp_path, "qwen3", intermediate_size=100, head_dim=20)
    found = broken(tmp_path)
    assert len(found) == 2
    assert "a side of self_attention.linear_proj is 80" not in "".join(
        found
    )  # 4 heads of 20: a multiple of 16
    assert (
        "a side of mlp.linear_fc1 is 200 on each rank "
        "(megatron.tensor_parallel=1), which is not a multiple of 16" in found[0]
    )
    assert "a side of mlp.linear_fc2 is 100" in found[1]
    # 160 rows of Q, K and V and 40 columns of the projection on each rank
    assert "self_attention.linear_proj is 40" in "".join(broken(tmp_path, *TP2))
    assert broken(tmp_path, "megatron.precision=bf16") == []


def test_experts_are_split_by_their_own_parallel_size(models):
    found = broken(models["qwen3_moe"], *TP2, "megatron.expert_tensor_parallel=8", "megatron.data_parallel=4")
    assert [sentence for sentence in found if "mlp.experts.local_experts.linear_fc2 is 8" in sentence]
    assert "expert_tensor_parallel=8" in found[0]


def test_blocks_do_not_begin_within_a_ranks_part(tmp_path):
    tiny_model(tmp_path, "llama3", hidden_size=192, intermediate_size=256)
    assert broken(tmp_path, "megatron.fp8.recipe=blockwise") == []
    found = broken(tmp_path, "megatron.fp8.recipe=blockwise", *TP2)
    assert "is 192" in found[0]
    assert "not a multiple of 128" in found[0]
    assert broken(tmp_path, "megatron.fp8.recipe=tensorwise", *TP2) == []


def test_layers_in_bf16_are_there(models):
    pipeline = ["megatron.pipeline_parallel=2"]
    assert broken(models["qwen3"], "megatron.fp8.bf16_first_layers=4") == []
    assert broken(models["qwen3"], "megatron.fp8.bf16_first_layers=2", *pipeline) == []
    assert (
        "bf16_last_layers=3, but a pipeline stage has only 2"
        in broken(models["qwen3"], "megatron.fp8.bf16_last_layers=3", *pipeline)[0]
    )

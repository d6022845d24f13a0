"""Settings of Megatron's TransformerConfig that depend on the model's rotary embedding."""

import math

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.megatron.layers.transformer_config import _score_settings
from grpo_megatron.model.families import read_architecture
from tests.models import YARN, tiny_model


def test_yarns_factor_in_the_scores(tmp_path):
    """Query and key are each multiplied by the factor, or the scores by its square."""
    arch = read_architecture(tiny_model(tmp_path / "qwen2", "qwen2"))
    assert arch.rope_factor == pytest.approx(0.1 * math.log(8) + 1)
    scale = _score_settings(arch, transformer_engine=True)["softmax_scale"]
    assert scale == pytest.approx(arch.rope_factor**2 / math.sqrt(arch.head_dim))
    assert _score_settings(arch, transformer_engine=False) == {}


def test_latent_attention_applies_the_factor_itself(tmp_path):
    arch = read_architecture(tiny_model(tmp_path / "deepseek", "deepseek_v3"))
    assert arch.rope_factor != 1
    assert _score_settings(arch, transformer_engine=True) == {}


def test_a_factor_of_a_part_of_the_channels_is_refused(tmp_path):
    rope = YARN | {"rope_type": "yarn", "partial_rotary_factor": 0.5}
    arch = read_architecture(tiny_model(tmp_path / "glm", "glm4_moe", rope_parameters=rope))
    with pytest.raises(UserError, match=r"set megatron\.transformer_impl=local"):
        _score_settings(arch, transformer_engine=True)

"""Language models with a vision model: config.json, names of tensors, exports and arguments of engines."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.schema import ModelConfig
from grpo_megatron.data.conversations import stated_pad_token
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.text_config import text_config
from grpo_megatron.sglang.arguments import engine_arguments, engine_environment
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.hf_writer import copy_companions, copy_vision
from grpo_megatron.weights.stored_names import in_files
from tests.models import tiny_model
from tests.vision_models import vision_model

# {family: prefix of the language model's tensors in files with both}
FAMILIES = {
    "qwen3_5": "model.language_model.",
    "qwen3_5_moe": "model.language_model.",
    "gemma3": "language_model.model.",
}


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request, tmp_path_factory) -> tuple[str, str]:
    """A language model without and with a vision model."""
    alone = tiny_model(tmp_path_factory.mktemp("alone"), request.param, tied=request.param == "gemma3")
    return alone, vision_model(tmp_path_factory.mktemp("both"), request.param)


def changed(folder: str, target: Path, **changes: torch.Tensor | None) -> str:
    """Write a checkpoint with other tensors. None: without the tensor."""
    tensors = load_file(Path(folder, "model.safetensors")) | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, target / "model.safetensors")
    shutil.copy(Path(folder, "config.json"), target)
    return str(target)


def test_the_language_model_is_read_as_if_it_were_alone(folders):
    alone, both = folders
    arch = read_architecture(both)
    assert arch == read_architecture(alone)
    assert stated_pad_token(both) == 0
    theirs, ours = HFCheckpoint(alone), HFCheckpoint(both)
    assert ours.violations(weight_map(arch)) == []
    assert ours.unread(weight_map(arch)) == []
    further = {"mtp.fc.weight"} if arch.delta else set()
    assert ours.names == theirs.names | set(ours.vision) | further
    for name in theirs.names:
        expected = theirs.read(name)
        assert ours.header(name) == (expected.shape, expected.dtype)
        assert torch.equal(ours.read(name), expected), name
        for first, rows in ((0, len(expected)), (len(expected) // 2, len(expected) // 3)):
            found = torch.empty(rows, *expected.shape[1:])
            start = (first, *[0] * (expected.ndim - 1))
            assert torch.equal(ours.read_slice(name, start, found.shape), expected[first : first + rows])
            ours.read_into(name, start, found)
            assert torch.equal(found, expected[first : first + rows]), name
    assert any(f"the {len(ours.vision)} tensors of the vision model are not trained" in n for n in ours.notes)


def test_names_in_the_files():
    prefix = "model.language_model."
    assert in_files("model.norm.weight", prefix) == "model.language_model.norm.weight"
    assert in_files("lm_head.weight", prefix) == "lm_head.weight"
    adapter = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert in_files(adapter, prefix) == adapter.replace("model.layers", "model.language_model.layers")
    assert in_files(adapter, "model.") == adapter
    gemma = "language_model.model."
    assert in_files("model.norm.weight", gemma) == "language_model.model.norm.weight"
    assert in_files(adapter, gemma) == in_files(adapter, prefix)  # transformers names both alike


def test_a_missing_tensor_is_named_as_in_the_files(folders, tmp_path):
    arch = read_architecture(folders[1])
    name = f"{FAMILIES[arch.family]}layers.0.input_layernorm.weight"
    folder = changed(folders[1], tmp_path, **{name: None})
    found = HFCheckpoint(folder).violations(weight_map(arch))
    assert len(found) == 1
    assert f"requires tensors that are missing: {name};" in found[0]


def test_experts_that_lie_otherwise_are_refused(tmp_path):
    """Qwen3-VL's checkpoints have transposed experts."""
    source = vision_model(tmp_path / "source", "qwen3_5_moe")
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    weights = load_file(Path(source, "model.safetensors"))[name]
    (tmp_path / "target").mkdir()
    folder = changed(source, tmp_path / "target", **{name: weights.transpose(1, 2).contiguous()})
    found = HFCheckpoint(folder).violations(weight_map(read_architecture(folder)))
    assert len(found) == 1
    assert (
        "layers.1.mlp.experts.0.gate_proj.weight of shape (32, 80), but config.json requires (40, 64)"
        in found[0]
    )


def test_an_export_keeps_the_vision_model(folders, tmp_path):
    alone, both = folders
    sizes = copy_vision(both, tmp_path / "v" / "vision.safetensors")
    copied, source = (
        load_file(tmp_path / "v" / "vision.safetensors"),
        load_file(Path(both, "model.safetensors")),
    )
    vision = "model.visual.", "vision_tower.", "multi_modal_projector."
    assert set(copied) == set(sizes) == {name for name in source if name.startswith(vision)}
    assert len(copied) > 10
    assert all(torch.equal(copied[name], source[name]) for name in copied)
    assert copy_vision(alone, tmp_path / "none.safetensors") == {}
    assert not (tmp_path / "none.safetensors").exists()


def test_the_exported_config_json(folders, tmp_path):
    config = json.loads(Path(folders[1], "config.json").read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    copy_companions(str(tmp_path), str(tmp_path / "out"), torch.bfloat16)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    text = written["text_config"]
    assert (written["dtype"], text["dtype"], text["mtp_num_hidden_layers"]) == ("bfloat16", "bfloat16", 0)
    assert "torch_dtype" not in text
    assert read_architecture(str(tmp_path / "out")).dtype == torch.bfloat16


def test_engines_leave_out_the_vision_model(folders):
    if read_architecture(folders[0]).family == "gemma3":
        pytest.skip("its engines get the settings of the language model")
    for folder, has_vision in zip(folders, (False, True), strict=True):
        found = engine_arguments(EngineConfig(), ModelConfig(folder), 0, False, gpu=True, routing=False)
        overrides = json.loads(found["json_model_override_args"])
        assert overrides.get("language_model_only", False) == has_vision
        settings = overrides["text_config"] if has_vision else overrides
        assert set(settings) == {"full_attention_interval", "partial_rotary_factor", "rope_theta"}


def test_engines_take_gemma_3_for_its_language_model(tmp_path):
    folder = vision_model(tmp_path, "gemma3")
    found = engine_arguments(EngineConfig(), ModelConfig(folder), 0, False, gpu=True, routing=False)
    settings = json.loads(found["json_model_override_args"])
    assert found["enable_multimodal"] is False
    environment = engine_environment(EngineConfig(), gpu=True, model=folder)
    assert environment["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "grpo_megatron.sglang.models"
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE" not in engine_environment(EngineConfig(), gpu=True)
    assert settings["architectures"] == ["Gemma3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_architecture(str(tmp_path)) == read_architecture(folder)


def test_settings_of_both_models_may_be_outside_of_text_config():
    config = {"dtype": "bfloat16", "eos_token_id": [1, 106], "text_config": {"eos_token_id": None, "a": 1}}
    found = text_config(config)
    assert (found["dtype"], found["eos_token_id"], found["a"]) == ("bfloat16", [1, 106], 1)
    config["text_config"]["eos_token_id"] = 3
    assert text_config(config)["eos_token_id"] == 3


def test_text_config_must_be_an_object():
    assert text_config({"hidden_size": 3}) == {"hidden_size": 3}
    with pytest.raises(UserError, match="text_config must be an object, but is of type list"):
        text_config({"text_config": []})

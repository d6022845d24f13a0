"""Conversion of checkpoints with a vision model, which Megatron's files do not contain."""

import json

import pytest
import torch

from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.integration.test_conversion import tool
from tests.vision_models import vision_model

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "gemma3"])
def test_a_vision_model_is_kept(tmp_path, family):
    source = vision_model(tmp_path / "source", family)
    tool("convert_hf_to_megatron", source, tmp_path / "megatron")
    assert "within the bound" in tool("verify_checkpoint", source, tmp_path / "megatron")[0]
    said = tool("inspect_checkpoint", source, tmp_path / "megatron", status=1)[0]
    # Megatron's files lack the vision model and the layer of later tokens, and have three tensors per expert.
    only = [line for line in said.splitlines() if ".mlp.experts." not in line]
    assert only
    further = "model.visual.", "mtp.", "vision_tower.", "multi_modal_projector."
    assert all(line.startswith(further) and ": only in " in line for line in only)
    tool("convert_megatron_to_hf", tmp_path / "megatron", tmp_path / "hf")
    original, written = HFCheckpoint(source), HFCheckpoint(str(tmp_path / "hf"))
    assert written.names == original.names - set(original.left_out)
    assert len(written.vision) > 10
    assert all(torch.equal(written.read(name), original.read(name)) for name in written.names)
    files = {path: HFCheckpoint(path, raw=True) for path in (source, str(tmp_path / "hf"))}
    names = [{name for name in one.names if not name.startswith("mtp.")} for one in files.values()]
    assert names[0] == names[1]  # in the files, too: all experts of a layer are in one tensor
    assert any(".mlp.experts.gate_up_proj" in name for name in names[1]) == (family == "qwen3_5_moe")
    assert "grpo_megatron" not in (tmp_path / "hf" / "config.json").read_text()
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        path.name for path in (tmp_path / "hf").glob("*.safetensors")
    }

"""FP8 in blocks, and layers of a checkpoint that are left out on purpose."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights import hf_writer
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.stored import Dequantised, dequantised, scales_box, scales_shape
from tests.models import tiny_model

BLOCK = (3, 4)
NAME = "model.layers.1.self_attn.kv_b_proj.weight"


def test_each_element_times_the_scale_of_its_block():
    values = torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]).to(
        torch.float8_e4m3fn
    )
    scales = torch.tensor([[1.0, 10.0], [100.0, 0.5]])
    expected = torch.tensor([[1.0, 2, 3, 4, 50]] * 3 + [[100, 200, 300, 400, 2.5]])
    assert scales_shape((4, 5), BLOCK) == (2, 2)
    assert torch.equal(dequantised(values, scales, (0, 0), BLOCK), expected)


def test_slices_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(11, 14, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(scales_shape((11, 14), BLOCK), generator=generator)
    whole = dequantised(values, scales, (0, 0), BLOCK)
    for start, shape in [
        ((0, 0), (11, 14)),
        ((2, 3), (1, 2)),
        ((5, 7), (6, 7)),
        ((3, 4), (3, 4)),
        ((10, 13), (1, 1)),
    ]:
        (row, column), (rows, columns) = scales_box(start, shape, BLOCK)
        part = values[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]]
        found = dequantised(part, scales[row : row + rows, column : column + columns], start, BLOCK)
        assert torch.equal(found, whole[start[0] : start[0] + shape[0], start[1] : start[1] + shape[1]])


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "deepseek_v3")


def changed(original, folder, change, **settings) -> tuple[HFCheckpoint, list[str]]:
    """Return a copy whose tensors `change` has changed, and its violations.

    settings: changes to its config.json.
    """
    tensors, config = (
        load_file(f"{original}/model.safetensors"),
        json.loads(Path(original, "config.json").read_text()),
    )
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | settings))
    checkpoint = HFCheckpoint(str(folder))
    return checkpoint, checkpoint.violations(weight_map(read_architecture(str(folder))))


def quantised(tensors):
    tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)
    tensors[NAME + "_scale_inv"] = torch.full(scales_shape(tensors[NAME].shape, BLOCK), 2.0)


FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(BLOCK)}}


def test_fp8_is_read_as_its_values(original, tmp_path):
    checkpoint, violations = changed(original, tmp_path, quantised, **FP8)
    assert violations == []
    values = load_file(tmp_path / "model.safetensors")[NAME].float() * 2
    assert torch.equal(checkpoint.read(NAME), values)
    assert torch.equal(checkpoint.read_slice(NAME, (5, 6), (7, 8)), values[5:12, 6:14])


@pytest.mark.parametrize(
    ("change", "settings", "says"),
    [
        (
            lambda t: t.pop(NAME + "_scale_inv"),
            FP8,
            f"{NAME} of type F8_E4M3, but not its scales {NAME}_scale_inv",
        ),
        (lambda t: t.update({NAME + "_scale_inv": torch.ones(2, 2)}), FP8, "but F32 and"),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
            FP8,
            "only matrices",
        ),
        (lambda t: None, {}, "if config.json has a quantization_config.weight_block_size"),
        (
            lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}),
            FP8,
            "describes a model without these tensors: model.norm.weight_scale_inv",
        ),
    ],
)
def test_fp8_that_means_nothing(original, tmp_path, change, settings, says):
    def changes(tensors):
        quantised(tensors)
        change(tensors)

    _, violations = changed(original, tmp_path, changes, **settings)
    assert any(says in violation for violation in violations)


def test_layers_that_predict_further_tokens_are_left_out_and_named(original, tmp_path):
    def further(tensors):
        tensors["model.layers.4.eh_proj.weight"] = torch.ones(2, 2)

    checkpoint, violations = changed(original, tmp_path, further)
    assert violations == []
    assert checkpoint.left_out == ["model.layers.4.eh_proj.weight"]
    (note,) = checkpoint.notes
    assert "model.layers.4.*" in note
    assert (
        "the 1 tensors model.layers.4.* belong to multi-token prediction layers; they are neither trained"
        in note
    )
    assert HFCheckpoint(original).notes == []
    _, violations = changed(original, tmp_path, further, num_nextn_predict_layers=0)
    assert "describes a model without these tensors: model.layers.4.eh_proj.weight" in violations[0]


def test_an_export_can_be_read_by_whom_other_files_can(tmp_path):
    """The safetensors library makes files that only their owner can read, so that no other user could
    serve an export.
    """
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.tensor(2.0),
        "d": torch.zeros(0, 3),
        "e": torch.randn(4, 2).T,
    }
    writer = hf_writer.HFWriter(str(tmp_path / "hf"), "0")
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    ((name, _),) = writer.close()
    (tmp_path / "plain").touch()
    assert (tmp_path / "hf" / name).stat().st_mode == (tmp_path / "plain").stat().st_mode
    read = load_file(tmp_path / "hf" / name)
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[key], tensors[key]) and read[key].dtype == tensors[key].dtype for key in tensors
    )


def test_an_export_is_on_the_disk_before_it_is_in_place(tmp_path, monkeypatch):
    """A folder with the final name must be complete after the loss of a node: shards, index, companions,
    names.
    """
    final, synced, fsync = tmp_path / "hf", [], os.fsync

    def noted(descriptor):
        synced.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, final.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    partial = str(final) + ".partial"
    hf_writer.start(partial, str(final), "elsewhere")
    writer = hf_writer.HFWriter(partial, "0", max_shard_bytes=8)
    for name in ("a", "b"):
        writer.add(name, torch.zeros(2))
    shards = writer.close()
    parts = [name for name, _ in shards]
    assert [name for name, _ in synced] == parts  # by the node that has written them
    Path(partial, "adapter").mkdir()
    Path(partial, "adapter", "adapter_config.json").write_text("{}")
    hf_writer.finish(partial, shards, str(final))
    written = {path.name for path in final.rglob("*")}
    assert len(parts) == 2
    assert written | {"hf.partial"} <= {name for name, in_place in synced if not in_place}
    assert synced[-1] == (tmp_path.name, True)


def test_an_engine_with_an_fp8_checkpoint_has_the_values_of_the_trainer():
    """Experts are stacked. A block at the end may be smaller."""
    matrix, scales = torch.randn(40, 24).to(torch.float8_e4m3fn), torch.rand(3, 2)
    expected = dequantised(matrix, scales, (0, 0), (16, 16)).bfloat16()
    embedding = torch.ones(3, 2, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": embedding,
        "a.weight": matrix,
        "a.weight_scale_inv": scales,
        "mlp.experts.w13_weight": torch.stack([matrix.view(torch.uint8)] * 2).view(torch.float8_e4m3fn),
        "mlp.experts.w13_weight_scale_inv": torch.stack([scales, 2 * scales]),
    }
    found = Dequantised(weights, (16, 16))
    assert list(found) == ["model.embed_tokens.weight", "a.weight", "mlp.experts.w13_weight"]
    assert found["model.embed_tokens.weight"] is embedding
    assert found["a.weight"].dtype == torch.bfloat16
    assert torch.equal(found["a.weight"], expected)
    assert torch.equal(found["mlp.experts.w13_weight"], torch.stack([expected, 2 * expected]))
    assert found["a.weight"] is found["a.weight"]

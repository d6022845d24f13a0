"""The folders that conversions and exports write: on read-only sources, without locks, beside each other."""

import errno
import fcntl
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.conversion.gguf_to_hf import gguf_to_hf
from grpo_megatron.conversion.partial_folder import PartialFolder
from grpo_megatron.errors import UserError
from grpo_megatron.megatron import trained_model
from grpo_megatron.weights import hf_writer


def test_files_of_a_read_only_model_can_be_changed_in_its_export(tmp_path):
    """A user who is not root could not write config.json, after the whole training."""
    source = tmp_path / "model"
    source.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (source / name).write_text('{"a": 1}')
        (source / name).chmod(0o444)
    hf_writer.copy_companions(str(source), str(tmp_path / "out"), torch.bfloat16, {"b": 2})
    assert {path.name: path.stat().st_mode & 0o200 for path in (tmp_path / "out").iterdir()} == {
        "config.json": 0o200,
        "tokenizer.json": 0o200,
    }


def test_an_export_has_the_code_that_its_config_names(tmp_path):
    """Kimi-K2's config.json names a Python file, without which other programs could not read the export."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text('{"auto_map": {"AutoConfig": "configuration_deepseek.Config"}}')
    (source / "configuration_deepseek.py").write_text("class Config: ...")
    hf_writer.copy_companions(str(source), str(tmp_path / "out"), torch.bfloat16)
    assert (tmp_path / "out" / "configuration_deepseek.py").read_text() == "class Config: ..."


def test_without_locks_a_conversion_goes_on_and_says_so(tmp_path, monkeypatch, caplog):
    def none(file, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    PartialFolder(str(tmp_path / "out"), {})
    assert "does not support locks (Function not implemented)" in caplog.text


def test_an_unfinished_conversion_is_not_deleted_by_another_tool(tmp_path):
    first = PartialFolder(str(tmp_path / "out"), {})
    with pytest.raises(UserError, match=r"out\.partial belongs to a conversion that has not finished"):
        gguf_to_hf(str(tmp_path / "model.gguf"), str(tmp_path / "out"), torch.bfloat16)
    assert first.result.exists()


def test_ranks_whose_machines_would_give_them_other_layers_are_refused(monkeypatch):
    answers = [True, True, False, True]

    def gather(found, own):
        assert own is True
        found[:] = answers

    stand_in = SimpleNamespace(get_world_size=lambda: 4, all_gather_object=gather)
    monkeypatch.setattr(trained_model, "dist", stand_in)
    with pytest.raises(UserError, match=r"the machines of ranks 2 cannot run TransformerEngine"):
        trained_model._same_on_all_ranks(True)
    answers[2] = True
    assert trained_model._same_on_all_ranks(True)

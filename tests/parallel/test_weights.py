"""HF -> Megatron -> HF, and the tensors that ranks export, bit for bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.config.schema import OptimizerConfig, Precision
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config, sizes_of
from tests.models import tiny_qwen3
from tests.parallel import actors

LAYOUTS = {
    "tp1": ParallelSizes(),
    "tp2": ParallelSizes(tp=2),
    "pp2": ParallelSizes(pp=2),
    "tp2pp2": ParallelSizes(tp=2, pp=2),
}


def read_all(folder) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_identical(ours, original):
    assert ours.keys() == original.keys()
    for name, tensor in original.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.slow_when(lambda layout, tied: layout != ("tp2pp2" if tied else "tp2"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_round_trip_is_bit_identical(ranks, tmp_path, layout, tied):
    # 61 words: TP 2 does not divide the vocabulary
    model = tiny_qwen3(tmp_path / "model", tied=tied)
    config = actor_config(model, LAYOUTS[layout], OptimizerConfig())
    ranks.run(actors.round_trip, sizes_of(config), config, str(tmp_path / "out"), None)
    assert_identical(read_all(tmp_path / "out"), read_all(model))
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_round_trip_of_bf16_weights_trained_in_fp32(ranks, tmp_path):
    model = tiny_qwen3(tmp_path / "model", dtype=torch.bfloat16)
    config = actor_config(model, ParallelSizes(tp=2), OptimizerConfig(), Precision.fp32)
    ranks.run(actors.round_trip, sizes_of(config), config, str(tmp_path / "out"), torch.bfloat16)
    assert_identical(read_all(tmp_path / "out"), read_all(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_exported_by_one_rank(ranks, tmp_path, layout):
    model = tiny_qwen3(tmp_path)
    config = actor_config(model, LAYOUTS[layout], OptimizerConfig())
    per_rank = ranks.run(actors.exported_tensors, sizes_of(config), config)
    names = [name for sent in per_rank for name in sent]
    assert len(names) == len(set(names))
    assert_identical({name: tensor for sent in per_rank for name, tensor in sent.items()}, read_all(model))

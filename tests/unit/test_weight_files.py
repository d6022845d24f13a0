"""Files of a model folder that are read: one complete set of trainable weights, or a refusal with advice."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.models import tiny_model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


@pytest.fixture
def model(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "model"))


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder, change) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / SINGLE,
        metadata={"format": "pt"},
    )


def shard(folder) -> None:
    """Replace the single file by two shards and an index."""
    tensors, where = load_file(folder / SINGLE), {}
    (folder / SINGLE).unlink()
    for number, names in enumerate((sorted(tensors)[:5], sorted(tensors)[5:]), 1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file({key: tensors[key] for key in names}, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(names, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def violations(folder) -> list[str]:
    return HFCheckpoint(str(folder)).violations(weight_map(read_architecture(str(folder))))


# Tied embeddings


def tie(tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


HEADS = {
    "another": (lambda t: None, False),
    "the same": (tie, True),
    "the same in float64": (lambda t: t.update({HEAD: t[EMBEDDING].double()}), True),
    "the same in bf16, embedding in float32": (lambda t: t.update({HEAD: t[EMBEDDING].bfloat16()}), True),
    "the same in float32, embedding in bf16": (
        lambda t: t.update({HEAD: t[EMBEDDING].bfloat16().float(), EMBEDDING: t[EMBEDDING].bfloat16()}),
        True,
    ),
    "trained a little": (lambda t: (tie(t), t[HEAD][60].add_(1e-6)), False),
    "other shape": (lambda t: t.update({HEAD: t[EMBEDDING][:60].clone()}), False),
    "zeros": (lambda t: t.update({HEAD: torch.zeros_like(t[EMBEDDING])}), False),
    "integers": (lambda t: t.update({HEAD: t[EMBEDDING].to(torch.int8)}), False),
    "none": (lambda t: t.pop(HEAD), True),
}


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("name", HEADS)
def test_an_output_layer_beside_a_tied_embedding_is_compared(name, sharded, model):
    """A fine-tuned output layer used to be dropped silently if config.json says tied, in training and in
    conversion.
    """
    change, fits = HEADS[name]
    change_tensors(model, change)
    if sharded:
        shard(model)
    change_config(model, tie_word_embeddings=True)
    found = violations(model)
    assert len(found) == (0 if fits else 1)
    assert fits or f"{HEAD} differs from {EMBEDDING}" in found[0]
    assert fits or "set tie_word_embeddings: false" in found[0]


def test_the_converter_refuses_another_output_layer(model, tmp_path):
    change_config(model, tie_word_embeddings=True)
    with pytest.raises(UserError, match=f"{HEAD} differs from {EMBEDDING}"):
        hf_to_megatron(str(model), str(tmp_path / "megatron"), 1)


def test_a_quantised_output_layer_is_no_tied_one(model):
    """An FP8 output layer is compared by its values, scales included."""
    change_config(
        model,
        tie_word_embeddings=True,
        quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]},
    )

    def quantised(tensors, scale):
        tensors[EMBEDDING] = tensors[EMBEDDING].to(torch.float8_e4m3fn).float()
        tensors[HEAD] = tensors[EMBEDDING].to(torch.float8_e4m3fn)
        tensors[HEAD + "_scale_inv"] = torch.full((2, 2), scale)

    change_tensors(model, lambda t: quantised(t, 1.0))
    assert violations(model) == []
    change_tensors(model, lambda t: quantised(t, 2.0))
    assert f"{HEAD} differs from {EMBEDDING}" in violations(model)[0]


def test_a_missing_output_layer_says_how_to_tie(model):
    change_tensors(model, lambda t: t.pop(HEAD))
    assert "missing: lm_head.weight" in violations(model)[0]
    assert "set tie_word_embeddings: true" in violations(model)[0]


def test_a_reward_model_needs_no_output_layer(model):
    """The language model that it starts from may have one, tied or not."""
    arch = read_architecture(str(model), reward_model=True)
    entries = {name: entry for name, entry in weight_map(arch).items() if entry.hf != ("score.weight",)}
    assert HFCheckpoint(str(model)).violations(entries) == []


# Several sets of weights


def copy_aside(folder, name: str) -> None:
    shutil.copy(folder / SINGLE, folder / name)


def with_index_beside(folder) -> None:
    copy_aside(folder, "kept")
    shard(folder)
    (folder / "kept").rename(folder / SINGLE)


def stale_index(folder) -> None:
    with_index_beside(folder)
    for path in folder.glob("model-*"):
        path.unlink()


def no_index(folder) -> None:
    shard(folder)
    (folder / INDEX).unlink()


CONFLICTS = {
    "index and shards beside one file": (
        with_index_beside,
        "contains two sets of weights: model.safetensors and the 2 files",
    ),
    "index without its shards": (
        stale_index,
        "the index lists files that are missing",
    ),
    "a shard of an earlier export": (
        lambda f: copy_aside(f, "model-00001-of-00003.safetensors"),
        "model.safetensors and model-00001-of-00003.safetensors have the same tensors",
    ),
    "another variant": (
        lambda f: copy_aside(f, "model.fp16.safetensors"),
        "model.safetensors and model.fp16.safetensors have",
    ),
    "shards without an index": (no_index, f"model-00002-of-00002.safetensors but not {INDEX}"),
    "damaged second file": (
        lambda f: (f / "model.ema.safetensors").write_bytes(b"x"),
        "model.ema.safetensors cannot be read",
    ),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_two_sets_of_weights_are_refused(name, model):
    """An index beside a newer file used to win in training, while transformers read the other one."""
    change, says = CONFLICTS[name]
    change(model)
    with pytest.raises(UserError, match=says):
        HFCheckpoint(str(model))


def consolidated(folder) -> None:
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")


def sharded_beside(folder, name: str) -> None:
    copy_aside(folder, name)
    shard(folder)


BESIDE = {
    "pickle beside one file": (
        lambda f: (f / "pytorch_model.bin").touch(),
        "from model.safetensors, not from pytorch_model.bin",
    ),
    "pickles beside shards": (
        lambda f: (shard(f), (f / "pytorch_model-00001-of-00002.bin").touch()),
        f"from the 2 files that {INDEX} lists, not from pytorch_model-00001-of-00002.bin",
    ),
    "Mistral's own names": (consolidated, "not from consolidated.safetensors"),
    "Mistral's own names beside shards": (
        lambda f: (consolidated(f), shard(f)),
        "not from consolidated.safetensors",
    ),
    "a shard that the index does not name": (
        lambda f: sharded_beside(f, "model-00001-of-00009.safetensors"),
        "not from model-00001-of-00009.safetensors",
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_is_not_read_is_said(name, model):
    change, says = BESIDE[name]
    change(model)
    (note,) = HFCheckpoint(str(model)).notes
    assert note.startswith(f"{model}: ")
    assert says in note


def test_one_set_needs_no_words(model):
    (model / "training_args.bin").touch()
    assert HFCheckpoint(str(model)).notes == []
    (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(model / SINGLE), SINGLE)}))
    assert HFCheckpoint(str(model)).notes == []
    (model / INDEX).unlink()
    shard(model)
    assert HFCheckpoint(str(model)).notes == []


# Quantised weights

QUANTISED = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "with awq and cannot"),
    ({"quant_method": "gptq", "bits": 4, "desc_act": False}, "with gptq and cannot"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        r"with bitsandbytes and .*dequantize\(\).save_pretrained",
    ),
    ({"load_in_8bit": True, "llm_int8_threshold": 6.0}, "with bitsandbytes and cannot"),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        r"with compressed-tensors \(float-quantized\) and cannot",
    ),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "with fp8 and cannot"),
    ({"quant_method": "fbgemm_fp8"}, "with fbgemm_fp8 and cannot"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": []}, "with mxfp4 and cannot"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, r"with modelopt \(NVFP4\) and cannot"),
    ({"quant_method": "gptq", "weight_block_size": [128, 128]}, "with gptq and cannot"),
    ({"quant_method": "of tomorrow"}, "with of tomorrow and cannot"),
    ({"bits": 4}, "with an unnamed method and cannot"),
]


@pytest.mark.parametrize(
    ("settings", "says"), QUANTISED, ids=[str(settings)[:50] for settings, _ in QUANTISED]
)
def test_a_quantised_checkpoint_is_refused_by_its_method(settings, says, model):
    """Users saw lists of tensor names such as qweight and weight_packed, without the method's name."""
    change_config(model, quantization_config=settings)
    with pytest.raises(UserError, match=says) as caught:
        HFCheckpoint(str(model))
    assert "use the original checkpoint in bf16 or fp16" in str(caught.value)
    assert str(model / "config.json") in str(caught.value)
    HFCheckpoint(str(model), raw=True)  # tools/inspect_checkpoint.py lists it


def test_other_places_where_quantising_is_described(model):
    change_config(
        model, compression_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}
    )
    with pytest.raises(UserError, match=r"with compressed-tensors \(pack-quantized\)"):
        HFCheckpoint(str(model))
    change_config(model, compression_config=None)
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(UserError, match=r"with modelopt \(FP8\)"):
        HFCheckpoint(str(model))

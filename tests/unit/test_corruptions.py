"""Hundreds of damaged configurations and model folders.

Each is legal or refused at once by one message, without a traceback.
"""

import json
import os
import struct
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.cli import main
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.models import ALL_FAMILIES, tiny_model
from tests.unit.corruption import corrupt

SECONDS = 60.0  # a machine with other things to do may take twenty for what takes a tenth
PER_BATCH = 20


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model with a tokenizer, and matching data."""
    from make_tiny_model import make

    root = tmp_path_factory.mktemp("files")
    make(root / "model", hidden=64, ffn=128, seed=0)
    (root / "train.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
    )
    return root


def settings(root) -> list[str]:
    train = f"data.train={root}/train.jsonl"
    return [f"model.path={root}/model", train, "data.max_prompt_length=64", "rollout.max_response_length=64"]


@pytest.fixture(scope="module")
def texts(files):
    """Legal files: one with few keys, and one with every key."""
    short = files / "short.yaml"
    with open("configs/quickstart.yaml", encoding="utf-8") as quickstart:
        text = quickstart.read().replace("runs/quickstart_sft/hf", f"{files}/model")
    for name in ("train", "eval"):
        text = text.replace(f"runs/quickstart_data/{name}.jsonl", f"{files}/train.jsonl")
    short.write_text(text)
    from grpo_megatron.preflight.show import show

    return [text, show(str(short), [])]


def answer(capsys, *arguments: str) -> tuple[int, str]:
    """Return (exit status, output). Asserts that it is one message, at once."""
    capsys.readouterr()
    started = time.process_time()  # other processes of a busy machine are not what is measured
    status = main(list(arguments))
    seconds = time.process_time() - started
    out, err = capsys.readouterr()
    assert status in (0, 2)
    assert seconds < SECONDS
    assert "Traceback" not in out + err
    if status == 2:
        assert out == ""
        assert err.startswith("error: ") != ("violation" in err and "\n  - " in err)
        assert len(err) < 8000
    return status, out + err


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(25))
def test_a_damaged_configuration_is_legal_or_refused(batch, texts, capsys, tmp_path):
    assert [
        answer(capsys, "config", "check", "--config", _written(tmp_path, text.encode()))[0] for text in texts
    ] == [0, 0]
    refused = []
    for seed in range(batch * PER_BATCH, (batch + 1) * PER_BATCH):
        damaged = corrupt(texts[seed % len(texts)], seed)
        path = _written(tmp_path, damaged.text)
        try:
            status, _ = answer(capsys, "config", "check", "--config", path, "--", *damaged.arguments)
            shown, _ = answer(capsys, "config", "show", "--config", path, "--", *damaged.arguments)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {damaged.how} {damaged.arguments}: {error!r}") from error
        assert shown <= status, f"seed {seed}: what check takes, show can show"
        refused.append(status == 2)
    assert sum(refused) > 0.4 * PER_BATCH


def _written(folder, text: bytes) -> str:
    (folder / "c.yaml").write_bytes(text)
    return str(folder / "c.yaml")


# Model folders


@pytest.fixture
def model(files, tmp_path):
    """A copy of the model whose files can be damaged. The data beside it stay intact."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (files / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def check(capsys, files, folder, *changes: str) -> tuple[int, str]:
    return answer(capsys, "config", "check", *settings(files), f"model.path={folder}", *changes)


def change_config(folder, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 1.0,
}
CONFIG = [
    *(
        ({key: None}, f"key {key} is missing")
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ),
    *(
        ({key: None}, f"key {key} is missing")
        for key in ("intermediate_size", "max_position_embeddings", "rms_norm_eps")
    ),
    *(
        ({"hidden_size": bad}, "hidden_size must be an integer from 1")
        for bad in ("64", -64, 0, 64.0, True, [], {}, 10**30)
    ),
    *(
        ({"rms_norm_eps": bad}, "rms_norm_eps must be a finite number")
        for bad in ("x", 0, float("nan"), float("inf"))
    ),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to"),
    ({"num_hidden_layers": 9000, "layer_types": None}, "requires at least 9000 tensors"),
    ({"num_hidden_layers": 3, "layer_types": None}, "model.layers.2.input_layernorm.weight"),
    (
        {"num_hidden_layers": 1, "layer_types": None},
        "describes a model without these tensors: model.layers.1.",
    ),
    ({"num_key_value_heads": 3}, "num_attention_heads=4 is not divisible by num_key_value_heads=3"),
    ({"head_dim": 15}, "must be even"),
    (
        {"head_dim": 32},
        "model.layers.0.self_attn.q_proj.weight of shape (64, 64), but config.json requires (128, 64)",
    ),
    (
        {"head_dim": None, "num_attention_heads": 6},
        "hidden_size=64 is not divisible by num_attention_heads=6",
    ),
    ({"vocab_size": 30}, "model.embed_tokens.weight of shape (31, 64), but config.json requires (30, 64)"),
    ({"intermediate_size": 64}, "mlp.gate_proj.weight of shape (128, 64), but config.json requires (64, 64)"),
    ({"rope_parameters": None, "rope_theta": None}, "key rope_theta is missing"),
    ({"rope_parameters": [1]}, "rope_parameters must be an object"),
    ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta must be"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": 5}}, "rope_parameters.rope_type must be text"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "key rope_parameters.factor is missing"),
    ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "ntk"}}, "'ntk' is not supported"),
    ({"rope_parameters": {**LLAMA3, "factor": None}}, "key rope_parameters.factor is missing"),
    (
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8}},
        "rope_parameters: low_freq_factor must be less",
    ),
    ({"dtype": "int4"}, "dtype 'int4' is not supported"),
    ({"dtype": ["float32"]}, "dtype must be text"),
    ({"architectures": "Qwen3ForCausalLM"}, "architectures must be a list"),
    ({"architectures": [["x"]]}, "architectures must be a list"),
    ({"architectures": []}, "the architecture (none) is not supported"),
    (
        {"architectures": ["GptOssForCausalLM"]},
        "GptOssForCausalLM is not supported, because it has attention sinks",
    ),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    ({"attention_bias": True}, "attention_bias=true"),
    ({"hidden_act": {"a": 1}}, "hidden_act must be text"),
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "key num_local_experts is missing"),
    (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
        "num_experts_per_tok=3 must be at most the number of experts, 2",
    ),
    (
        {"architectures": ["Qwen2ForCausalLM"]},
        "tensors that are missing: model.layers.0.self_attn.q_proj.bias",
    ),
]


@pytest.mark.slow_but(8)
@pytest.mark.parametrize(("changes", "said"), CONFIG, ids=[str(changes)[:60] for changes, _ in CONFIG])
def test_a_wrong_config_json(changes, said, capsys, files, model):
    change_config(model, **changes)
    status, text = check(capsys, files, model)
    assert status == 2
    assert str(model) in text
    assert said in text


NO_JSON = [
    b"",
    b"[]",
    b'"x"',
    b"5",
    b'{"a": ',
    b"\xff\x00",
    b"[" * 10**5,
    b'{"a": ' * 10**4,
    b'{"n": ' + b"9" * 10**4 + b"}",
]


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("raw", NO_JSON, ids=range(len(NO_JSON)))
def test_a_file_that_is_no_json_object(name, raw, capsys, files, model):
    (model / name).write_bytes(raw)
    status, text = check(capsys, files, model)
    assert status == 2
    assert f"{model / name} is not valid JSON" in text or f"{model / name}: expected a JSON object" in text


def write_index(folder, weight_map) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_wrong_index(capsys, files, model):
    names = list(load_file(model / "model.safetensors"))
    right = dict.fromkeys(names, "model.safetensors")
    (model / "text.safetensors").write_text("no tensors")
    (model / "folder").mkdir()
    for promised, said in (
        (None, "weight_map must be an object"),
        ([1], "weight_map must be an object"),
        ({**right, names[0]: 5}, f"weight_map.{names[0]} must be a file name, but is 5"),
        ({**right, names[0]: "gone.safetensors"}, "lists files that are missing (gone.safetensors)"),
        ({**right, names[0]: "text.safetensors"}, "text.safetensors cannot be read"),
        ({**right, names[0]: "folder"}, "folder is a folder, not a file"),
        ({**right, names[0]: "a\0b"}, "is not a valid path"),
        ({**right, "extra.weight": "model.safetensors"}, "tensor extra.weight is missing, although"),
        ({}, "tensor"),
    ):
        write_index(model, promised)
        status, text = check(capsys, files, model)
        assert (status, said in text) == (2, True), text
    write_index(model, right)
    assert check(capsys, files, model)[0] == 0


def change_tensors(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"
TENSORS = [
    (lambda t: t.pop(Q), f"config.json requires tensors that are missing: {Q}"),
    (lambda t: t.clear(), "requires at least 2 tensors, but it has 0"),
    (lambda t: t.update(extra=torch.zeros(1)), "describes a model without these tensors: extra"),
    (lambda t: t.update({DOWN: t[DOWN].T}), f"{DOWN} of shape (128, 64), but config.json requires (64, 128)"),
    (lambda t: t.update({Q: t[Q].flatten()}), f"{Q} of shape (4096,), but config.json requires (64, 64)"),
    (lambda t: t.update({Q: t[Q][:0]}), f"{Q} of shape (0, 64)"),
    (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q} of type I8; only F64, F32, F16, BF16 can be loaded"),
    (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} of type F8_E4M3; only"),
    (lambda t: t.update({Q: t[Q] > 0}), f"{Q} of type BOOL; only"),
]


@pytest.mark.parametrize(("change", "said"), TENSORS, ids=[said[:40] for _, said in TENSORS])
def test_wrong_tensors(change, said, capsys, files, model):
    change_tensors(model, change)
    status, text = check(capsys, files, model)
    assert status == 2
    assert str(model) in text
    assert said in text


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    "change",
    [
        lambda raw: b"",
        lambda raw: raw[:7],
        lambda raw: raw[:1000],
        lambda raw: raw[:-100],
        lambda raw: raw + b"x",
        lambda raw: struct.pack("<Q", 2**62) + raw[8:],
        lambda raw: raw[:8] + b"[" + raw[9:],
        lambda raw: raw[:8] + b"\xff" * 20 + raw[28:],
        lambda raw: raw.replace(b'"F32"', b'"F33"', 1),
        lambda raw: raw.replace(b'"shape":[', b'"shape":{', 1),
        lambda raw: raw.replace(b"data_offsets", b"data_offsetz", 1),
    ],
)
def test_a_file_that_is_not_safetensors(change, capsys, files, model):
    path = model / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    status, text = check(capsys, files, model)
    assert status == 2
    assert f"{path} cannot be read" in text


def test_things_of_a_wrong_kind_in_place_of_a_file(capsys, files, model):
    for name in ("config.json", "model.safetensors"):
        whole = (model / name).read_bytes()
        (model / name).unlink()
        assert name in check(capsys, files, model)[1]
        (model / name).mkdir()
        assert f"{model / name} is a folder, not a file" in check(capsys, files, model)[1]
        (model / name).rmdir()
        (model / name).symlink_to("nowhere")
        assert f"{model / name} is a broken symbolic link" in check(capsys, files, model)[1]
        (model / name).unlink()
        os.mkfifo(model / name)
        assert f"{model / name} is not a regular file" in check(capsys, files, model)[1]
        (model / name).unlink()
        (model / name).write_bytes(whole)
    assert check(capsys, files, model)[0] == 0


def test_what_some_tools_add_is_tolerated(capsys, files, model):
    change_tensors(model, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    change_tensors(
        model,
        lambda t: t.update(
            {Q: t[Q].bfloat16(), DOWN: t[DOWN].half(), "lm_head.weight": t["lm_head.weight"].double()}
        ),
    )
    assert check(capsys, files, model)[0] == 0
    change_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].double()}))
    change_config(model, tie_word_embeddings=True)
    assert check(capsys, files, model)[0] == 0


def test_the_reference_is_checked_too(capsys, files, model):
    change_tensors(model, lambda t: t.pop(Q))
    status, text = check(capsys, files, files / "model", f"ref.path={model}", "algorithm.use_kl_loss=true")
    assert (status, f"{model}: config.json requires tensors that are missing: {Q}" in text) == (2, True)
    text = check(capsys, files, files / "model", f"ref.path={model}/config.json")[1]
    assert f"ref.path: {model}/config.json is a file, not a folder" in text
    status, text = check(capsys, files, files / "model", f"ref.path={model}", "--for", "sft")
    assert str(model) not in text


def test_all_is_reported_together(capsys, files, model):
    change_tensors(model, lambda t: t.pop(Q))
    status, text = check(
        capsys,
        files,
        model,
        "megatron.tensor_parallel=3",
        "optimizer.lr=-1",
        "rollout.n=four",
        "data.eval=/tmp",
        "run.resume=README.md",
    )
    assert status == 2
    for said in (
        Q,
        "megatron.tensor_parallel must divide the model's attention heads",
        "optimizer.lr",
        "four",
        "/tmp is a folder",
        "README.md is a file",
    ):
        assert said in text


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", list(ALL_FAMILIES))
def test_the_map_promises_the_shapes_that_transformers_writes(family, tied, tmp_path):
    folder = tiny_model(tmp_path, family, tied)
    arch, checkpoint = read_architecture(folder), HFCheckpoint(folder)
    entries = weight_map(arch)
    assert checkpoint.violations(entries) == []
    assert {name: tuple(checkpoint.read(name).shape) for name in checkpoint.names} == hf_shapes(entries)

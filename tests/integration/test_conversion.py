"""HF -> Megatron -> HF by the tools: the same bits, also after interruptions.

Damaged or pickled files are refused.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.conversion import units
from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron
from grpo_megatron.conversion.megatron_to_hf import megatron_to_hf
from grpo_megatron.errors import UserError
from grpo_megatron.files import new_file
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.models import ALL_FAMILIES, FAMILIES, tiny_model
from tests.parallel import converted
from tests.parallel.test_weights import assert_identical, read_all
from tests.tools import run_tool


def tool(name, *arguments, status=0):
    """Run a tool within this process, because several would each import torch."""
    return run_tool(name, *arguments, "--processes", 1, status=status)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture
def small_files(monkeypatch):
    """Make checkpoints of some hundred kilobytes have several files, and buckets smaller than tensors."""
    monkeypatch.setattr(units, "_LEAST", 100_000)
    for module in ("hf_to_megatron", "megatron_to_hf", "listing", "verify"):
        monkeypatch.setattr(f"grpo_megatron.conversion.{module}.BUCKET_BYTES", 5_000)
    monkeypatch.setattr("grpo_megatron.conversion.megatron_to_hf._COPY_BYTES", 5_000)


@pytest.mark.slow_when(
    lambda family, tied: (family, tied) not in (("qwen3", True), ("qwen3_moe", False), ("deepseek_v3", False))
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_there_and_back_is_bit_identical(tmp_path, small_files, family, tied):
    source, megatron, hf = (
        tiny_model(tmp_path / "source", family, tied),
        tmp_path / "megatron",
        tmp_path / "hf",
    )
    tool("convert_hf_to_megatron", source, megatron)
    tool("convert_megatron_to_hf", megatron, hf)
    assert len(list((megatron / "actor").glob("*.distcp"))) > 2
    assert_identical(read_all(hf), read_all(source))
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(hf.glob("*.safetensors"))) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read_all(hf).values())
    assert tool("inspect_checkpoint", source, megatron)[0] == "no difference\n"
    assert "bit for bit" in tool("verify_checkpoint", source, megatron, "--bits-only")[0]


def test_logits_equal_transformers(model, tmp_path):
    tool("convert_hf_to_megatron", model, tmp_path / "megatron")
    assert "within the bound" in tool("verify_checkpoint", model, tmp_path / "megatron")[0]


def test_an_output_layer_is_not_lost_to_a_tied_configuration(model, tmp_path):
    """The config.json that --hf names may tie the embeddings although the checkpoint has its own output
    layer.
    """
    tool("convert_hf_to_megatron", model, tmp_path / "megatron")
    shutil.copytree(tmp_path / "megatron" / "hf", tmp_path / "tied")
    config = json.loads((tmp_path / "tied" / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "tied" / "config.json").write_text(json.dumps(config))
    said = tool(
        "convert_megatron_to_hf", tmp_path / "megatron", tmp_path / "hf", "--hf", tmp_path / "tied", status=2
    )[1]
    assert "has an output layer (output_layer.weight) that differs from the embedding" in said
    assert "set tie_word_embeddings: false" in said
    assert not (tmp_path / "hf").exists()


def test_a_difference_is_named(model, tmp_path):
    tool("convert_hf_to_megatron", model, tmp_path / "megatron")
    shutil.copytree(model, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] += 0.5
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    said, _ = tool("verify_checkpoint", tmp_path / "other", tmp_path / "megatron", status=1)
    assert "model.layers.2.mlp.up_proj.weight: 1 of 6144 elements differ, by up to 0.5" in said
    assert "beyond the bound" in said
    said, _ = tool("inspect_checkpoint", tmp_path / "other", tmp_path / "megatron", status=1)
    assert said == "model.layers.2.mlp.up_proj.weight: different values\n"


@pytest.mark.slow
def test_a_checkpoint_of_another_layout(ranks, model, tmp_path, small_files):
    """Trainers load what the tool writes, and the tool reads what they write, in any layout. 61 words need
    padding there.
    """
    hf_to_megatron(model, str(tmp_path / "megatron"), 1)
    sizes = ParallelSizes(tp=2, pp=2)
    ranks.run(
        converted.load_and_save,
        sizes,
        sizes,
        model,
        str(tmp_path / "megatron/actor"),
        str(tmp_path / "step/actor"),
    )
    said = tool("convert_megatron_to_hf", tmp_path / "step", tmp_path / "hf", status=2)[1]
    assert "give the model's HF folder with --hf" in said
    tool("convert_megatron_to_hf", tmp_path / "step", tmp_path / "hf", "--hf", model)
    assert_identical(read_all(tmp_path / "hf"), read_all(model))
    listed = json.loads(tool("inspect_checkpoint", tmp_path / "step", "--json", "--no-digest")[0])
    refused = tool("inspect_checkpoint", tmp_path / "step", "--hf", tmp_path, status=2)[1]
    assert f"{tmp_path} has no config.json; give the model's HF folder with --hf" in refused
    assert listed["kind"] == "Megatron, its own keys"
    assert "decoder.layers.mlp.linear_fc1.weight" in {tensor["name"] for tensor in listed["tensors"]}


@pytest.mark.slow
def test_fp8_export_is_what_deepseek_has(tmp_path, small_files):
    source = tiny_model(tmp_path / "source", "qwen3_moe", hidden_size=192, intermediate_size=320)
    hf_to_megatron(source, str(tmp_path / "megatron"), 1)
    tool("convert_megatron_to_hf", tmp_path / "megatron", tmp_path / "fp8", "--dtype", "bfloat16", "--fp8")
    before, after = read_all(source), read_all(tmp_path / "fp8")
    scaled = {name for name in before if f"{name}_scale_inv" in after}
    assert scaled == {
        name
        for name, w in before.items()
        if ".layers." in name and w.ndim == 2 and "mlp.gate.weight" not in name
    }
    assert after.keys() == before.keys() | {f"{name}_scale_inv" for name in scaled}
    for name, weight in before.items():
        if name not in scaled:
            assert torch.equal(after[name], weight.bfloat16())
            continue
        rows, columns = weight.shape
        scale = (
            after[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        )
        assert after[name].dtype == torch.float8_e4m3fn
        assert (
            after[name].float() * scale - weight.bfloat16().float()
        ).abs().max() <= weight.abs().max() * 2**-4
    settings = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]
    assert settings["weight_block_size"] == [128, 128]
    assert "model.layers.0.mlp.gate" in settings["modules_to_not_convert"]
    listed = json.loads(tool("inspect_checkpoint", tmp_path / "fp8", "--json")[0])["tensors"]
    assert {tensor["name"] for tensor in listed if tensor["dtype"] == "float8_e4m3fn"} == scaled
    tool("convert_hf_to_megatron", tmp_path / "fp8", tmp_path / "again")
    assert "bit for bit" in tool("verify_checkpoint", tmp_path / "fp8", tmp_path / "again", "--bits-only")[0]


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interruption(monkeypatch, module: str, count: int):
    """Stop a conversion in the middle of unit number `count`, as if the machine had stopped."""
    seen = []

    def opened(path):
        if len(seen) == count:
            path.with_name(f"{path.name}.tmp").write_bytes(b"half")
            raise Interrupted
        seen.append(path)
        return new_file(path)

    with monkeypatch.context() as patch:
        patch.setattr(f"grpo_megatron.conversion.{module}.new_file", opened)
        yield


def test_an_interrupted_conversion_continues(model, tmp_path, small_files, monkeypatch):
    whole, target = tmp_path / "whole", tmp_path / "target"
    hf_to_megatron(model, str(whole), 1)
    with interruption(monkeypatch, "hf_to_megatron", 2), pytest.raises(Interrupted):
        hf_to_megatron(model, str(target), 1)
    assert not target.exists()
    with pytest.raises(UserError, match=r"does not exist"):
        megatron_to_hf(str(target), str(tmp_path / "x"), None, 1)
    first = target.with_name("target.partial") / "result" / "actor" / "__0_0.distcp"
    written = first.stat().st_mtime_ns
    hf_to_megatron(model, str(target), 1)
    assert (target / "actor/__0_0.distcp").stat().st_mtime_ns == written  # not made again
    assert not list(tmp_path.rglob("*.tmp")) + list(tmp_path.glob("*.partial"))
    for path in (whole / "actor").glob("*.distcp"):
        assert (target / "actor" / path.name).read_bytes() == path.read_bytes()
    with interruption(monkeypatch, "megatron_to_hf", 3), pytest.raises(Interrupted):
        megatron_to_hf(str(target), str(tmp_path / "hf"), None, 1)
    assert not (tmp_path / "hf").exists()
    megatron_to_hf(str(target), str(tmp_path / "hf"), None, 1)
    assert_identical(read_all(tmp_path / "hf"), read_all(model))


def test_what_was_begun_is_not_continued_with_something_else(model, tmp_path, small_files, monkeypatch):
    source, target = shutil.copytree(model, tmp_path / "source"), str(tmp_path / "target")
    with interruption(monkeypatch, "hf_to_megatron", 1), pytest.raises(Interrupted):
        hf_to_megatron(str(source), target, 1)
    os.utime(source / "model.safetensors")
    with pytest.raises(UserError, match=r"source files \(files\); delete it"):
        hf_to_megatron(str(source), target, 1)


def test_nothing_is_overwritten(model, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for name in ("convert_hf_to_megatron", "convert_megatron_to_hf"):
        assert "exists and is not an empty folder; delete it" in tool(name, model, tmp_path, status=2)[1]
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_a_disk_that_is_full(model, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(UserError, match=r"needs 0.00 GB more"):
        hf_to_megatron(model, str(tmp_path / "target"), 1)
    monkeypatch.undo()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=r"__0_0\.distcp cannot be written"):
            hf_to_megatron(model, str(tmp_path / "target"), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "target").exists()


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 50_000)


def overwrite_header(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 100)


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def reshape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:50].clone()
    save_file(tensors, folder / "model.safetensors")


def pickled(folder: Path) -> None:
    drop_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"code")


HARM = {
    truncate: "model.safetensors cannot be read",
    overwrite_header: "model.safetensors cannot be read",
    drop_weights: "contains neither",
    reshape: r"lm_head.weight of shape (50, 64), but config.json requires (61, 64)",
    pickled: "convert the weights to safetensors once",
}


@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_source_is_one_message(model, tmp_path, harm):
    source = shutil.copytree(model, tmp_path / "source")
    harm(source)
    out, error = tool("convert_hf_to_megatron", source, tmp_path / "target", status=2)
    assert error.startswith("error: ")
    assert HARM[harm] in error
    assert not out
    assert os.listdir(tmp_path) == ["source"]


def test_a_checkpoint_of_megatron_lms_legacy_format(tmp_path):
    folder = tmp_path / "iter_0000010" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(b"code")
    for path in (tmp_path, folder.parent):
        said = tool("convert_megatron_to_hf", path, tmp_path / "hf", "--hf", path, status=2)[1]
        assert "--ckpt-convert-format torch_dist" in said
        assert "--ckpt-convert-format torch_dist" in tool("inspect_checkpoint", path, status=2)[1]


# Several processes, which import torch anew.

START = """
import sys
import grpo_megatron.conversion.units as units
units._LEAST = 3_000_000
from grpo_megatron.conversion.hf_to_megatron import hf_to_megatron
hf_to_megatron(sys.argv[1], sys.argv[2], 2)
"""


def start(source, target):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", START, str(source), str(target)],
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, process) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """A model of some 130 MB, whose 40 files take a while."""
    return tiny_model(
        tmp_path_factory.mktemp("large"),
        "qwen3",
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        vocab_size=500,
    )


@pytest.mark.slow
def test_killed_in_the_midst_it_leaves_nothing_whole_and_continues(large_model, tmp_path):
    target, notes = tmp_path / "target", tmp_path / "target.partial" / "notes"
    process = start(large_model, target)
    wait_for(lambda: notes.is_dir() and len(list(notes.glob("*.json"))) >= 2, process)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not target.exists()
    files = {
        f"actor-{path.name}": path for path in (tmp_path / "target.partial/result/actor").glob("*.distcp")
    }
    done = {files[note.stem].name: files[note.stem].stat().st_mtime_ns for note in notes.glob("*.json")}
    assert len(done) >= 2
    again = start(large_model, target)
    assert again.wait() == 0, again.stderr.read()
    assert all((target / "actor" / name).stat().st_mtime_ns == when for name, when in done.items())
    assert tool("inspect_checkpoint", large_model, target)[0] == "no difference\n"


@pytest.mark.slow
def test_a_dead_process_is_one_message(large_model, tmp_path):
    process = start(large_model, tmp_path / "target")
    notes = tmp_path / "target.partial" / "notes"
    wait_for(lambda: notes.is_dir() and any(notes.glob("*.json")), process)
    workers = [
        child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())
    ]
    workers[0].kill()
    process.wait()
    assert "was killed by signal 9" in process.stderr.read()
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
# mbridge does not know Mistral and MiniMax-M2. It reads DeepSeek-V3's config.json as transformers 4 wrote it.
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family not in ("mistral", "minimax_m2", "deepseek_v3")]
)
def test_mbridge_makes_the_same_parameters(ranks, tmp_path, family):
    pytest.importorskip("mbridge")
    # It knows no layers without experts beside those with.
    changes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    source = tiny_model(tmp_path / "source", family, **changes)
    hf_to_megatron(source, str(tmp_path / "megatron"), 1)
    (found,) = ranks.run(
        converted.compare_with_mbridge, ParallelSizes(), source, str(tmp_path / "megatron/actor")
    )
    assert len(found["compared"]) > 20
    assert found["different"] == []

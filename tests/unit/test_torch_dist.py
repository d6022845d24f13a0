"""Megatron's distributed checkpoints as files: any rectangle of any chunks, by our reader and by torch's."""

import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, load

from grpo_megatron.errors import UserError
from grpo_megatron.model.pieces import box
from grpo_megatron.weights.checkpoint_layout import rows_within
from grpo_megatron.weights.torch_dist import StoredChunk, StoredTensor, TorchDistReader, read_metadata
from grpo_megatron.weights.torch_dist_writer import append_tensor, write_metadata


def write(folder, tensors: dict[str, torch.Tensor], cuts: dict[str, list[list[int]]]) -> None:
    """Write tensors that are cut at these places along each axis, with the chunks of each in two files."""
    stored = {}
    with open(folder / "a.distcp", "wb") as a, open(folder / "b.distcp", "wb") as b:
        a.write(b"xyz")  # so that nothing is where it would be aligned
        for name, tensor in tensors.items():
            bounds = [[0, *cut, size] for cut, size in zip(cuts[name], tensor.shape, strict=True)]
            chunks = []
            for number, corner in enumerate(np.ndindex(*[len(bound) - 1 for bound in bounds])):
                at = tuple(bound[i] for bound, i in zip(bounds, corner, strict=True))
                shape = tuple(bound[i + 1] - bound[i] for bound, i in zip(bounds, corner, strict=True))
                file = (a, b)[number % 2]
                place = append_tensor(file, tensor[box(at, shape)].clone())
                chunks.append(StoredChunk(at, shape, os.path.basename(file.name), *place))
            stored[name] = StoredTensor(tensor.dtype, tuple(tensor.shape), tuple(chunks))
    write_metadata(folder, stored, {})


@st.composite
def checkpoints(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = [sorted(draw(st.sets(st.integers(1, size - 1), max_size=2))) if size > 1 else [] for size in shape]
    start = [draw(st.integers(0, size - 1)) for size in shape]
    size = [draw(st.integers(1, whole - first)) for whole, first in zip(shape, start, strict=True)]
    dtypes = [draw(st.sampled_from([torch.float32, torch.bfloat16])) for _ in range(2)]
    return shape, cuts, tuple(start), tuple(size), *dtypes, draw(st.booleans())


@settings(max_examples=60)
@given(checkpoints())
def test_any_rectangle_of_any_chunks(tmp_path_factory, checkpoint):
    shape, cuts, start, size, stored, wanted, transposed = checkpoint
    folder = tmp_path_factory.mktemp("checkpoint")
    tensor = torch.randn(shape).to(stored)
    write(folder, {"w": tensor}, {"w": cuts})
    out = torch.full(size, 7.0, dtype=wanted)
    if transposed:  # as a part of something larger, whose elements do not lie side by side
        out = torch.full((*size, 2), 7.0, dtype=wanted)[..., 0]
    TorchDistReader(folder).read("w", start, out)
    assert torch.equal(out, tensor[box(start, size)].to(wanted))


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(3, 5, 2).bfloat16()}
    write(tmp_path, tensors, {"a": [[2], []], "b": [[1], [2, 4], []]})
    return tmp_path, tensors


def test_torch_reads_the_same(folder):
    path, tensors = folder
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(read, storage_reader=FileSystemReader(path), no_dist=True)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def overwrite(path, start: int, raw: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(raw)


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def replace_metadata(path, raw: bytes) -> None:
    (path / ".metadata").write_bytes(raw)


DAMAGE = {
    "a file is gone": (lambda path: (path / "b.distcp").unlink(), "b.distcp does not exist"),
    "a file is truncated": (lambda path: os.truncate(path / "b.distcp", 500), "b.distcp is truncated"),
    "an archive is overwritten": (
        lambda path: overwrite(path / "a.distcp", 3, bytes(600)),
        "a.distcp: a cannot be read",
    ),
    "the metadata is truncated": (
        lambda path: os.truncate(path / ".metadata", 200),
        "the checkpoint is damaged",
    ),
    "the metadata is something else": (
        lambda path: replace_metadata(path, b"{}"),
        "the checkpoint is damaged",
    ),
    "the metadata runs code": (
        lambda path: replace_metadata(path, pickle.dumps(_Harmful())),
        "refers to posix.mkdir",
    ),
    "the metadata is gone": (lambda path: (path / ".metadata").unlink(), "the checkpoint is incomplete"),
    "another format": (
        lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "only torch_dist",
    ),
}


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_message(folder, damage, monkeypatch):
    path, _ = folder
    monkeypatch.chdir(path)
    harm, said = DAMAGE[damage]
    harm(path)
    with pytest.raises(UserError, match=said):
        TorchDistReader(path).read("a", (0, 0), torch.empty(6, 4))
    assert not (path / "harm").exists()


def test_what_no_chunk_holds_is_an_error(folder):
    path, _ = folder
    stored = read_metadata(path)
    write_metadata(path, {"a": StoredTensor(torch.float32, (6, 4), stored["a"].chunks[:1])}, {})
    with pytest.raises(UserError, match="incomplete"):
        TorchDistReader(path).read("a", (0, 0), torch.empty(6, 4))
    with pytest.raises(UserError, match="no tensor c"):
        TorchDistReader(path).read("c", (0,), torch.empty(1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_rows_cover_a_tensor_once(shape, limit, multiple):
    seen = np.zeros(shape, int)
    for start, size in rows_within(tuple(shape), 2, limit, multiple):
        assert len(start) == len(size) == len(shape)
        seen[box(start, size)] += 1
    assert (seen == 1).all()

"""Reader of Megatron's distributed checkpoints (torch_dist).

Such a checkpoint has one tensor for each key, divided into chunks. A file holds a sequence of chunks, each in
the format of torch.save. `.metadata` lists the file and offset of every chunk. Megatron and torch load whole
checkpoints into memory. This module reads any rectangle of a tensor without the rest. torch_dist_writer.py
writes chunks one by one.
"""

import io
import os
import pickle
import zipfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.files import fill_buffer, read_object
from grpo_megatron.model.pieces import Shape, box
from grpo_megatron.paths import file_problem, folder_problem, is_absent
from grpo_megatron.weights.safetensors_file import bytes_of

METADATA = ".metadata"
SETTINGS = "metadata.json"
# The only names that the metadata of an intact checkpoint refers to. The metadata file is a pickle, and a
# malicious pickle could name any function to be called.
_ALLOWED_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner")
_ALLOWED = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its name in Python 3.13
}


@dataclass(frozen=True)
class StoredChunk:
    """The location of one chunk of a stored tensor in the files of a checkpoint.

    The chunk is the rectangle tensor[at : at + shape].
    """

    at: Shape
    """Index of the chunk's first element in the whole tensor, one number per dimension."""
    shape: Shape
    """Shape of the chunk."""
    file: str
    """Name of the file that contains the chunk, relative to the checkpoint folder."""
    offset: int
    """Byte offset in the file at which the chunk's archive, written by torch.save, begins."""
    length: int
    """Size of the archive in bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """The dtype, the shape and the chunks of one tensor in a checkpoint."""

    dtype: torch.dtype
    shape: Shape
    chunks: tuple[StoredChunk, ...]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        harmless = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if harmless or (module, name) in _ALLOWED or (module in _ALLOWED_MODULES and "." not in name):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which checkpoint metadata never needs")


def read_metadata(folder: str | Path) -> dict[str, StoredTensor]:
    """Return {key: dtype, shape and chunks} of every tensor of a checkpoint, including optimizer states.

    No tensor is read, but every data file is checked to be as long as its chunks require. Raises UserError if
    the checkpoint is damaged, incomplete or not in the format torch_dist.
    """
    root = Path(folder)
    problem = folder_problem(root) or (
        file_problem(root / METADATA) and f"has no {METADATA}, so the checkpoint is incomplete; copy it again"
    )
    if problem:
        raise UserError(f"{root} {problem}")
    backend = (
        "torch_dist" if is_absent(root / SETTINGS) else read_object(root / SETTINGS).get("sharded_backend")
    )
    if backend != "torch_dist":
        raise UserError(
            f"{root} is a checkpoint in the format {shortened(repr(backend))}, but only torch_dist can be "
            "read; save it again in this format"
        )
    metadata = load_metadata(root)
    try:
        tensors = {
            key: _stored(key, value, metadata.storage_data)
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
    except Exception as error:  # damaged metadata can raise any error
        raise _damaged(root, error) from error
    _check_files(root, tensors)
    return tensors


def load_metadata(folder: str | Path) -> Metadata:
    """Load the `.metadata` file of a checkpoint without running code that its pickle may contain.

    torch's own reader would run that code. Raises UserError if the file cannot be read.
    """
    try:
        with open(Path(folder, METADATA), "rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it contains a {type(metadata).__name__} instead of metadata")
        return metadata
    except Exception as error:  # unpickling arbitrary bytes can raise any error
        raise _damaged(Path(folder), error) from error


def _damaged(root: Path, error: Exception) -> UserError:
    return UserError(
        f"{root / METADATA} cannot be read ({shortened(error, 200)}); the checkpoint is damaged, copy it "
        "again"
    )


def _stored(key: str, value: TensorStorageMetadata, where: dict) -> StoredTensor:
    chunks = []
    for chunk in value.chunks:
        info = where[MetadataIndex(key, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{key} is stored compressed")
        chunks.append(
            StoredChunk(
                tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length
            )
        )
    return StoredTensor(value.properties.dtype, tuple(value.size), tuple(chunks))


def _check_files(root: Path, tensors: dict[str, StoredTensor]) -> None:
    ends: dict[str, int] = {}
    for stored in tensors.values():
        for chunk in stored.chunks:
            ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for name, end in ends.items():
        problem = file_problem(root / name)
        if problem is None and (size := os.path.getsize(root / name)) < end:
            problem = f"is truncated: it has {size} bytes, but the checkpoint's metadata requires {end}"
        if problem:
            raise UserError(f"{root / name} {problem}; copy the checkpoint again")


class TorchDistReader:
    """A reader of a torch_dist checkpoint that can read any rectangle of a tensor, and needs little memory.

    The only large memory is a scratch buffer, used for rectangles that are not contiguous in the file or must
    be cast. The constructor raises UserError if the checkpoint is damaged or incomplete.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.tensors = read_metadata(folder)
        self._corners = {
            key: np.array([(c.at, np.add(c.at, c.shape)) for c in stored.chunks], dtype=np.int64)
            for key, stored in self.tensors.items()
        }
        # {(file, offset) of a chunk: byte offset of its elements in the file}
        self._data: dict[tuple[str, int], int] = {}
        self._scratch = np.empty(0, np.uint8)
        self._open_name, self._open_file = "", io.BytesIO()

    def read(self, key: str, start: Shape, out: torch.Tensor) -> None:
        """Fill `out` with tensor[start : start + out.shape], cast to the dtype of `out`.

        key: key of the tensor in the checkpoint.
        start: index of the first element to read, one number per dimension.
        out: a tensor with as many dimensions as the stored tensor.
        Raises UserError if the checkpoint lacks the tensor or some of its elements, or if a file is damaged.
        """
        if key not in self.tensors:
            raise UserError(f"{self.folder} has no tensor {key}; it is a checkpoint for a different model")
        end = np.add(start, out.shape)
        lows, highs = self._corners[key][:, 0], self._corners[key][:, 1]
        filled = 0
        for index in np.nonzero(((lows < end) & (highs > start)).all(axis=1))[0]:
            low, high = np.maximum(lows[index], start), np.minimum(highs[index], end)
            shape = tuple((high - low).tolist())
            part = out[box(tuple((low - start).tolist()), shape)]
            self._read_chunk(key, int(index), tuple((low - lows[index]).tolist()), part)
            filled += part.numel()
        if filled < out.numel():
            raise UserError(
                f"{self.folder}: {key} is incomplete: elements between {list(start)} and {end.tolist()} are "
                "missing; copy the checkpoint again"
            )

    def _read_chunk(self, key: str, index: int, at: Shape, out: torch.Tensor) -> None:
        """Fill `out` with chunk[at : at + out.shape], a rectangle of one chunk of a stored tensor.

        If the rectangle is contiguous in the file and in `out` and needs no cast, it is read without an
        intermediate buffer.

        key: key of the tensor in the checkpoint.
        index: index of the chunk in StoredTensor.chunks.
        """
        stored, chunk = self.tensors[key], self.tensors[key].chunks[index]
        strides = [prod(chunk.shape[axis + 1 :]) for axis in range(out.ndim)]
        first = int(np.dot(at, strides))
        # Elements from the rectangle's first one to its last one, gaps included.
        count = int(np.dot(np.subtract(out.shape, 1), strides)) + 1
        size = stored.dtype.itemsize
        offset = self._start_of_data(key, chunk) + first * size
        if out.dtype == stored.dtype and count == out.numel() and out.is_contiguous():
            self._fill(out, chunk.file, offset)
            return
        raw = torch.from_numpy(self._memory(count * size)).view(stored.dtype)
        self._fill(raw, chunk.file, offset)
        out.copy_(raw.as_strided(out.shape, strides))

    def _fill(self, out: torch.Tensor, name: str, offset: int) -> None:
        # Only the last file stays open: a checkpoint may have more files than a process may keep open. It is
        # not opened for each read, because that takes long on a file system of a cluster.
        if self._open_name != name:
            opened = io.FileIO(self.folder / name)
            self._open_file.close()
            self._open_name, self._open_file = name, opened
        if not fill_buffer(bytes_of(out), self._open_file, offset):
            raise UserError(f"{self.folder / name} is truncated; copy the checkpoint again")

    def _memory(self, size: int) -> np.ndarray:
        if self._scratch.nbytes < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def _start_of_data(self, key: str, chunk: StoredChunk) -> int:
        where = (chunk.file, chunk.offset)
        if where not in self._data:
            try:
                self._data[where] = self._find_data(chunk, self.tensors[key].dtype)
            except Exception as error:  # torch and zipfile can raise any error for a damaged file
                raise UserError(
                    f"{self.folder / chunk.file}: {key} cannot be read ({shortened(error, 200)}); the file "
                    "is damaged, copy it again"
                ) from error
        return self._data[where]

    def _find_data(self, chunk: StoredChunk, dtype: torch.dtype) -> int:
        """Return the byte offset in the file at which a chunk's elements begin.

        A chunk is a ZIP archive that torch.save wrote, with one tensor. Raises an error of any type if the
        file is damaged or if the chunk does not have the expected dtype.

        dtype: the expected dtype, from the checkpoint's metadata.
        """
        with open(self.folder / chunk.file, "rb") as file:
            section = _Section(file, chunk.offset, chunk.length)
            tensor = torch.load(section, map_location="meta", weights_only=True)
            if tensor.dtype != dtype or tuple(tensor.shape) != chunk.shape or not tensor.is_contiguous():
                raise ValueError(
                    f"it is {tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(chunk.shape)}"
                )
            with zipfile.ZipFile(section) as archive:
                record = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
            if (
                record.compress_type != zipfile.ZIP_STORED
                or record.file_size != tensor.nbytes
                or tensor.storage_offset()
            ):
                raise ValueError("its archive does not contain exactly the tensor's elements")
            file.seek(chunk.offset + record.header_offset)
            # The fixed part of a ZIP file header. Its last four bytes are the lengths of the name and the
            # extra field.
            header = file.read(30)
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return chunk.offset + record.header_offset + len(header) + lengths


class _Section(io.RawIOBase):
    """A read-only file object for `length` bytes of another file, so that torch.load can read one chunk.

    offset: position in the other file at which the bytes begin.
    """

    def __init__(self, file, offset: int, length: int):
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence])
        return self.at

    def readinto(self, buffer) -> int:
        self.file.seek(self.offset + self.at)
        got = self.file.readinto(memoryview(buffer)[: max(self.length - self.at, 0)])
        self.at += got
        return got

"""Files of a training checkpoint. Every rank writes its own file from a thread; any rank can read all files.

The format is torch.distributed.checkpoint's, with the names of Megatron's fully reshardable checkpoints.
Megatron's own writers are not used, because they copy everything that they write (docs/checkpoints.md).
"""

import ctypes
import io
import itertools
import math
import os
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from grpo_megatron.errors import ANOTHER_RUN, UserError
from grpo_megatron.files import new_file, sync_to_disk
from grpo_megatron.megatron.state.shards import Rectangle
from grpo_megatron.progress import moved
from grpo_megatron.run.checkpoints import NotWritten, SaveReport
from grpo_megatron.run.manifest import DigestedFile, FileRecord, must_be_sound, problems, record_of
from grpo_megatron.weights.torch_dist import StoredChunk, StoredTensor, load_metadata
from grpo_megatron.weights.torch_dist_writer import append_tensor, write_metadata

# File for everything that is not a tensor. Megatron's own loader asks for this name.
_COMMON = "common.pt"


class _Written(NamedTuple):
    """Location in a rank's file of one saved item: a rectangular part of a tensor, or an object."""

    name: str
    """Name of the tensor or object in the checkpoint."""
    start: int
    """Position of the item's first byte in the file."""
    length: int
    """Number of bytes in the file."""
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor. None for an object."""
    dtype: torch.dtype | None = None
    """Dtype of the tensor. None for an object."""
    offset: tuple[int, ...] = ()
    """Index of the rectangle's first element in the whole tensor, one number per axis."""
    size: tuple[int, ...] = ()
    """Shape of the rectangle."""


class Writer:
    """Writes one rank's file of a checkpoint in a thread, so that training goes on meanwhile.

    The thread reads weights and optimizer states in place, without copying all of them first. Code that
    changes such a tensor must call `wait_until_read` before. Weights are written first, because training may
    swap them with the reference's weights long before it changes the optimizer's states.
    """

    def __init__(
        self,
        folder: str,
        weights: list[Rectangle],
        states: list[Rectangle],
        objects: dict[str, bytes],
        common: dict,
        begun: float,
    ):
        """Start the thread that writes the file.

        folder: folder of the checkpoint. It is the same on all ranks.
        weights, states: the parts of weights and optimizer states that this rank must write.
        objects: {name in the checkpoint: bytes} of everything that is not a tensor.
        common: values that are equal on all ranks, such as the learning-rate schedule. Rank 0 writes them.
        begun: time.perf_counter() when saving began. Durations in the SaveReport count from it.
        """
        self._begun = begun
        self._folder, self._rank, self._common = folder, dist.get_rank(), common
        self._file = f"__{self._rank}_0.distcp"
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._written: list[_Written] = []
        self._files: dict[str, FileRecord] = {}
        self._error: str | None = None
        self._seconds = self._waited = 0.0
        self._weights_read, self._all_read = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(weights, states, objects), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._waited = time.perf_counter() - self._begun

    def _run(self, weights: list[Rectangle], states: list[Rectangle], objects: dict[str, bytes]) -> None:
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            with Path(self._folder, self._file).open("wb") as file, torch.cuda.stream(self._stream):
                digested = DigestedFile(file)
                for name, value in objects.items():
                    self._written.append(_Written(name, digested.tell(), digested.write(value)))
                self._write(digested, weights)
                self._weights_read.set()
                self._write(digested, states)
                self._all_read.set()
                self._files[self._file] = digested.record()
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            # `finish` raises this error on all ranks. If only this rank raised it, the others would wait for
            # this rank in a collective.
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._weights_read.set()
            self._all_read.set()
            self._seconds = time.perf_counter() - self._begun

    def _write(self, file: DigestedFile, pieces: list[Rectangle]) -> None:
        for piece in pieces:
            host = piece.data.cpu()  # makes no copy if the tensor is in host memory already
            # torch.save writes a tensor's whole storage, which is larger than this piece. A copy of the piece
            # would have its own storage, but the page faults of a copy cost more than the writing. So give
            # the same memory a storage of the piece's size.
            memory = (ctypes.c_char * host.nbytes).from_address(host.data_ptr())
            start, length = append_tensor(file, torch.frombuffer(memory, dtype=host.dtype).view(host.shape))
            self._written.append(
                _Written(
                    piece.name,
                    start,
                    length,
                    piece.shape,
                    piece.data.dtype,
                    piece.offset,
                    tuple(piece.data.shape),
                )
            )

    def wait_until_read(self, weights_only: bool = False) -> None:
        """Wait until the thread has read all tensors, so that the caller may change them.

        weights_only: if True, wait only for the weights, not for the optimizer's states.
        """
        begun = time.perf_counter()
        (self._weights_read if weights_only else self._all_read).wait()
        self._waited += time.perf_counter() - begun

    def done(self) -> bool:
        """Return True if the thread has ended. This rank's file is then on disk, or writing it has failed."""
        return not self._thread.is_alive()

    def finish(self) -> SaveReport:
        """Wait until all ranks have written their files. Rank 0 then writes the checkpoint's metadata.

        All ranks must call this. Returns the report on this rank's file. On rank 0, the report includes the
        metadata's files.

        Raises NotWritten on all ranks if any rank could not write its file, or if rank 0 could not write the
        metadata.
        """
        begun = time.perf_counter()
        self._thread.join()
        self._all_must_have_written()
        everyone: list | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object((self._file, self._written), everyone, dst=0)
        if everyone:
            try:
                self._finish_folder(dict(everyone))
            except Exception as error:  # any: the other ranks wait for this rank in the next collective
                self._error = f"{type(error).__name__}: {error}"
        self._all_must_have_written()
        waited = self._waited + time.perf_counter() - begun
        return SaveReport(self._seconds, waited, sum(item.length for item in self._written), self._files)

    def _all_must_have_written(self) -> None:
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, self._error)
        failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
        if failed:
            raise NotWritten(f"the checkpoint {self._folder} could not be written by {'; '.join(failed)}")

    def _finish_folder(self, files: dict[str, list[_Written]]) -> None:
        folder = Path(self._folder)
        common = io.BytesIO()
        # Into memory first, because torch's own writer reports a full disk as "unexpected pos".
        torch.save(self._common, common)
        with new_file(folder / _COMMON) as file:
            file.write(common.getvalue())
        written = [_COMMON, *write_metadata(folder, *_contents(files))]
        self._files |= {name: record_of(folder / name) for name in written}
        sync_to_disk(folder)


def _contents(
    files: dict[str, list[_Written]],
) -> tuple[dict[str, StoredTensor], dict[str, tuple[str, int, int]]]:
    """Return where each tensor and object of a checkpoint lies in the ranks' files, as (tensors, objects).

    - tensors: {name: StoredTensor}, which has the place of each part of the tensor.
    - objects: {name: (file name, position of the first byte, number of bytes)}.

    files: {file name: items that this file contains}.

    Raises RuntimeError if the written parts of a tensor do not have as many elements as the tensor.
    """
    parts, objects = defaultdict(list), {}
    for file, items in files.items():
        for item in items:
            if item.shape is None:
                objects[item.name] = (file, item.start, item.length)
            else:
                parts[item.name].append(
                    (item, StoredChunk(item.offset, item.size, file, item.start, item.length))
                )
    tensors = {}
    for name, pairs in parts.items():
        first = pairs[0][0]
        if sum(math.prod(item.size) for item, _ in pairs) != math.prod(first.shape):
            raise RuntimeError(
                f"{name}, shape {first.shape}: the ranks have not written each element exactly once"
            )
        tensors[name] = StoredTensor(first.dtype, first.shape, tuple(chunk for _, chunk in pairs))
    return tensors, objects


class _Targets:
    """Load planner for torch's FileSystemReader. It tells the reader where to put each tensor that it reads.

    pieces: {tensor name: parts of the tensor, whose `data` is to be filled}.
    objects: {object name: content} of the objects that have been read.
    """

    def __init__(self, pieces: dict[str, list[Rectangle]]):
        self._pieces = pieces
        self.objects: dict[str, io.BytesIO] = {}

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        piece = self._pieces[item.dest_index.fqn][item.dest_index.index]
        return narrow_tensor_by_index(piece.data, item.dest_offsets, item.lengths)

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        moved()

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        self.objects[item.dest_index.fqn] = value


def verify(folder: str, files: dict[str, FileRecord]) -> None:
    """Check that all files of a checkpoint have their recorded sizes and checksums.

    All ranks must call this. Each rank reads a share of the files, and all ranks raise the same error.

    files: {file name: recorded size and checksum of the file}.

    Raises UserError if a file cannot be read. Otherwise raises DamagedCheckpoint if a file differs from its
    record.
    """
    mine = sorted(files)[dist.get_rank() :: dist.get_world_size()]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, problems(Path(folder), files, mine))
    must_be_sound(itertools.chain.from_iterable(found))


def read(
    folder: str, pieces: list[Rectangle], objects: list[str], optional: Sequence[str] = ()
) -> dict[str, io.BytesIO]:
    """Read parts of tensors, and objects, from a checkpoint that any parallel layout may have written.

    pieces: the parts of tensors to read. Their `data` is filled in place.
    objects: names of the objects to read.
    optional: names of further objects, which are read only if the checkpoint has them.

    Returns {object name: content}. Raises UserError if the checkpoint lacks a tensor or an object of
    `objects`, if a file is damaged, or if a tensor without padding has another shape.
    """
    reader = FileSystemReader(folder)
    metadata = load_metadata(folder)
    objects = [*objects, *(name for name in optional if name in metadata.state_dict_metadata)]
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    by_name = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    items = [_object_item(name) for name in objects]
    for name in (*by_name, *objects):
        if name not in metadata.state_dict_metadata:
            raise UserError(
                f"{folder} has no {name}, so it is for a different model or megatron.precision, or contains "
                f"only weights; {ANOTHER_RUN}"
            )
    for name, parts in by_name.items():
        saved = metadata.state_dict_metadata[name]
        if parts[0].padded:
            for part in parts:
                part.data.zero_()
        elif tuple(saved.size) != parts[0].shape:
            raise UserError(
                f"{folder}: {name} has shape {tuple(saved.size)}, but this model needs {parts[0].shape}; "
                f"{ANOTHER_RUN}"
            )
        wanted = [ChunkStorageMetadata(torch.Size(part.offset), part.data.shape) for part in parts]
        items += create_read_items_for_chunk_list(name, saved, wanted)
    targets = _Targets(by_name)
    try:
        reader.read_data(LoadPlan(items), targets)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder} is damaged or cannot be read: {error}; use another checkpoint") from error
    return targets.objects


def _object_item(name: str) -> ReadItem:
    none = torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), none, MetadataIndex(name), none, none)


def read_common(folder: str) -> dict:
    """Return the values of a checkpoint that are equal on all ranks, such as the learning-rate schedule.

    The result is the dict that Writer got as `common`. Raises UserError if it cannot be read.
    """
    try:
        return torch.load(Path(folder, _COMMON), weights_only=True)
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(
            f"{folder} is incomplete or damaged: {_COMMON} cannot be read ({error}); use another checkpoint"
        ) from error

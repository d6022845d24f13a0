"""Conversion of an HF checkpoint to Megatron's distributed format, which loads in any parallel layout.

Each output file is one unit of work for a worker process. The file consists of chunks, which are parts of
Megatron tensors. The process assembles one chunk after the other in the same buffer, from rectangles of HF
tensors, so that it needs little memory.
"""

import sys
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_megatron.conversion.partial_folder import PartialFolder, files_of, refuse_existing
from grpo_megatron.conversion.pool import Progress, run
from grpo_megatron.conversion.sources import COMPANIONS, WEIGHTS, Buffer
from grpo_megatron.conversion.units import BUCKET_BYTES, file_bytes, filled
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, new_file, writing
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.pieces import Piece, Shape
from grpo_megatron.weights import hf_checkpoint, hf_writer
from grpo_megatron.weights.checkpoint_layout import SavedModel, clipped, rows_within
from grpo_megatron.weights.stacked_experts import StackForm
from grpo_megatron.weights.stored import STACKED, read_stored
from grpo_megatron.weights.torch_dist import StoredChunk, StoredTensor
from grpo_megatron.weights.torch_dist_writer import append_tensor, write_metadata
from grpo_megatron.weights.weight_files import SINGLE

# Records what the checkpoint was converted from. A checkpoint without this file was saved by a trainer.
_NOTE = "converted.json"


@dataclass(frozen=True)
class _Chunk:
    """A part of a Megatron tensor, tensor[at : at + shape], that is assembled and written in one step."""

    key: str
    """Key of the tensor in the Megatron checkpoint."""
    at: Shape
    """Index of the chunk's first element in the tensor, one number per dimension."""
    shape: Shape
    """Shape of the chunk."""
    dtype: torch.dtype
    """Dtype of the written elements."""
    pieces: tuple[Piece, ...]
    """Rectangles of HF tensors that form the chunk. `Piece.at` counts from the chunk's first element."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Unit:
    """One output file, such as __0_0.distcp, and the chunks that it consists of."""

    name: str
    chunks: list[_Chunk]


@dataclass
class _Converter:
    """Job for worker processes: read tensors of an HF checkpoint, and write files of a Megatron checkpoint.

    source: folder of the HF checkpoint.
    folder: folder to which the files are written.
    """

    source: str
    folder: Path

    def start(self) -> None:
        self.checkpoint = hf_checkpoint.HFCheckpoint(self.source)
        self.buffer = Buffer()

    def do(self, unit: _Unit, advance) -> list[tuple[int, int]]:
        """Write one output file. Return [(offset, length)] in bytes of each chunk in the file.

        unit: the file, and the chunks (parts of tensors) that it consists of.
        advance: function to call with the number of bytes of each chunk that has been written, for the
            progress bar.
        """
        places = []
        path = self.folder / unit.name
        with writing(path), new_file(path) as file:
            for chunk in unit.chunks:
                places.append(append_tensor(file, self._make(chunk)))
                advance(chunk.nbytes)
        return places

    def _make(self, chunk: _Chunk) -> torch.Tensor:
        tensor = self.buffer.tensor(chunk.shape, chunk.dtype)
        if sum(piece.numel for piece in chunk.pieces) < tensor.numel():
            tensor.zero_()  # padding
        for piece in chunk.pieces:
            self.checkpoint.read_into(piece.hf, piece.start, piece.of(tensor))
        return tensor


def hf_to_megatron(source: str, target: str, processes: int) -> Progress:
    """Convert an HF checkpoint to Megatron's distributed format, in the dtype of config.json.

    The weights are written to `target`/actor, configuration and tokenizer to `target`/hf. Files and tensors
    that are not converted are reported on stderr. If an earlier call with the same source and target was
    interrupted, this call continues the conversion.

    Return the bytes written by this call and the seconds taken.

    source: folder of the HF checkpoint.
    target: folder of the Megatron checkpoint. It must be empty or absent.
    processes: maximum number of worker processes.

    Raises UserError if the source is incomplete, damaged, pickled or does not fit its config.json. Raises
    UserError also if the target is not empty, if an interrupted call had another source or other source
    files, or if the disk is full.
    """
    refuse_existing(target)
    arch = read_architecture(source)
    checkpoint = hf_checkpoint.HFCheckpoint(source)
    violations = checkpoint.violations(weight_map(arch))
    if violations:
        raise UserError("; ".join(violations))
    for note in checkpoint.notes:
        print(note, file=sys.stderr)
    # Imported here and not at the top, because the worker processes need no Megatron.
    from grpo_megatron.megatron.state.model_layout import saved_model

    saved = saved_model(arch)
    units = _units(saved, arch)
    plan = {
        "source": str(Path(source).absolute()),
        "files": files_of(source, (".safetensors", ".json")),
        "units": len(units),
    }
    folder = PartialFolder(target, plan)
    weights = folder.result / WEIGHTS
    weights.mkdir(exist_ok=True)
    missing = [unit for unit in units if folder.note(_inside(unit)) is None]
    total = sum(chunk.nbytes for unit in missing for chunk in unit.chunks)
    folder.check_space(total)
    converter = _Converter(source, weights)
    progress = run(
        converter,
        missing,
        processes,
        target,
        total,
        lambda unit, places: folder.add_note(_inside(unit), places),
    )
    with writing(weights):
        _finish(folder, weights, saved, arch, units)
        companions = folder.result / COMPANIONS
        hf_writer.copy_companions(source, str(companions), arch.dtype, _changes(source))
        # Training does not change the vision model, so Megatron's files do not contain it.
        hf_writer.copy_vision(source, companions / SINGLE)
        note = {"source": plan["source"], "dtype": str(arch.dtype).removeprefix("torch.")}
        (folder.result / _NOTE).write_text(json_text(note), encoding="utf-8")
    folder.finish()
    return progress


def _changes(source: str) -> dict[str, Any]:
    """Return what to add to config.json in the subfolder hf/: whether the source has stacked experts."""
    return {STACKED: True} if read_stored(Path(source)).stacks is StackForm.rows else {}


def _inside(unit: _Unit) -> str:
    return f"{WEIGHTS}/{unit.name}"


def _units(saved: SavedModel, arch: Architecture) -> list[_Unit]:
    chunks = []
    for part in saved.parts:
        dtype = part.dtype or arch.dtype
        for start, shape in rows_within(part.shape, dtype.itemsize, BUCKET_BYTES):
            at = tuple(np.add(part.at, start).tolist())
            pieces = tuple(found for piece in part.pieces if (found := clipped(piece, at, shape)))
            chunks.append(_Chunk(part.key, at, shape, dtype, pieces))
    limit = file_bytes(sum(chunk.nbytes for chunk in chunks))
    files = filled(((chunk, chunk.nbytes) for chunk in chunks), limit)
    return [_Unit(f"__{index}_0.distcp", inside) for index, (inside, _) in enumerate(files)]


def _finish(
    folder: PartialFolder, weights: Path, saved: SavedModel, arch: Architecture, units: list[_Unit]
) -> None:
    """Write the files of a Megatron checkpoint that contain no tensors.

    There are three: a file with the objects that are not tensors, an empty common.pt, and the metadata. The
    metadata say in which file and at which offset each chunk (a part of a tensor) is.

    folder: the unfinished output, which has recorded the offset and length of each chunk.
    weights: folder to which the files are written.
    saved: all tensors and other objects of the checkpoint.
    arch: architecture of the model.
    units: the files with tensors, which have been written already.
    """
    tensors = {part.key: StoredTensor(part.dtype or arch.dtype, part.full, ()) for part in saved.parts}
    for unit in units:
        for chunk, place in zip(unit.chunks, folder.note(_inside(unit)), strict=True):
            stored = tensors[chunk.key]
            chunks = (*stored.chunks, StoredChunk(chunk.at, chunk.shape, unit.name, *place))
            tensors[chunk.key] = replace(stored, chunks=chunks)
    objects, name = {}, f"__{len(units)}_0.distcp"
    with new_file(weights / name) as file:
        for key, raw in saved.objects.items():
            objects[key] = (name, file.tell(), file.write(raw))
    with new_file(weights / "common.pt") as file:
        torch.save({}, file)
    write_metadata(weights, tensors, objects)

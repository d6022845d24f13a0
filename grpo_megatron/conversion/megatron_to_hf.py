"""Conversion of a Megatron checkpoint (converted or a trainer's, saved in any layout) to an HF checkpoint.

Each safetensors file is one unit of work for a worker process. The file's header is known before any tensor
is read. The process then copies each tensor through one buffer, some rows at a time, to the tensor's offset
in the file.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.conversion.partial_folder import PartialFolder, files_of, refuse_existing
from grpo_megatron.conversion.pool import Progress, run
from grpo_megatron.conversion.sources import (
    COMPANIONS,
    Buffer,
    MegatronTensors,
    buckets,
    megatron_tensors,
    weights_folder,
)
from grpo_megatron.conversion.units import BUCKET_BYTES, file_bytes, filled
from grpo_megatron.errors import UserError
from grpo_megatron.files import new_file, write_buffer, writing
from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.entries import hf_shapes
from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.model.pieces import Shape
from grpo_megatron.weights import fp8_blocks, hf_writer
from grpo_megatron.weights.checkpoint_layout import SavedModel
from grpo_megatron.weights.safetensors_file import Header, bytes_of
from grpo_megatron.weights.stacked_experts import Stack, StackForm, stacks_of
from grpo_megatron.weights.stored import Stored, read_stored
from grpo_megatron.weights.stored_names import in_files

# Largest part of a tensor that is copied at once. It fits into a processor's cache: with parts of 64 MiB,
# reading took three times as long.
_COPY_BYTES = 2 * 2**20
_FP8_BUCKET = BUCKET_BYTES // 8  # smaller, because quantising works on several copies in float32


@dataclass(frozen=True)
class HFTensor:
    """A tensor that is to be written to an HF checkpoint."""

    name: str
    """Name of the tensor in the weight map."""
    in_files: str
    """Name of the tensor in the files."""
    shape: Shape
    """Shape of the tensor."""
    dtype: torch.dtype
    """Dtype in which the tensor is read. The tensor is also written in this dtype, unless `fp8` is set."""
    fp8: bool = False
    """True to write the tensor as float8_e4m3fn with a scale for each block of 128 x 128 elements."""
    stack: Stack | None = None
    """If the tensor is a stack with all experts of a layer: names of its parts in the weight map."""

    @property
    def stored(self) -> list[tuple[str, Shape, torch.dtype]]:
        """Tensors to store in the file for this HF tensor, as a list of (name, shape, dtype).

        If `fp8` is set, two tensors are stored: the FP8 elements and their scales.
        """
        if not self.fp8:
            return [(self.in_files, self.shape, self.dtype)]
        scales = tuple(-(-size // fp8_blocks.BLOCK) for size in self.shape)
        return [
            (self.in_files, self.shape, torch.float8_e4m3fn),
            (f"{self.in_files}_scale_inv", scales, torch.float32),
        ]

    @property
    def nbytes(self) -> int:
        """Number of bytes that the tensor, with its scales, takes in the file."""
        return sum(prod(shape) * dtype.itemsize for _, shape, dtype in self.stored)


@dataclass(frozen=True)
class _Unit:
    """One safetensors file and the tensors that it contains."""

    name: str
    tensors: list[HFTensor]

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass
class _Converter:
    """Job for worker processes: read tensors of a Megatron checkpoint, and write files of an HF checkpoint.

    source: reader of the Megatron checkpoint.
    folder: folder to which the files are written.
    """

    source: MegatronTensors
    folder: Path

    def start(self) -> None:
        self.read, self.buffer = self.source.open(), Buffer()

    def do(self, unit: _Unit, advance) -> None:
        header = Header(stored for tensor in unit.tensors for stored in tensor.stored)
        path = self.folder / unit.name
        with writing(path), new_file(path) as file:
            file.write(header.raw)
            for tensor in unit.tensors:
                write = self._write_stack if tensor.stack else self._write_fp8 if tensor.fp8 else self._write
                write(file, header, tensor, advance)

    def _write_stack(self, file, header: Header, tensor: HFTensor, advance) -> None:
        file.seek(header.start_of(tensor.in_files))
        for names in tensor.stack.experts:
            parts = [torch.empty(tensor.stack.part_shape, dtype=tensor.dtype) for _ in names]
            for name, part in zip(names, parts, strict=True):
                self.read(name, (0,) * part.dim(), part)
            expert = tensor.stack.expert(parts)
            write_buffer(file, bytes_of(expert))
            advance(expert.nbytes)

    def _write(self, file, header: Header, tensor: HFTensor, advance) -> None:
        file.seek(header.start_of(tensor.in_files))
        for rows in buckets(self.read, tensor.name, tensor.shape, tensor.dtype, _COPY_BYTES, self.buffer):
            write_buffer(file, bytes_of(rows))
            advance(rows.nbytes)

    def _write_fp8(self, file, header: Header, tensor: HFTensor, advance) -> None:
        file.seek(header.start_of(tensor.in_files))
        scales = []
        for rows in buckets(
            self.read,
            tensor.name,
            tensor.shape,
            tensor.dtype,
            _FP8_BUCKET,
            self.buffer,
            multiple=fp8_blocks.BLOCK,
        ):
            try:
                values, scale = fp8_blocks.quantise(rows)
            except ValueError as error:
                raise UserError(
                    f"{self.source.folder}: {tensor.name} cannot be converted to FP8, because {error}; use "
                    "an earlier checkpoint"
                ) from error
            scales.append(scale)
            write_buffer(file, bytes_of(values))
            advance(values.nbytes + scale.nbytes)
        file.seek(header.start_of(f"{tensor.in_files}_scale_inv"))
        write_buffer(file, bytes_of(torch.cat(scales)))


def companions_of(source: str, hf: str | None) -> str:
    """Return the folder with the configuration and the tokenizer of a Megatron checkpoint's model.

    source: folder of the Megatron checkpoint. Its subfolder hf/ is returned if `hf` is None.
    hf: folder that the user has given, which is returned unless it is None.

    Raises UserError if the folder has no config.json.
    """
    folder = hf or f"{source}/{COMPANIONS}"
    if not Path(folder, "config.json").is_file():
        raise UserError(f"{folder} has no config.json; give the model's HF folder with --hf")
    return folder


def megatron_to_hf(
    source: str,
    target: str,
    hf: str | None,
    processes: int,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
) -> Progress:
    """Convert a Megatron checkpoint, without its optimizer states, to an HF checkpoint.

    If an earlier call with the same arguments was interrupted, this call continues the conversion. Returns
    the bytes written by this call and the seconds taken.

    source: folder of the Megatron checkpoint.
    target: folder of the HF checkpoint. It must be empty or absent.
    hf: folder with the model's configuration and tokenizer. None: `source`/hf of a converted checkpoint.
    processes: maximum number of worker processes.
    dtype: dtype of the written tensors. None: the dtype in config.json.
    fp8: True to write the matrices of attention, experts and MLPs in block-scaled FP8, like DeepSeek-V3.

    Raises UserError if the source is incomplete, damaged, pickled or of another model, or if a matrix for FP8
    contains NaN or infinity. Raises UserError also if the target is not empty, if an interrupted call had
    other arguments or source files, if the disk is full, or if the model cannot be in FP8.
    """
    refuse_existing(target)
    weights, companions = weights_folder(source), companions_of(source, hf)
    arch = read_architecture(companions)
    # Imported here and not at the top, because the worker processes need no Megatron.
    from grpo_megatron.megatron.state.model_layout import saved_model

    saved = saved_model(arch)
    stored, dtype_of_all = read_stored(Path(companions)), dtype or arch.dtype
    tensors = _tensors_to_write(saved, arch, dtype_of_all, stored, fp8)
    units = _units(tensors, further=1 if stored.with_vision else 0)
    plan = {
        "source": str(weights.absolute()),
        "files": files_of(weights, (".distcp", ".metadata")),
        "configuration": files_of(companions, (".json",)),
        "dtype": str(dtype),
        "fp8": fp8,
        "units": len(units),
    }
    converter = _Converter(megatron_tensors(weights, saved), Path())
    folder = PartialFolder(target, plan)
    converter.folder = folder.result
    # The largest units come first. The output layer is the last tensor and often has a file of its own; at
    # the end it would keep one process busy after all others have finished.
    missing = sorted(
        (unit for unit in units if folder.note(unit.name) is None), key=_Unit.nbytes, reverse=True
    )
    total = sum(unit.nbytes() for unit in missing)
    folder.check_space(total)
    progress = run(
        converter, missing, processes, target, total, lambda unit, _: folder.add_note(unit.name, True)
    )
    with writing(folder.result):
        _write_rest(folder.result, units, companions, dtype_of_all)
    folder.finish()
    return progress


def _tensors_to_write(
    saved: SavedModel, arch: Architecture, dtype: torch.dtype, stored: Stored, fp8: bool
) -> list[HFTensor]:
    """Return the tensors to write to an HF checkpoint, with shapes and dtypes, in the weight map's order.

    A tied output layer is left out, because the Megatron checkpoint does not store it.

    saved: the place of each parameter in the Megatron checkpoint.
    arch: architecture of the model.
    dtype: dtype of all tensors, except those that have the same dtype in every training precision, such as a
        router's bias.
    stored: properties of the model's HF checkpoints.
    fp8: True to write the matrices of the layers, except those of routers, in FP8.

    Raises UserError if `fp8` is set for gpt-oss, whose files have all experts of a layer in one tensor.
    """
    fixed = {piece.hf: part.dtype for part in saved.parts for piece in part.pieces}
    router = {piece.hf for part in saved.parts if ".router." in part.key for piece in part.pieces}
    tensors = [
        HFTensor(
            name,
            in_files(name, stored.prefix),
            shape,
            fixed[name] or dtype,
            fp8 and ".layers." in name and len(shape) == 2 and name not in router,
        )
        for name, shape in hf_shapes(weight_map(arch)).items()
        if name in fixed  # a tied output layer is not stored
    ]
    if fp8 and stored.stacks is StackForm.interleaved:
        raise UserError(f"{arch.family} cannot be written in FP8; convert it without --fp8")
    # In FP8, each expert has scales of its own, and so its own tensors.
    return _stacked(tensors, stored) if stored.stacks and not fp8 else tensors


def _stacked(tensors: list[HFTensor], stored: Stored) -> list[HFTensor]:
    """Return the tensors to write with stacks of all experts of a layer in place of tensors of experts."""
    found = {tensor.name: tensor for tensor in tensors}
    for stack in stacks_of({tensor.name: tensor.shape for tensor in tensors}, stored.stacks):
        parts = [found.pop(name) for names in stack.experts for name in names]
        name = in_files(stack.name, stored.prefix)
        found[stack.name] = HFTensor(stack.name, name, stack.shape, parts[0].dtype, stack=stack)
    return list(found.values())


def _units(tensors: list[HFTensor], further: int) -> list[_Unit]:
    """Divide tensors into files of about equal size.

    further: number of further files that the checkpoint has, which come after these.
    """
    sized = [(tensor, tensor.nbytes) for tensor in tensors]
    files = filled(sized, file_bytes(sum(size for _, size in sized)))
    count = len(files) + further
    return [_Unit(hf_writer.shard_name(index, count), inside) for index, (inside, _) in enumerate(files)]


def _quantization_config(tensors: list[HFTensor]) -> dict[str, Any]:
    """Return the entry quantization_config of the config.json of an output whose matrices are in FP8.

    tensors: the tensors that are written. The entry lists those matrices that are not in FP8.
    """
    kept = [
        t.in_files.removesuffix(".weight")
        for t in tensors
        if ".layers." in t.name and len(t.shape) == 2 and not t.fp8
    ]
    return fp8_blocks.settings(["lm_head", *kept])


def _write_rest(folder: Path, units: list[_Unit], companions: str, dtype: torch.dtype) -> None:
    """Write all files but those of the units: configuration, tokenizer, vision model and index.

    companions: folder with the configuration and tokenizer of the model, and with its vision model if it has
        one.
    dtype: dtype of the written tensors, for config.json.
    """
    tensors = [tensor for unit in units for tensor in unit.tensors]
    is_fp8 = any(tensor.fp8 for tensor in tensors)
    changes = {"quantization_config": _quantization_config(tensors)} if is_fp8 else {}
    hf_writer.copy_companions(companions, str(folder), dtype, changes)
    name = hf_writer.shard_name(len(units), len(units) + 1)
    vision = hf_writer.copy_vision(companions, folder / name)
    stored = [
        (name, shape, dtype, unit.name)
        for unit in units
        for tensor in unit.tensors
        for name, shape, dtype in tensor.stored
    ]
    hf_writer.write_index(
        folder,
        {name: file for name, _, _, file in stored} | dict.fromkeys(vision, name),
        sum(prod(shape) * dtype.itemsize for _, shape, dtype, _ in stored) + sum(vision.values()),
    )

"""Reader of HF checkpoint folders, one tensor at a time."""

from math import prod
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.files import fill_buffer
from grpo_megatron.model.entries import Entry, hf_shapes
from grpo_megatron.model.pieces import Shape, box
from grpo_megatron.paths import folder_problem
from grpo_megatron.weights.checkpoint_layout import rows_within
from grpo_megatron.weights.safetensors_file import TYPES, bytes_of, starts
from grpo_megatron.weights.stacked_experts import (
    InterleavedInStack,
    Mxfp4InStack,
    RowsOfStack,
    StackForm,
    StoredPlace,
)
from grpo_megatron.weights.stored import (
    FP8,
    SCALES,
    Stored,
    dequantised,
    read_stored,
    scales_box,
    scales_shape,
)
from grpo_megatron.weights.stored_names import in_files, places
from grpo_megatron.weights.weight_files import (
    files_of_tensors,
    open_safetensors,
    some,
    weights_beside,
)

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_BYTES = 64 * 2**20

# Dtypes, by their safetensors names, that can be loaded into a parameter directly. Integers and FP8 are
# quantised weights, which are meaningless without their scales. Block-scaled FP8 is dequantised while it is
# read.
_LOADABLE = ("F64", "F32", "F16", "BF16")
_TORCH_TYPES = {name: dtype for dtype, name in TYPES.items()}


class HFCheckpoint:
    """A reader of an HF checkpoint folder (safetensors). It reads one tensor at a time, into CPU memory.

    Names of tensors are those of the weight map. In the files, they may have a prefix, and all experts of a
    layer may be in one tensor (weights.stored_names).

    raw: False to dequantise block-scaled FP8 tensors to float32, and MXFP4 to bfloat16. True to return all
        tensors as they are stored, under the names in the files, and to treat all layers alike.

    The constructor raises UserError if the folder or a weight file is missing or damaged, if the folder has
    two sets of weights (such as model.safetensors beside the files of an index), or if a file lacks a tensor
    that the index lists. Unless `raw` is True, the constructor also raises UserError if config.json is
    damaged, or if the weights are quantised in another way than block-scaled FP8.
    """

    def __init__(self, folder: str, raw: bool = False):
        self.folder = Path(folder)
        self._files: dict[Path, Any] = {}
        self._starts: dict[Path, dict[str, int]] = {}
        problem = folder_problem(folder)
        if problem:
            raise UserError(f"{folder} {problem}; it must be a folder with an HF checkpoint")
        self._where = files_of_tensors(self.folder)
        self._stored = Stored() if raw else read_stored(self.folder)
        self._places = places(
            self._where,
            self._stored.prefix,
            self._shape_in_files if self._stored.stacks else None,
        )

    def _shape_in_files(self, name: str) -> Shape:
        return tuple(self._open(self._where[name]).get_slice(name).get_shape())

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = open_safetensors(path)
        return self._files[path]

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def unread(self, entries: dict[str, Entry]) -> list[str]:
        """Return the sorted names of the checkpoint's tensors that the model unexpectedly does not use.

        A non-empty list shows that config.json does not belong to the weights. Some unused tensors are normal
        and not listed: those of multi-token prediction layers (`left_out`) and of a vision model, the scales
        of FP8 tensors, RoPE's inverse frequencies, and the output layer of a model with a tied embedding.

        entries: {Megatron name: parameter with its HF names}, as model.families.weight_map returns them.
        """
        promised = {name for entry in entries.values() for name in entry.hf}
        scales = {name + SCALES for name in (promised | {_HEAD}) & self.names if self.is_fp8(name)}
        unread = self.names - promised - scales - {*self.left_out, *self.vision}
        return sorted(n for n in unread if n != _HEAD and not n.endswith("rotary_emb.inv_freq"))

    @property
    def left_out(self) -> list[str]:
        """Sorted names of tensors of multi-token prediction layers, which are neither trained nor exported.

        The list is empty if the reader was created with raw=True.
        """
        return sorted(name for name in self.names if name.startswith(self._stored.left_out))

    @property
    def vision(self) -> list[str]:
        """Sorted names of the tensors of a vision model, which are not trained, but exported.

        The list is empty if there is no vision model, or if the reader was created with raw=True.
        """
        if self._stored.with_vision is None:
            return []
        return sorted(name for name in self.names if name.startswith(self._stored.with_vision.vision))

    @property
    def notes(self) -> list[str]:
        """Messages for the user about files or tensors of the folder that are not loaded; often empty."""
        beside = weights_beside(self.folder, self._where)
        found = [beside] if beside else []
        if self.left_out:
            layers = ", ".join(f"{prefix}*" for prefix in self._stored.left_out)
            found.append(
                f"{self.folder}: the {len(self.left_out)} tensors {layers} belong to multi-token prediction "
                "layers; they are neither trained nor exported"
            )
        if self.vision:
            found.append(
                f"{self.folder}: the {len(self.vision)} tensors of the vision model are not trained; exports "
                "contain them unchanged"
            )
        return found

    def violations(self, entries: dict[str, Entry]) -> list[str]:
        """Check, before loading, that the checkpoint has exactly the tensors that its config.json requires.

        Names, shapes and dtypes are checked. Return one sentence for each kind of error; the list is empty if
        there is no error. Only the headers of the files are read, with one exception: if config.json ties the
        output layer to the embedding but the files contain both, the values of the two are compared.

        entries: {Megatron name: parameter with its HF names and shapes}, as model.families.weight_map returns
            them for the model in config.json.
        """
        promised = hf_shapes(entries)
        found = []
        missing = [in_files(name, self._stored.prefix) for name in promised if name not in self._places]
        if missing:
            hint = (
                "; if the embedding is also the output layer, set tie_word_embeddings: true in config.json"
                if _HEAD in missing
                else "; check that config.json belongs to these weights"
            )
            found.append(
                f"{self.folder}: config.json requires tensors that are missing: {some(missing)}{hint}"
            )
        unread = self.unread(entries)
        if unread:
            found.append(
                f"{self.folder}: config.json describes a model without these tensors: {some(unread)}; check "
                "that it belongs to these weights"
            )
        if (
            any(entry.hf == (_EMBEDDING,) and not entry.exported for entry in entries.values())
            and self._has_other_head()
        ):
            found.append(
                f"{self.folder}: {_HEAD} differs from {_EMBEDDING}, although config.json ties them; set "
                f"tie_word_embeddings: false in config.json to use both, or remove {_HEAD} to use only "
                f"{_EMBEDDING}"
            )
        wrong, types = [], []
        for name, shape in promised.items():
            if name in self._places:
                header = self._slice(name)
                if tuple(header.get_shape()) != shape:
                    wrong.append(
                        f"{name} of shape {tuple(header.get_shape())}, but config.json requires {shape}"
                    )
                if header.get_dtype() not in _LOADABLE and not (
                    header.get_dtype() == FP8 and self._stored.block
                ):
                    types.append(f"{name} of type {header.get_dtype()}")
                elif header.get_dtype() == FP8 and (problem := self._scales_problem(name, shape)):
                    wrong.append(problem)
        if wrong:
            found.append(f"{self.folder} has {some(wrong, '; ')}; check that config.json matches the weights")
        if types:
            found.append(
                f"{self.folder} has {some(types)}; only {', '.join(_LOADABLE)} can be loaded, and {FP8} "
                "if config.json has a quantization_config.weight_block_size"
            )
        return found

    def _has_other_head(self) -> bool:
        """Return True if the files have an output layer whose shape or values differ from the embedding's.

        The values are compared in the less precise of the two tensors' dtypes, because some tools write only
        one of the two tied tensors in float32.
        """
        if not {_HEAD, _EMBEDDING} <= self.names:
            return False
        (shape, dtype), (embedding_shape, embedding_dtype) = self.header(_HEAD), self.header(_EMBEDDING)
        if shape != embedding_shape or not (dtype.is_floating_point and embedding_dtype.is_floating_point):
            return True
        coarser = min(dtype, embedding_dtype, key=lambda kind: kind.itemsize)
        for start, rows in rows_within(shape, torch.float32.itemsize, _COMPARED_BYTES):
            head, embedding = (self.read_slice(name, start, rows).to(coarser) for name in (_HEAD, _EMBEDDING))
            if not torch.equal(head, embedding):
                return True
        return False

    def _scales_problem(self, name: str, shape: Shape) -> str | None:
        """Return a phrase for an error message if an FP8 tensor cannot be dequantised, else None.

        An FP8 tensor can be dequantised if it is a matrix and has scales of the right shape and dtype.

        name: name of the FP8 tensor.
        shape: shape of the FP8 tensor.
        """
        if len(shape) != 2:
            return f"{name} of type {FP8}, which only matrices can have"
        if name + SCALES not in self._places:
            return f"{name} of type {FP8}, but not its scales {name + SCALES}"
        header, expected = self._slice(name + SCALES), scales_shape(shape, self._stored.block)
        if tuple(header.get_shape()) != expected or header.get_dtype() not in ("F32", "BF16"):
            return (
                f"{name + SCALES} of type {header.get_dtype()} and shape {tuple(header.get_shape())}, "
                f"but F32 and {expected} are required"
            )
        return None

    def _slice(self, name: str) -> Any:
        """Return the safetensors library's handle of a tensor, which reads shape, dtype and slices on demand.

        Raises UserError if the checkpoint does not have the tensor.
        """
        file, place = self._file_of(name), self._places[name]
        whole = file.get_slice(place.name)
        if place.expert is None:
            return whole
        if place.scales is not None:
            return Mxfp4InStack(whole, self._scales_of(place), place)
        return (InterleavedInStack if self._stored.stacks == StackForm.interleaved else RowsOfStack)(
            whole, place
        )

    def _scales_of(self, place: StoredPlace) -> Any:
        """Return the safetensors library's handle of the scales of a stack of experts in MXFP4.

        Raises UserError if the checkpoint does not have them.
        """
        if place.scales not in self._where:
            raise UserError(
                f"{self.folder}: tensor {place.scales} is missing; copy or download the checkpoint again"
            )
        return self._open(self._where[place.scales]).get_slice(place.scales)

    def is_fp8(self, name: str) -> bool:
        """Return True if a tensor is stored in block-scaled FP8, so that reading it dequantises it."""
        return self._stored.block is not None and self._slice(name).get_dtype() == FP8

    def header(self, name: str) -> tuple[Shape, torch.dtype]:
        """Return the (shape, dtype) of the tensor that `read` would return, without reading its elements.

        Raises UserError if the checkpoint lacks the tensor, or has it in a dtype that this project does not
        read.
        """
        described = self._slice(name)
        if described.get_dtype() not in _TORCH_TYPES:
            raise UserError(
                f"{self.folder}: {name} has the type {described.get_dtype()}, which is not supported; "
                "convert it to one of the types " + ", ".join(_TORCH_TYPES)
            )
        dtype = torch.float32 if self.is_fp8(name) else _TORCH_TYPES[described.get_dtype()]
        return tuple(described.get_shape()), dtype

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor, on the CPU. Raises UserError if the checkpoint does not have the tensor."""
        file, place = self._file_of(name), self._places[name]
        if place.expert is None and not self.is_fp8(name):
            return file.get_tensor(place.name)
        shape = tuple(self._slice(name).get_shape())
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """Return tensor[start : start + shape], a rectangle of a tensor, without reading the rest.

        Raises UserError if the checkpoint does not have the tensor.
        """
        values = self._slice(name)[box(start, shape)]
        if not self.is_fp8(name):
            return values
        scales = self._slice(name + SCALES)[box(*scales_box(start, shape, self._stored.block))]
        return dequantised(values, scales, start, self._stored.block)

    def read_into(self, name: str, start: Shape, out: torch.Tensor) -> None:
        """Fill `out` with tensor[start : start + out.shape], cast to the dtype of `out`.

        This is faster than copying the result of `read_slice`, if `out` takes whole rows and needs no cast.
        The bytes are then read directly from the file into `out`.

        start: index of the first element to read, one number per dimension.
        Raises UserError if the checkpoint does not have the tensor, or if the file ends too early.
        """
        shape, dtype = self.header(name)
        whole_rows = out.is_contiguous() and tuple(out.shape[1:]) == shape[1:]
        handle, place = self._slice(name), self._places[name]
        as_stored = place.expert is None or isinstance(handle, RowsOfStack)
        if not whole_rows or not as_stored or dtype != out.dtype or self.is_fp8(name):
            out.copy_(self.read_slice(name, start, tuple(out.shape)))
            return
        path = self._where[place.name]
        if path not in self._starts:
            self._starts[path] = starts(path)
        row = start[0] if shape else 0
        if isinstance(handle, RowsOfStack):
            row += handle.first_row
        first = self._starts[path][place.name] + row * prod(shape[1:]) * dtype.itemsize
        with open(path, "rb", buffering=0) as file:
            is_filled = fill_buffer(bytes_of(out), file, first)
        if not is_filled:
            raise UserError(f"{path} is truncated; copy the checkpoint again")

    def _file_of(self, name: str) -> Any:
        if name not in self._places:
            raise UserError(
                f"{self.folder}: tensor {in_files(name, self._stored.prefix)} is missing; copy or download "
                "the checkpoint again"
            )
        return self._open(self._where[self._places[name].name])

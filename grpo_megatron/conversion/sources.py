"""Readers of the tensors in a checkpoint of HF's or Megatron's format.

They read any rectangle of a tensor, so that no tensor has to be in memory as a whole.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.conversion.units import BUCKET_BYTES
from grpo_megatron.errors import UserError
from grpo_megatron.model.adapters import is_adapter
from grpo_megatron.model.gguf_advice import gguf_advice
from grpo_megatron.model.pieces import Piece, Shape, box
from grpo_megatron.paths import folder_problem, is_absent
from grpo_megatron.weights.checkpoint_layout import SavedModel, rows_within
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.pickled import pickled_weights
from grpo_megatron.weights.torch_dist import TorchDistReader, read_metadata

WEIGHTS = "actor"  # subfolder with the weights, in a converted checkpoint and in a trainer's
COMPANIONS = "hf"  # subfolder with configuration and tokenizer, in a converted checkpoint
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


# Reads a part of a tensor: read(name, start, out) fills `out` with tensor[start : start + out.shape], cast to
# the dtype of `out`. It raises UserError if the checkpoint is damaged or lacks the tensor.
Read = Callable[[str, Shape, torch.Tensor], None]


def hf_reader(folder: str, raw: bool = False) -> Read:
    """Open an HF checkpoint, and return the function that reads its tensors.

    raw: True to read FP8 tensors as they are stored, without dequantising them.
    """
    return HFCheckpoint(folder, raw).read_into


def key_reader(folder: Path) -> Read:
    """Open a Megatron checkpoint of any model, and return the function that reads its tensors by their keys.

    folder: folder with the checkpoint's weight files.
    """
    return TorchDistReader(folder).read


@dataclass
class MegatronTensors:
    """Reader of the tensors in a Megatron checkpoint by their HF names.

    It is created without opening files, sent to the worker processes, and opened there.

    Megatron arranges weights in its own way, so an HF tensor can be divided into rectangles that lie in one
    or more Megatron tensors. Together, the rectangles cover the HF tensor completely.

    folder: folder with the checkpoint's weight files.
    places: {HF name: [(key of a Megatron tensor, Piece)]}. A Piece is a rectangle of the HF tensor, with the
        rectangle's position in the Megatron tensor.
    """

    folder: Path
    places: dict[str, list[tuple[str, Piece]]]

    def open(self) -> Read:
        """Open the checkpoint, and return the method `read`, which reads parts of HF tensors from it."""
        self.reader = TorchDistReader(self.folder)
        return self.read

    def read(self, name: str, start: Shape, out: torch.Tensor) -> None:
        """Fill `out` with tensor[start : start + out.shape] of the HF tensor, cast to the dtype of `out`.

        Raises UserError if the checkpoint is damaged.
        """
        filled, end = 0, np.add(start, out.shape)
        for key, piece in self.places[name]:
            low = np.maximum(start, piece.start)
            size = np.minimum(end, np.add(piece.start, piece.shape)) - low
            if (size <= 0).any():
                continue
            lead = len(piece.at) - len(piece.shape)
            at = (*piece.at[:lead], *np.add(piece.at[lead:], low - piece.start).tolist())
            part = out[box(tuple((low - start).tolist()), tuple(size.tolist()))]
            self.reader.read(key, at, part[(None,) * lead])
            filled += part.numel()
        if filled != out.numel():
            raise RuntimeError(
                f"the weight map in grpo_megatron/model/families does not cover all elements of {name}"
            )

    def shape(self, name: str) -> Shape:
        """Return the shape of the whole HF tensor."""
        return tuple(
            np.max([np.add(piece.start, piece.shape) for _, piece in self.places[name]], axis=0).tolist()
        )


def hf_files(path: str) -> bool:
    """Return True if a folder has files of an HF checkpoint: safetensors files, their index, or both."""
    return any(Path(path).glob("*.safetensors")) or any(Path(path).glob("*.safetensors.index.json"))


def weights_folder(source: str) -> Path:
    """Return the folder with the weight files of a Megatron checkpoint: `source`/actor or `source` itself.

    The checkpoint may come from hf_to_megatron, from a training run, or from Megatron-LM. Raises UserError if
    neither folder has weight files.
    """
    root = Path(source)
    if advice := gguf_advice(root):
        raise UserError(f"{source} {advice}")
    problem = folder_problem(root)
    if problem:
        raise UserError(f"{source} {problem}; it must be a folder with a Megatron checkpoint")
    for folder in (root / WEIGHTS, root):
        if not is_absent(folder / ".metadata"):
            return folder
    reason = (
        pickled_weights(root)
        or f"has no {WEIGHTS}/ folder with weights in Megatron's distributed format (a file .metadata)"
    )
    raise UserError(f"{source} {reason}")


def megatron_tensors(folder: Path, saved: SavedModel) -> MegatronTensors:
    """Check a Megatron checkpoint, and return a reader that reads its tensors by their HF names.

    folder: folder with the checkpoint's weight files.
    saved: the tensors that a Megatron checkpoint of this model has, and which HF tensors they consist of.

    Raises UserError unless the checkpoint has all tensors that this model saves, in the right shapes. Raises
    UserError also if the reader would ignore weights: those of adapters, or of an output layer that differs
    from the embedding although config.json says that the two are tied.
    """
    stored = read_metadata(folder)
    if any(is_adapter(key) for key in stored):
        raise UserError(
            f"{folder} was saved with adapters (megatron.lora), which the conversion would drop; use the HF "
            "folder that the training run exported instead: hf/ contains the merged model, and hf/adapter "
            "the adapters"
        )
    places = defaultdict(list)
    for part in saved.parts:
        if part.key not in stored:
            raise UserError(
                f"{folder} has no tensor {part.key}, which config.json requires; use the config.json of the "
                "model that this checkpoint is for"
            )
        if stored[part.key].shape != part.full and not part.padded:
            raise UserError(
                f"{folder} has {part.key} of shape {stored[part.key].shape}, but config.json requires "
                f"{part.full}; use the config.json of the model that this checkpoint is for"
            )
        for piece in part.pieces:
            places[piece.hf].append((part.key, piece))
    if (
        _HEAD in stored
        and _HEAD not in {part.key for part in saved.parts}
        and _differ(folder, _HEAD, _EMBEDDING)
    ):
        raise UserError(
            f"{folder} has an output layer ({_HEAD}) that differs from the embedding ({_EMBEDDING}) and "
            "would be lost, because config.json ties the two; set tie_word_embeddings: false in config.json"
        )
    return MegatronTensors(folder, dict(places))


def _differ(folder: Path, first: str, second: str) -> bool:
    """Return True if two tensors of a Megatron checkpoint, given by their keys, differ in shape or values."""
    reader = TorchDistReader(folder)
    shape, dtype = reader.tensors[first].shape, reader.tensors[first].dtype
    if reader.tensors[second].shape != shape:
        return True
    for start, rows in rows_within(shape, dtype.itemsize, BUCKET_BYTES):
        parts = torch.empty(2, *rows, dtype=dtype)
        for key, part in zip((first, second), parts, strict=True):
            reader.read(key, start, part)
        if not torch.equal(*parts):
            return True
    return False


class Buffer:
    """Reusable memory for parts of tensors. Allocating new memory would take longer than filling it."""

    def __init__(self):
        self._raw = np.empty(0, np.uint8)

    def tensor(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in this memory. The next call overwrites the tensor.

        The tensor is contiguous and covers its whole storage, as the writer of Megatron's files requires.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._raw.nbytes < size:
            self._raw = np.empty(size, np.uint8)
        return torch.from_numpy(self._raw[:size]).view(dtype).view(shape)


def buckets(
    read: Read,
    name: str,
    shape: Shape,
    dtype: torch.dtype,
    limit: int,
    buffer: Buffer,
    multiple: int = 1,
):
    """Read a tensor piece by piece: yield its rows from first to last, in parts of at most `limit` bytes.

    All parts use the same memory, so a part is valid only until the next one is requested.

    read: reads the checkpoint's tensors.
    name: name of the tensor.
    shape: shape of the tensor.
    dtype: dtype of the yielded parts.
    buffer: the memory for the parts.
    multiple: every part except the last has a number of rows that is divisible by `multiple`. A part has at
        least this many rows, even if they exceed `limit`.
    """
    for start, size in rows_within(shape, dtype.itemsize, limit, multiple):
        out = buffer.tensor(size, dtype)
        read(name, start, out)
        yield out

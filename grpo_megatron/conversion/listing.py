"""Listing of a checkpoint's tensors (name, shape, dtype, bytes, digest), and comparison of two listings.

This is the work of tools/inspect_checkpoint.py.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import torch

from grpo_megatron.conversion.pool import run
from grpo_megatron.conversion.sources import (
    COMPANIONS,
    Buffer,
    Read,
    buckets,
    hf_files,
    hf_reader,
    key_reader,
    megatron_tensors,
    weights_folder,
)
from grpo_megatron.conversion.units import BUCKET_BYTES, file_bytes, filled
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.pieces import Shape
from grpo_megatron.paths import is_absent
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.stacked_experts import StackForm
from grpo_megatron.weights.stored import read_stored
from grpo_megatron.weights.stored_names import MODEL, in_files
from grpo_megatron.weights.torch_dist import read_metadata

_OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Described:
    """Name, shape and dtype of a tensor in a checkpoint, without its values.

    digest: SHA-256 of the elements in row-major order, little-endian, in hexadecimal; None if not requested.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    digest: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def type(self) -> str:
        """Name of the dtype, such as bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Listing:
    """The description of all tensors of a checkpoint, to be printed or compared with another checkpoint.

    path: the checkpoint, as the user named it.
    kind: format of the checkpoint: "HF", "Megatron" (listed by HF's names) or "Megatron, its own keys".
    tensors: the tensors, sorted by name. The names are Megatron's keys for the last kind, else HF's names.
    """

    path: str
    kind: str
    tensors: list[Described]

    def as_json(self) -> dict:
        rows = [asdict(tensor) | {"dtype": tensor.type, "bytes": tensor.nbytes} for tensor in self.tensors]
        return {"path": self.path, "kind": self.kind, "tensors": rows}

    def text(self) -> str:
        width = max((len(tensor.name) for tensor in self.tensors), default=0)
        lines = [f"{self.path}: {self.kind}"]
        for tensor in self.tensors:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(
                f"  {tensor.name:<{width}}  {shape:>16}  {tensor.type:<14}{tensor.nbytes:>14,}  "
                f"{(tensor.digest or '')[:16]}"
            )
        count = sum(prod(tensor.shape) for tensor in self.tensors)
        size = sum(tensor.nbytes for tensor in self.tensors)
        return "\n".join([*lines, f"  {len(self.tensors)} tensors, {count:,} elements, {size:,} bytes"])


@dataclass
class _Hasher:
    """Job for worker processes: compute the SHA-256 digests of tensors.

    open_source: opens the checkpoint, and returns the function that reads its tensors.
    """

    open_source: Callable[[], Read]

    def start(self) -> None:
        self.read = self.open_source()
        self.buffer = Buffer()

    def do(self, unit: list[Described], advance) -> list[str]:
        found = []
        for tensor in unit:
            digest = hashlib.sha256()
            for rows in buckets(
                self.read, tensor.name, tensor.shape, tensor.dtype, BUCKET_BYTES, self.buffer
            ):
                digest.update(rows.contiguous().view(-1).view(torch.uint8).numpy().data)
                advance(rows.nbytes)
            found.append(digest.hexdigest())
        return found


def listing(path: str, hf: str | None, keys: bool, digests: bool, processes: int) -> Listing:
    """List all tensors in a checkpoint with name, shape, dtype and, if requested, digest.

    Optimizer states are left out. The experts of gpt-oss are listed one by one, as a Megatron checkpoint has
    them, although HF files have all experts of a layer in one tensor. Such tensors of Qwen3.5's HF files are
    listed whole.

    path: folder of an HF checkpoint, or of a Megatron checkpoint from hf_to_megatron, a training run or
        Megatron-LM.
    hf: HF folder of the model that a Megatron checkpoint belongs to. None: the checkpoint's own subfolder
        hf/. If this subfolder has no config.json, the tensors are listed by Megatron's keys.
    keys: True to list a Megatron checkpoint by Megatron's keys instead of HF's names.
    digests: True to compute a SHA-256 digest of every tensor.
    processes: maximum number of worker processes that compute digests.

    Raises UserError if there is no checkpoint at `path`, or a damaged one, or if the folder `hf` of a
    Megatron checkpoint is given but has no config.json.
    """
    prefix = MODEL
    if hf_files(path):
        raw = not _has_stacks(path)
        kind, open_source = "HF", partial(hf_reader, path, raw=raw)
        checkpoint = HFCheckpoint(path, raw=raw)
        tensors = [Described(name, *checkpoint.header(name)) for name in sorted(checkpoint.names)]
    else:
        weights = weights_folder(path)
        stored = read_metadata(weights)
        companions = hf or f"{path}/{COMPANIONS}"
        if hf and is_absent(Path(hf, "config.json")):
            raise UserError(f"{hf} has no config.json; give the model's HF folder with --hf")
        if keys or not Path(companions, "config.json").is_file():
            kind, open_source = "Megatron, its own keys", partial(key_reader, weights)
            own = sorted(key for key in stored if not key.startswith(_OPTIMIZER))
            tensors = [Described(key, stored[key].shape, stored[key].dtype) for key in own]
        else:
            from grpo_megatron.megatron.state.model_layout import saved_model

            source = megatron_tensors(weights, saved_model(read_architecture(companions)))
            kind, open_source = "Megatron", source.open
            prefix = read_stored(Path(companions)).prefix
            tensors = [
                Described(name, source.shape(name), stored[source.places[name][0][0]].dtype)
                for name in sorted(source.places)
            ]
    if digests:
        tensors = _with_digests(path, open_source, tensors, processes)
    # Megatron checkpoints are read by the weight map's names. HF files with a vision model have others.
    named = [replace(tensor, name=in_files(tensor.name, prefix)) for tensor in tensors]
    return Listing(path, kind, sorted(named, key=lambda tensor: tensor.name))


def _has_stacks(path: str) -> bool:
    """Return True if the files of an HF checkpoint have all experts of a layer in one tensor, as in gpt-oss.

    False also if config.json cannot be read, because a listing does not need it.
    """
    try:
        return read_stored(Path(path)).stacks == StackForm.interleaved
    except UserError:
        return False


def _with_digests(
    path: str, open_source: Callable[[], Read], tensors: list[Described], processes: int
) -> list[Described]:
    total = sum(tensor.nbytes for tensor in tensors)
    units = [unit for unit, _ in filled(((tensor, tensor.nbytes) for tensor in tensors), file_bytes(total))]
    found: dict[str, str] = {}

    def keep(unit: list[Described], digests: list[str]) -> None:
        found.update(zip((tensor.name for tensor in unit), digests, strict=True))

    run(_Hasher(open_source), units, processes, path, total, keep)
    return [replace(tensor, digest=found[tensor.name]) for tensor in tensors]


def differences(first: Listing, second: Listing) -> list[str]:
    """Compare the listings of two checkpoints. Return one line of text for each tensor that differs.

    A tensor differs if only one listing has it, or if its shape, dtype or digest differs. Either both
    listings must have digests, or neither. Without digests, values are not compared.
    """
    a, b = ({tensor.name: tensor for tensor in listing.tensors} for listing in (first, second))
    found = [f"{name}: only in {first.path}" for name in sorted(a.keys() - b.keys())]
    found += [f"{name}: only in {second.path}" for name in sorted(b.keys() - a.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name].shape != b[name].shape:
            found.append(f"{name}: shape {list(a[name].shape)} and {list(b[name].shape)}")
        elif a[name].dtype != b[name].dtype:
            found.append(f"{name}: {a[name].type} and {b[name].type}")
        elif a[name].digest != b[name].digest:
            found.append(f"{name}: different values")
    return found

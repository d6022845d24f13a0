"""HF checkpoint folders: reading tensor by tensor, writing in shards."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_megatron.errors import UserError, shortened
from grpo_megatron.json_files import read_object
from grpo_megatron.model.entries import Entry, hf_shapes
from grpo_megatron.model.pieces import Shape, box
from grpo_megatron.paths import file_problem, folder_problem, is_absent
from grpo_megatron.weights.pickled import pickled_weights
from grpo_megatron.weights.safetensors_file import TYPES

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


# safetensors' names of the types whose values a parameter can take over. Integers and FP8 are quantised weights, which
# mean nothing without their scales.
_LOADABLE = ("F64", "F32", "F16", "BF16")
_TORCH_TYPES = {name: dtype for dtype, name in TYPES.items()}
_NAMED = 5  # of many tensors, a message names so many


class HFCheckpoint:
    """Read access to the safetensors of an HF folder; tensors are read one at a time, on the CPU.

    Everything that can be missing is checked when the object is made: no index, no shard file, a
    file that is not safetensors, a tensor the index promises. Raises UserError.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._files: dict[Path, Any] = {}
        problem = folder_problem(folder)
        if problem:
            raise UserError(f"{folder} {problem}; it must be a folder with an HF checkpoint")
        if not is_absent(self.folder / _INDEX):
            self._where = self._read_index(self.folder / _INDEX)
        elif not is_absent(self.folder / _SINGLE):
            path = self.folder / _SINGLE
            self._where = dict.fromkeys(self._tensors_in(path), path)
        else:
            raise UserError(f"{self.folder} {pickled_weights(self.folder) or f'holds neither {_INDEX} nor {_SINGLE}'}")

    def _read_index(self, index: Path) -> dict[str, Path]:
        """{tensor: its file}, each of them there."""
        promised = read_object(index).get("weight_map")
        if not isinstance(promised, dict):
            raise UserError(f"{index}: weight_map must be an object of tensors and the files they are in")
        for tensor, name in promised.items():
            if not isinstance(name, str):
                raise UserError(f"{index}: weight_map.{shortened(tensor)} must be a file name, is {shortened(repr(name))}")
        missing = sorted({name for name in promised.values() if is_absent(self.folder / name)})
        if missing:
            raise UserError(
                f"{self.folder}: shard {_some(missing)} is missing (named in {_INDEX}); the checkpoint is "
                "incomplete, copy or download it again"
            )
        where = {tensor: self.folder / name for tensor, name in promised.items()}
        present = {path: set(self._tensors_in(path)) for path in sorted(set(where.values()))}
        for tensor, path in where.items():
            if tensor not in present[path]:
                raise UserError(f"{path}: tensor {shortened(tensor)} is missing, although {_INDEX} says it is there")
        return where

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            problem = file_problem(path)
            if problem:
                raise UserError(f"{path} {problem}")
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise UserError(
                    f"{path} cannot be read ({shortened(error, 200)}); it is truncated or not a safetensors file"
                ) from error
        return self._files[path]

    def _tensors_in(self, path: Path) -> list[str]:
        return list(self._open(path).keys())

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def unread(self, entries: dict[str, Entry]) -> list[str]:
        """The tensors that no entry of the weight map reads, sorted; they would be lost without a word.

        Left out is what some tools write although the embedding is tied or the buffer is computed.
        """
        unread = self.names - {name for entry in entries.values() for name in entry.hf}
        return sorted(n for n in unread if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq"))

    def violations(self, entries: dict[str, Entry]) -> list[str]:
        """What is wrong with names, shapes and types of the tensors, by the files' headers; no tensor is read.

        entries: what weights.maps.weight_map promises. Each violation is one sentence that names the folder or file.
        """
        promised = hf_shapes(entries)
        found = []
        missing = [name for name in promised if name not in self._where]
        if missing:
            found.append(f"{self.folder}: tensor {_some(missing)} is missing, which config.json promises")
        unread = self.unread(entries)
        if unread:
            found.append(f"{self.folder}: config.json promises no tensor {_some(unread)}")
        wrong, types = [], []
        for name, shape in promised.items():
            if name in self._where:
                header = self._open(self._where[name]).get_slice(name)
                if tuple(header.get_shape()) != shape:
                    wrong.append(f"{name} of shape {tuple(header.get_shape())}, config.json promises {shape}")
                if header.get_dtype() not in _LOADABLE:
                    types.append(f"{name} of type {header.get_dtype()}")
        if wrong:
            found.append(f"{self.folder} has {_some(wrong, '; ')}")
        if types:
            found.append(f"{self.folder} has {_some(types)}; only {', '.join(_LOADABLE)} can be loaded")
        return found

    def header(self, name: str) -> tuple[Shape, torch.dtype]:
        """(shape, dtype) of a tensor as it is stored. Raises UserError for a type that torch does not have."""
        described = self._file_of(name).get_slice(name)
        if described.get_dtype() not in _TORCH_TYPES:
            raise UserError(f"{self.folder}: {name} has the type {described.get_dtype()}, which cannot be read")
        return tuple(described.get_shape()), _TORCH_TYPES[described.get_dtype()]

    def read(self, name: str) -> torch.Tensor:
        """The full tensor. Raises UserError if the checkpoint does not have it."""
        return self._file_of(name).get_tensor(name)

    def read_slice(self, name: str, start: Shape, shape: Shape) -> torch.Tensor:
        """A rectangle of a tensor; no more than that is read. Raises UserError if the checkpoint does not have the tensor."""
        return self._file_of(name).get_slice(name)[box(start, shape)]

    def _file_of(self, name: str) -> Any:
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._open(self._where[name])


def _some(names: list[str], separator: str = ", ") -> str:
    more = f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    return separator.join(shortened(name, 150) for name in names[:_NAMED]) + more


class HFWriter:
    """Writes tensors as they come into shards of at most `max_shard_bytes`.

    Several writers may fill one folder, told apart by `tag` (one per pipeline stage). Shards get
    their final names, and the folder its index, from `finish`.
    """

    def __init__(self, folder: str, tag: str, max_shard_bytes: int = 5 * 2**30):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.tag = tag
        self.max_shard_bytes = max_shard_bytes
        self.shards: list[tuple[str, dict[str, int]]] = []  # file name, tensor -> bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._bytes + size > self.max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._bytes += size

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"part-{self.tag}-{len(self.shards):05d}.safetensors"
        save_file(self._pending, self.folder / name, metadata={"format": "pt"})
        sizes = {tensor: value.numel() * value.element_size() for tensor, value in self._pending.items()}
        self.shards.append((name, sizes))
        self._pending, self._bytes = {}, 0

    def close(self) -> list[tuple[str, dict[str, int]]]:
        """Write what is left; returns this writer's shards for `finish`."""
        self._flush()
        return self.shards


def start(partial: str, final: str, source: str) -> None:
    """Make the folder an export is written to before it gets its place; source: the original model."""
    if Path(final).absolute() == Path(source).absolute():
        raise UserError(f"{final} is the model that was loaded; export to another folder")
    if Path(partial).exists():
        shutil.rmtree(partial)
    Path(partial).mkdir(parents=True)


def finish(partial: str, shards: list[tuple[str, dict[str, int]]], final: str) -> None:
    """Give the shards of all writers their HF names, write the index, and put the folder in place.

    A folder with the final name goes away whole: an index or shards of another export beside the
    new files would be what loaders follow.
    """
    root = Path(partial)
    where = {}
    for number, (part, sizes) in enumerate(shards):
        name = shard_name(number, len(shards))
        (root / part).rename(root / name)
        where.update(dict.fromkeys(sizes, name))
    write_index(root, where, sum(size for _, sizes in shards for size in sizes.values()))
    if Path(final).exists():
        shutil.rmtree(final)
    root.rename(final)


def shard_name(number: int, count: int) -> str:
    """What HF calls shard `number`, from 0, of `count`."""
    return _SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, where: dict[str, str], total_bytes: int) -> None:
    """where: {tensor: its file}; one file alone needs no index."""
    if set(where.values()) != {_SINGLE}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        (folder / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def copy_companions(source: str, target: str, dtype: torch.dtype) -> None:
    """Copy config, generation config and tokenizer; config.json states the new dtype."""
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    for path in Path(source).iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and not path.name.endswith(".index.json"):
            shutil.copy2(path, root / path.name)
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (root / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

"""HF checkpoint folders: reading tensor by tensor, writing in shards."""

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_megatron.errors import UserError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class HFCheckpoint:
    """Read access to the safetensors of an HF folder; tensors are read one at a time, on the CPU.

    Everything that can be missing is checked when the object is made: no index, no shard file, a
    file that is not safetensors, a tensor the index promises. Raises UserError.
    """

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._files: dict[Path, object] = {}
        index = self.folder / _INDEX
        if index.is_file():
            promised = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            missing = sorted({name for name in promised.values() if not (self.folder / name).is_file()})
            if missing:
                raise UserError(
                    f"{self.folder}: shard {', '.join(missing)} is missing (named in {_INDEX}); the checkpoint is "
                    "incomplete, copy or download it again"
                )
            self._where = {tensor: self.folder / name for tensor, name in promised.items()}
            present = {path: set(self._tensors_in(path)) for path in sorted(set(self._where.values()))}
            for tensor, path in self._where.items():
                if tensor not in present[path]:
                    raise UserError(f"{path}: tensor {tensor} is missing, although {_INDEX} says it is there")
        elif (self.folder / _SINGLE).is_file():
            path = self.folder / _SINGLE
            self._where = dict.fromkeys(self._tensors_in(path), path)
        else:
            raise UserError(f"{self.folder} holds neither {_INDEX} nor {_SINGLE}")

    def _open(self, path: Path):
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} cannot be read ({error}); it is truncated or not a safetensors file") from error
        return self._files[path]

    def _tensors_in(self, path: Path) -> list[str]:
        return list(self._open(path).keys())

    @property
    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> torch.Tensor:
        """The full tensor. Raises UserError if the checkpoint does not have it."""
        if name not in self._where:
            raise UserError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._open(self._where[name]).get_tensor(name)


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
    if len(shards) == 1:
        (root / shards[0][0]).rename(root / _SINGLE)
    else:
        weight_map = {}
        for number, (part, sizes) in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            (root / part).rename(root / name)
            weight_map.update(dict.fromkeys(sizes, name))
        total = sum(size for _, sizes in shards for size in sizes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (root / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    if Path(final).exists():
        shutil.rmtree(final)
    root.rename(final)


def copy_companions(source: str, target: str, dtype: torch.dtype) -> None:
    """Copy config, generation config and tokenizer; config.json states the new dtype."""
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    for path in Path(source).iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != _INDEX:
            shutil.copy2(path, root / path.name)
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (root / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

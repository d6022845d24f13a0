"""Writer of HF checkpoint folders, in shards."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, sync_to_disk
from grpo_megatron.weights.hf_checkpoint import HFCheckpoint
from grpo_megatron.weights.safetensors_file import save
from grpo_megatron.weights.stored import STACKED, read_stored
from grpo_megatron.weights.weight_files import INDEX, SINGLE


class HFWriter:
    """A writer of the weight files (shards) of a new HF checkpoint.

    `add` collects tensors in CPU memory, and writes a shard before the collected tensors exceed
    max_shard_bytes. `close` writes the last shard. Several writers with different tags may write to one
    folder, for example one per pipeline stage. When all writers are closed, the module's function `finish`
    gives all shards their final names and writes the index.

    folder: the folder to write to, created if it does not exist.
    tag: part of the names of this writer's files.
    max_shard_bytes: maximum bytes of a shard. A larger tensor gets a shard of its own.
    """

    def __init__(self, folder: str, tag: str, max_shard_bytes: int = 5 * 2**30):
        self.folder = Path(folder)
        self.tag = tag
        self.max_shard_bytes = max_shard_bytes
        self.shards: list[tuple[str, dict[str, int]]] = []  # (file name, {tensor: bytes})
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
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"part-{self.tag}-{len(self.shards):05d}.safetensors"
        save(self.folder / name, self._pending)
        sync_to_disk(self.folder / name)
        sizes = {tensor: value.numel() * value.element_size() for tensor, value in self._pending.items()}
        self.shards.append((name, sizes))
        self._pending, self._bytes = {}, 0

    def close(self) -> list[tuple[str, dict[str, int]]]:
        """Write the remaining tensors. Return [(file name, {tensor: bytes})] of all shards of this writer.

        The caller passes the shards of all writers to the function `finish` of this module.
        """
        self._flush()
        return self.shards


def start(partial: str, final: str, source: str) -> None:
    """Begin an export: create the empty folder `partial`, to which the exported files are written.

    An existing folder `partial`, such as the rest of an interrupted export, is deleted.

    final: the name that `finish` gives the folder at the end. An incomplete export never has this name.
    source: folder of the model that was loaded.
    Raises UserError if `final` is `source`, because the export would overwrite the model.
    """
    if Path(final).absolute() == Path(source).absolute():
        raise UserError(
            f"cannot overwrite {final}, from which the model was loaded; export to another folder"
        )
    if Path(partial).exists():
        shutil.rmtree(partial)
    Path(partial).mkdir(parents=True)


def finish(partial: str, shards: list[tuple[str, dict[str, int]]], final: str) -> None:
    """Complete an export: give the shards their HF names, write the index, and rename `partial` to `final`.

    The folder is renamed only after its contents have been synced to disk. An existing folder `final` is
    renamed to FINAL.old meanwhile, and then deleted.

    partial: the folder to which all writers have written their shards.
    shards: [(file name, {tensor: bytes})], the results of HFWriter.close of all writers, concatenated.
    """
    root = Path(partial)
    where = {}
    for index, (part, sizes) in enumerate(shards):
        name = shard_name(index, len(shards))
        (root / part).rename(root / name)
        where.update(dict.fromkeys(sizes, name))
    write_index(root, where, sum(size for _, sizes in shards for size in sizes.values()))
    for path in (*root.rglob("*"), root):  # other nodes have synced their shards to the disk already
        sync_to_disk(path)
    old = Path(f"{final}.old")
    shutil.rmtree(old, ignore_errors=True)  # after an earlier call that was killed
    if Path(final).exists():
        Path(final).rename(old)
    root.rename(final)
    sync_to_disk(Path(final).absolute().parent)
    shutil.rmtree(old, ignore_errors=True)


def copy_vision(source: str, path: Path) -> dict[str, int]:
    """Copy the tensors of a vision model, which is not trained, to a new safetensors file.

    Returns {tensor: bytes}. If the source has no vision model, no file is written, and the result is empty.

    source: HF folder of the model that was loaded.
    path: the new file.
    """
    if read_stored(Path(source)).with_vision is None:
        return {}
    checkpoint = HFCheckpoint(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.vision}
    path.parent.mkdir(parents=True, exist_ok=True)
    save(path, tensors)
    sync_to_disk(path)
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def shard_name(index: int, count: int) -> str:
    """Return the file name by which HF's loaders find a shard, such as "model-00001-of-00003.safetensors".

    A single shard is named "model.safetensors".

    index: index of the shard, from 0.
    count: number of shards.
    """
    return SINGLE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, where: dict[str, str], total_bytes: int) -> None:
    """Write the index file of an HF checkpoint, which names the file of each tensor.

    Nothing is written if all tensors are in model.safetensors, because HF's loaders then need no index.

    where: {tensor: file name}.
    total_bytes: bytes of all tensors.
    """
    if set(where.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        (folder / INDEX).write_text(json_text(index, indent=2), encoding="utf-8")


def copy_companions(
    source: str, target: str, dtype: torch.dtype, changes: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Copy the files that an HF checkpoint needs besides its weights: configs, tokenizer, chat template.

    Python files are copied, because config.json may name them (auto_map). They are never run here.
    config.json is adapted to the exported weights: its dtype becomes `dtype`, and quantisation and
    multi-token prediction layers are removed.

    source: HF folder of the model that was loaded.
    target: folder of the export.
    changes: {key: new value} of further keys to set in config.json.
    """
    root = Path(target)
    root.mkdir(parents=True, exist_ok=True)
    for path in Path(source).iterdir():
        if (
            path.is_file()
            and path.suffix in (".json", ".jinja", ".model", ".txt", ".py")
            and not path.name.endswith(".index.json")
        ):
            shutil.copyfile(path, root / path.name)  # without the mode, which may be read-only
    config = json.loads((root / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # exported weights are not quantised
    config.pop(STACKED, None)
    config.update(changes)
    for settings in (config, config.get("text_config") or {}):
        settings.pop("torch_dtype", None)
        settings["dtype"] = str(dtype).removeprefix("torch.")
        for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if settings.get(key):
                settings[key] = 0  # not exported, see HFCheckpoint.left_out
    (root / "config.json").write_text(json_text(config, indent=2), encoding="utf-8")

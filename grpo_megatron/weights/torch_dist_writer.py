"""Writer of Megatron's distributed checkpoints (torch_dist). torch_dist.py describes the format."""

import pickle
import uuid
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from grpo_megatron.files import json_text, new_file, replace_text, write_buffer
from grpo_megatron.weights.torch_dist import METADATA, SETTINGS, StoredTensor


class _ErrorKeepingStream:
    """An output stream for torch.save that keeps the first write error in `error` instead of raising it.

    torch.save ends the process if its stream raises an error. `append_tensor` therefore raises `error` after
    torch.save has returned. Data that is written after the error is dropped.
    """

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, data) -> int:
        try:
            if self.error is None:
                write_buffer(self.file, data)
        except OSError as error:
            self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing. torch.save calls this method, but the code that opened the file flushes the file."""


def append_tensor(file, tensor: torch.Tensor) -> tuple[int, int]:
    """Append a tensor to an open file as one chunk of a checkpoint. Return the chunk's (offset, length).

    Offset and length are in bytes. The tensor must cover its whole storage, because torch.save writes the
    whole storage. Raises OSError if the file cannot be written. (torch.save itself would end the process.)
    """
    offset, stream = file.tell(), _ErrorKeepingStream(file)
    checksums = torch.serialization.get_crc32_options()
    # torch never checks these checksums, and computes them at only a third of a disk's speed.
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    finally:
        torch.serialization.set_crc32_options(checksums)
    if stream.error:
        raise stream.error
    return offset, file.tell() - offset


def write_metadata(
    folder: str | Path, tensors: dict[str, StoredTensor], objects: dict[str, tuple[str, int, int]]
) -> list[str]:
    """Write the files `.metadata` and `metadata.json`, which complete a torch_dist checkpoint.

    `.metadata` says where in the folder's data files each tensor and object is. `metadata.json` names the
    format. Return the names of the two files.

    tensors: {key: dtype, shape and chunks of the tensor}.
    objects: {key: (file name, byte offset, length in bytes)} of the objects that are not tensors.
    """
    root = Path(folder)
    state: dict = {key: BytesStorageMetadata() for key in objects}
    where = {MetadataIndex(key): _StorageInfo(*place) for key, place in objects.items()}
    for key, stored in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.at), torch.Size(c.shape)) for c in stored.chunks]
        state[key] = TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(stored.shape), chunks)
        for index, chunk in enumerate(stored.chunks):
            where[MetadataIndex(key, chunk.at, index)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
    metadata = Metadata(
        state,
        storage_data=where,
        storage_meta=StorageMeta(save_id=str(uuid.uuid4())),
        version=CURRENT_DCP_VERSION,
    )
    with new_file(root / METADATA) as file:
        pickle.dump(metadata, file)
    settings = {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    replace_text(root / SETTINGS, json_text(settings))
    return [METADATA, SETTINGS]

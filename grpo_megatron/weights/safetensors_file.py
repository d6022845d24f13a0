"""Additions to the safetensors library: byte offsets of tensors, and files written piece by piece."""

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import torch

from grpo_megatron.files import json_text, write_buffer
from grpo_megatron.model.pieces import Shape

# The names of dtypes in safetensors headers.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a CPU tensor as bytes in row-major order, without a copy if it is contiguous."""
    # as_strided: torch calls a tensor of one element contiguous whatever its stride is.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def starts(path: str | Path) -> dict[str, int]:
    """Return {tensor name: byte offset of the tensor's first element in a safetensors file}.

    The safetensors library does not offer these offsets. The file must be intact, because its header is not
    checked here.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        described = json.loads(file.read(length))
    return {
        name: 8 + length + about["data_offsets"][0]
        for name, about in described.items()
        if name != "__metadata__"
    }


class Header:
    """The header of a safetensors file that will be written. It fixes the place of each tensor in the file.

    The tensors can then be written one by one, each at its place. Tensors with larger elements come first in
    the file, so that each tensor starts at a multiple of its element size.

    raw: the header as bytes, to be written at the beginning of the file.
    """

    def __init__(self, tensors: Iterable[tuple[str, Shape, torch.dtype]]):
        """Choose the place of each tensor in the file.

        tensors: (name, shape, dtype) of each tensor.
        """
        described, end = {}, 0
        for name, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[2].itemsize):
            start, end = end, end + prod(shape) * dtype.itemsize
            described[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json_text({"__metadata__": {"format": "pt"}, **described}).encode()
        text += b" " * (-len(text) % 8)
        self.raw = len(text).to_bytes(8, "little") + text
        self._starts = {name: about["data_offsets"][0] for name, about in described.items()}

    def start_of(self, name: str) -> int:
        """Return the byte offset in the file at which the elements of a tensor must be written."""
        return len(self.raw) + self._starts[name]


def save(path: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write CPU tensors to one safetensors file, with the file permissions that new files usually have.

    safetensors.torch.save_file is not used, because it makes files that only their owner can read.
    """
    header = Header((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    with open(path, "wb") as file:
        file.write(header.raw)
        for name, tensor in tensors.items():
            file.seek(header.start_of(name))
            write_buffer(file, bytes_of(tensor))

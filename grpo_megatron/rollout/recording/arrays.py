"""Files with the arrays of recorded samples, and the handle by which the trainer's ranks read them.

A file is in the safetensors format. It contains, for S samples with P prompt tokens and R response tokens
each:

    lengths            int64 [S, 3]: P, R, and the number of tokens with routing, which is P + R or 0
    prompt_ids         int32 [sum of P], the samples one after the other
    response_ids, loss_mask, rollout_logprobs
                       int32, bool and float32 [sum of R]
    routing            [tokens with routing, L, k], in the smallest integer type that holds all ids of
                       experts. It is left out if no sample has routing.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from grpo_megatron.batch.arrays import Handle, SampleArrays, read
from grpo_megatron.errors import UserError
from grpo_megatron.files import new_file, write_buffer
from grpo_megatron.weights.safetensors_file import Header

_LENGTHS = "lengths"
# {column: (its dtype, index of its length in a row of `lengths`)}
_COLUMNS = {
    "prompt_ids": (np.int32, 0),
    "response_ids": (np.int32, 1),
    "loss_mask": (np.bool_, 1),
    "rollout_logprobs": (np.float32, 1),
}


@dataclass(frozen=True)
class RecordedArrays:
    """Handle of arrays in a file of a recording. Each process that needs them reads the file."""

    file: str
    """Path of the file."""
    index: int
    """Index of the sample in the file."""

    @classmethod
    def get(cls, handles: Sequence["RecordedArrays"]) -> list[SampleArrays]:
        indices: dict[str, list[int]] = {}
        for handle in handles:
            indices.setdefault(handle.file, []).append(handle.index)
        found = {file: iter(_read(file, own)) for file, own in indices.items()}
        return [next(found[handle.file]) for handle in handles]


def write_arrays(path: Path, handles: Sequence[Handle]) -> OSError | None:
    """Write the arrays of some samples to a new file, which appears when it is complete.

    Return the error if the file cannot be written, for example because the disk is full. The file then does
    not exist.
    """
    samples = read(handles)
    routing = [one.routing for one in samples if one.routing is not None]
    lengths = [
        (len(one.prompt_ids), len(one.response_ids), 0 if one.routing is None else len(one.routing))
        for one in samples
    ]
    columns = {_LENGTHS: (np.int64, [np.array(lengths)])}
    columns |= {
        name: (dtype, [getattr(one, name) for one in samples]) for name, (dtype, _) in _COLUMNS.items()
    }
    if routing:
        largest = max(int(part.max()) for part in routing)
        smallest = next(one for one in (np.uint8, np.int16, np.int32) if largest <= np.iinfo(one).max)
        columns["routing"] = (smallest, routing)
    header = Header(
        (name, (sum(map(len, parts)), *parts[0].shape[1:]), torch.from_numpy(np.empty(0, dtype)).dtype)
        for name, (dtype, parts) in columns.items()
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file:
            file.write(header.raw)
            for name, (dtype, parts) in columns.items():
                file.seek(header.start_of(name))
                for part in parts:
                    if part.size:
                        write_buffer(file, np.ascontiguousarray(part, dtype))
    except OSError as error:
        return error
    return None


def _read(file: str, indices: Sequence[int]) -> list[SampleArrays]:
    """Return the arrays of samples with these indices in a file.

    Raises UserError if the file is missing or damaged.
    """
    try:
        with safe_open(file, "numpy") as data:
            names = {*_COLUMNS, *data.keys()} - {_LENGTHS}
            lengths, columns = data.get_tensor(_LENGTHS), {name: data.get_slice(name) for name in names}
            which = {name: _COLUMNS[name][1] if name in _COLUMNS else 2 for name in names}
            ends = np.cumsum(lengths, axis=0)
            for name, column in columns.items():
                if lengths.min() < 0 or column.get_shape()[0] != ends[-1, which[name]]:
                    raise ValueError(f"{name} has {column.get_shape()[0]} rows, which `lengths` contradicts")

            def part(name: str, index: int) -> np.ndarray | None:
                end, length = int(ends[index, which[name]]), int(lengths[index, which[name]])
                if length:
                    return columns[name][end - length : end]
                return np.zeros(0, _COLUMNS[name][0]) if name in _COLUMNS else None

            return [SampleArrays(**{name: part(name, index) for name in names}) for index in indices]
    except (OSError, SafetensorError, ValueError, IndexError, TypeError) as error:
        raise UserError(
            f"{file} is missing or damaged on {socket.gethostname()} ({error}); copy the recording again, to "
            "a disk that all nodes share, or record the samples again"
        ) from error

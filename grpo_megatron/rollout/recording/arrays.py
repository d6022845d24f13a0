"""Files with the arrays and texts of recorded samples, and the handles by which processes read them.

A file is in the safetensors format. It contains, for S samples with P prompt tokens, R response tokens and
B bytes of text each:

    lengths            int64 [S, 4]: P, R, the number of tokens with routing, which is P + R or 0, and B
    prompt_ids         int32 [sum of P], the samples one after the other
    response_ids, loss_mask, rollout_logprobs
                       int32, bool and float32 [sum of R]
    routing            [tokens with routing, L, k], in the smallest integer type that holds all ids of
                       experts. It is left out if no sample has routing.
    texts              uint8 [sum of B], JSON of [response, scored], see Texts
"""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from grpo_megatron.batch.arrays import Handle, SampleArrays, Texts, read, values_of, with_routing_here
from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text, new_file, write_buffer
from grpo_megatron.weights.safetensors_file import Header

_LENGTHS, _ROUTING, _TEXTS = "lengths", "routing", "texts"
# Function from a column's name to a sample's part of it.
Column = Callable[[str], np.ndarray]
# {column: (its dtype, index of its length in a row of `lengths`)}
_COLUMNS = {
    "prompt_ids": (np.int32, 0),
    "response_ids": (np.int32, 1),
    "loss_mask": (np.bool_, 1),
    "rollout_logprobs": (np.float32, 1),
}


@dataclass(frozen=True)
class _Recorded:
    """Handle of a value, such as the texts, of a recorded sample. `get` reads the value from a file."""

    file: str
    """Path of the file."""
    index: int
    """Index of the sample in the file."""

    @classmethod
    def get(cls, handles: Sequence["_Recorded"]) -> list[Any]:
        indices: dict[str, list[int]] = {}
        for handle in handles:
            indices.setdefault(handle.file, []).append(handle.index)
        found = {file: iter(_read(file, own, cls.make)) for file, own in indices.items()}
        return [next(found[handle.file]) for handle in handles]


class RecordedArrays(_Recorded):
    """Handle of the arrays of a recorded sample (token ids, loss mask, log-probs, routing) in a file."""

    @staticmethod
    def make(column: Column) -> SampleArrays:
        return SampleArrays(**{name: column(name) for name in (*_COLUMNS, "routing")})


class RecordedTexts(_Recorded):
    """Handle of the texts of a recorded sample (response, and the part that was scored) in a file."""

    @staticmethod
    def make(column: Column) -> Texts:
        return Texts(*json.loads(column("texts").tobytes()))


# Handles of the arrays and the texts of a sample that is to be recorded.
RecordedHandles = tuple[Handle, Handle]


def write_samples(path: Path, handles: Sequence[RecordedHandles]) -> OSError | None:
    """Write the arrays and texts of samples to a new file of a recording, in the safetensors format.

    Return None, or the error if the file cannot be written, for example because the disk is full. The file
    has another name until it is complete. So after an error, there is no file `path`.

    handles: for each sample, the handles of its arrays and of its texts.
    """
    samples = with_routing_here(read([arrays for arrays, _ in handles]))
    texts = [
        np.frombuffer(json_text([own.response, own.scored]).encode(), np.uint8)
        for own in values_of([texts for _, texts in handles])
    ]
    routing = [one.routing for one in samples if one.routing is not None]
    lengths = [
        (
            len(one.prompt_ids),
            len(one.response_ids),
            0 if one.routing is None else len(one.routing),
            len(text),
        )
        for one, text in zip(samples, texts, strict=True)
    ]
    columns = {_LENGTHS: (np.int64, [np.array(lengths)])}
    columns |= {
        name: (dtype, [getattr(one, name) for one in samples]) for name, (dtype, _) in _COLUMNS.items()
    }
    columns[_TEXTS] = np.uint8, texts
    if routing:
        largest = max(int(part.max()) for part in routing)
        smallest = next(one for one in (np.uint8, np.int16, np.int32) if largest <= np.iinfo(one).max)
        columns[_ROUTING] = (smallest, routing)
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


def _read(file: str, indices: Sequence[int], make: Callable[[Column], Any]) -> list[Any]:
    """Read samples from a file of a recording. Return the result of `make` for each sample.

    indices: indices of the samples in the file.
    make: function that builds the result for a sample. Its argument is a function from the name of a column,
        such as "response_ids", to the sample's part of this column.

    Raises UserError if the file is missing or damaged.
    """
    try:
        with safe_open(file, "numpy") as data:
            names = {*_COLUMNS, _TEXTS, *data.keys()} - {_LENGTHS}
            lengths, columns = data.get_tensor(_LENGTHS), {name: data.get_slice(name) for name in names}
            which = {name: _COLUMNS[name][1] for name in _COLUMNS} | {_ROUTING: 2, _TEXTS: 3}
            ends = np.cumsum(lengths, axis=0)
            for name, column in columns.items():
                if lengths.min() < 0 or column.get_shape()[0] != ends[-1, which[name]]:
                    raise ValueError(f"{name} has {column.get_shape()[0]} rows, which `lengths` contradicts")

            def part(index: int, name: str) -> np.ndarray | None:
                end, length = int(ends[index, which[name]]), int(lengths[index, which[name]])
                if length:
                    return columns[name][end - length : end]
                return np.zeros(0, _COLUMNS[name][0]) if name in _COLUMNS else None

            return [make(partial(part, index)) for index in indices]
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{file} is missing or damaged on {socket.gethostname()} ({error}); copy the recording again, to "
            "a disk that all nodes share, or record the samples again"
        ) from error

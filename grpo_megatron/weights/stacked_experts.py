"""Tensors with all experts of a layer, as the files of some HF checkpoints have them.

The weight map has tensors of single experts. This module reads them from stacks, and makes stacks of them.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from grpo_megatron.model.pieces import Shape

# A number in MXFP4 (OCP Microscaling Formats 1.0) is an index into these values. 32 numbers share a scale.
_MXFP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MXFP4_GROUP = 32


class StackForm(Enum):
    """Arrangement of experts in a stack, in files.

    rows: [experts, rows, columns], the gate's rows before those of the up projection, as in Qwen3.5.
    interleaved: [experts, columns, rows], the transpose of each expert's weight, with a row of the gate, a
        row of the up projection, and so on. Biases are [experts, rows]. gpt-oss has this form.
    """

    rows = "rows"
    interleaved = "interleaved"


@dataclass(frozen=True)
class StoredPlace:
    """The tensor in a checkpoint's files that contains a tensor of the weight map."""

    name: str
    """Name of the tensor in the files."""
    expert: int | None = None
    """Index of the expert, if the tensor in the files is a stack of experts. None: the two tensors are the
    same."""
    part: int = 0
    """Index of the tensor of the weight map among those that an expert in the stack consists of."""
    parts: int = 1
    """Number of tensors of the weight map that an expert in the stack consists of."""
    scales: str | None = None
    """Name of the scales in the files, if the stack is in MXFP4; otherwise None."""


_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks)?")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_DIMENSIONS = {None: 3, "_bias": 2, "_blocks": 4}


def is_stack(name: str) -> bool:
    """Return True if a tensor of this name, in the files, may have all experts of a layer."""
    return _STACK.fullmatch(name) is not None


def members(name: str, stored: str, shape_of: Callable[[str], Shape]) -> dict[str, StoredPlace]:
    """Return {tensor of the weight map: its place in a stack}, or {} if the tensor in the files is no stack.

    name: name of the tensor in the files, with the prefix of the weight map's names.
    stored: name of the tensor in the files.
    shape_of: function that returns a tensor's shape by its name in the files.
    """
    stack = _STACK.fullmatch(name)
    shape = shape_of(stored) if stack else ()
    if stack is None or len(shape) != _DIMENSIONS[stack[3]]:
        return {}
    block, projection, suffix = stack.groups()
    parts, kind = _PROJECTIONS[projection], "bias" if suffix == "_bias" else "weight"
    scales = stored.removesuffix("_blocks") + "_scales" if suffix == "_blocks" else None
    return {
        f"{block}.{expert}.{part}.{kind}": StoredPlace(stored, expert, index, len(parts), scales)
        for expert in range(shape[0])
        for index, part in enumerate(parts)
    }


class RowsOfStack:
    """A handle of one tensor in a stack of StackForm.rows, with the methods of the safetensors library's."""

    def __init__(self, stack: Any, place: StoredPlace):
        """Create the handle. stack: the safetensors library's handle of the stack of experts."""
        _, rows, *self._columns = stack.get_shape()
        self._stack, self._expert, self._rows = stack, place.expert, rows // place.parts
        self._first = place.part * self._rows
        # Index of the first row, if the rows of all experts are counted in their order.
        self.first_row = place.expert * rows + self._first

    def get_shape(self) -> list[int]:
        return [self._rows, *self._columns]

    def get_dtype(self) -> str:
        return self._stack.get_dtype()

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = box
        own = slice(self._first + rows.start, self._first + rows.stop)
        return self._stack[(slice(self._expert, self._expert + 1), own, *columns)][0]


class InterleavedInStack:
    """A handle of one tensor in a stack of StackForm.interleaved, like RowsOfStack."""

    def __init__(self, stack: Any, place: StoredPlace):
        """Create the handle. stack: the safetensors library's handle of the stack of experts."""
        _, *self._columns, rows = stack.get_shape()
        self._stack, self._place, self._rows = stack, place, rows // place.parts

    def get_shape(self) -> list[int]:
        return [self._rows, *self._columns]

    def get_dtype(self) -> str:
        return self._stack.get_dtype()

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        (rows, *columns), place = box, self._place
        own = slice(rows.start * place.parts, rows.stop * place.parts)
        values = self._stack[(slice(place.expert, place.expert + 1), *columns, own)][0]
        return values[..., place.part :: place.parts].t()


class Mxfp4InStack:
    """A handle of one weight in a stack in MXFP4, like RowsOfStack. It dequantises what is read to bfloat16.

    bfloat16 holds every value exactly. In the files, an expert is [rows, columns / 32, 16] of bytes with two
    numbers each, and [rows, columns / 32] of scales. Its rows are interleaved, but not transposed.
    """

    def __init__(self, blocks: Any, scales: Any, place: StoredPlace):
        """Create the handle. blocks, scales: the safetensors library's handles of the stack's tensors."""
        _, rows, groups, _ = blocks.get_shape()
        self._blocks, self._scales, self._place = blocks, scales, place
        self._shape = [rows // place.parts, groups * MXFP4_GROUP]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        (rows, columns), place = box, self._place
        first, last = columns.start // MXFP4_GROUP, -(-columns.stop // MXFP4_GROUP)
        own = slice(rows.start * place.parts, rows.stop * place.parts)
        where = slice(place.expert, place.expert + 1), own, slice(first, last)
        blocks, scales = (
            stack[where][0, place.part :: place.parts] for stack in (self._blocks, self._scales)
        )
        start = columns.start - first * MXFP4_GROUP
        return _of_mxfp4(blocks, scales)[:, start : start + columns.stop - columns.start]


def _of_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise MXFP4. Return bfloat16 [rows, groups * 32].

    blocks: uint8 [rows, groups, 16]. A byte has two numbers, the first one in its lower four bits.
    scales: uint8 [rows, groups]. A scale s multiplies the numbers of its group by 2 ** (s - 127).
    """
    values = torch.tensor([*_MXFP4, *(-value for value in _MXFP4)])
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    scaled = torch.ldexp(values[numbers.int()], scales.int()[..., None] - 127)
    return scaled.flatten(-2).to(torch.bfloat16)


@dataclass(frozen=True)
class Stack:
    """A tensor with all experts of a layer, which is to be written to an HF checkpoint.

    name: name of the stack, with the prefix of the weight map's names.
    form: arrangement of the experts in the stack.
    part_shape: shape of each tensor of an expert in the weight map.
    experts: for each expert, the names of its tensors in the weight map, such as those of gate and up.
    """

    name: str
    form: StackForm
    part_shape: Shape
    experts: tuple[tuple[str, ...], ...]

    @property
    def shape(self) -> Shape:
        """Shape of the stack."""
        part, *columns = self.part_shape
        rows = part * len(self.experts[0])
        of_expert = (rows, *columns) if self.form is StackForm.rows else (*columns, rows)
        return (len(self.experts), *of_expert)

    def expert(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return one expert as it is in the stack. tensors: its tensors, each of `part_shape`."""
        if self.form is StackForm.rows:
            return torch.cat(list(tensors))
        return torch.stack(list(tensors), dim=1).flatten(0, 1).t()


_MEMBER = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def stacks_of(shapes: Mapping[str, Shape], form: StackForm) -> list[Stack]:
    """Return the stacks that a checkpoint has in place of tensors of experts.

    shapes: {name in the weight map: shape} of all tensors of the model.
    form: arrangement of the experts in the checkpoint's stacks.
    """
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in shapes:
        if member := _MEMBER.fullmatch(name):
            block, expert, projection, kind = member.groups()
            stack = "down_proj" if projection == "down" else "gate_up_proj"
            found[f"{block}.{stack}{'_bias' if kind == 'bias' else ''}"][int(expert)].append(name)
    result = []
    for name, experts in found.items():
        names = tuple(tuple(experts[index]) for index in range(len(experts)))
        result.append(Stack(name, form, shapes[names[0][0]], names))
    return result

"""Names of the tensors in the files of an HF checkpoint, where they differ from those in the weight map.

In checkpoints with a vision model, the names of the language model's tensors have a prefix. Checkpoints of
Qwen3.5 can have all experts of a layer in two tensors, where the weight map has three for each expert.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.model.pieces import Shape

# Prefix of the weight map's names, and of the files of a checkpoint without a vision model.
MODEL = "model."
# Prefixes of the language model's and the vision model's tensors in the files of a checkpoint with both.
LANGUAGE_MODEL, VISION_MODEL = "model.language_model.", "model.visual."
_ADAPTER = "base_model.model."  # PEFT's prefix
_STACK = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class StoredPlace:
    """The tensor in a checkpoint's files that contains a tensor of the weight map.

    name: name of the tensor in the files.
    expert: index of the expert, if the tensor in the files is a stack of experts [experts, rows, columns].
        None: the two tensors are the same.
    part, parts: the tensor of the weight map is the part with index `part` if the expert's rows are cut into
        `parts` equal parts.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1


def in_files(name: str, prefix: str) -> str:
    """Return the name that a tensor of the language model has in the files of a checkpoint.

    name: name of the tensor in the weight map, or of an adapter's tensor as model.adapters names it for PEFT.
    prefix: prefix of the language model's tensors in the files, such as `model.language_model.`.
    """
    if name.startswith(_ADAPTER):
        return _ADAPTER + in_files(name.removeprefix(_ADAPTER), prefix)
    return prefix + name.removeprefix(MODEL) if name.startswith(MODEL) else name


def places(
    names: Iterable[str], prefix: str, shape_of_stack: Callable[[str], Shape] | None
) -> dict[str, StoredPlace]:
    """Return {name in the weight map: place in the files} of all tensors of a checkpoint.

    names: names of the tensors in the files.
    prefix: prefix of the language model's tensors in the files, such as `model.language_model.`.
    shape_of_stack: function that returns the shape of a tensor with all experts of a layer, by its name.
        None: the checkpoint has no such tensors.
    """
    found = {}
    for name in names:
        ours = MODEL + name.removeprefix(prefix) if name.startswith(prefix) else name
        stack = _STACK.fullmatch(ours) if shape_of_stack else None
        shape = shape_of_stack(name) if stack else ()
        if len(shape) != 3:
            found[ours] = StoredPlace(name)
            continue
        projections = _PROJECTIONS[stack[2]]
        for expert in range(shape[0]):
            for part, projection in enumerate(projections):
                found[f"{stack[1]}.{expert}.{projection}.weight"] = StoredPlace(
                    name, expert, part, len(projections)
                )
    return found


class PartOfStack:
    """A handle of a part of a stack of experts, with the methods of the safetensors library's handles."""

    def __init__(self, stack: Any, place: StoredPlace):
        """Create the handle. stack: the safetensors library's handle of the stack of experts."""
        _, rows, *self._columns = stack.get_shape()
        self._stack, self._expert, self._rows = stack, place.expert, rows // place.parts
        self._first = place.part * self._rows
        # Index of the part's first row, if the rows of all experts are counted in their order.
        self.first_row = place.expert * rows + self._first

    def get_shape(self) -> list[int]:
        return [self._rows, *self._columns]

    def get_dtype(self) -> str:
        return self._stack.get_dtype()

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        rows, *columns = box
        own = slice(self._first + rows.start, self._first + rows.stop)
        return self._stack[(slice(self._expert, self._expert + 1), own, *columns)][0]

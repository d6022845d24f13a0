"""How a checkpoint's tensors differ from what config.json describes: FP8 in blocks, and layers that are not loaded."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.json_files import read_object
from grpo_megatron.model.config_json import MOST_LAYERS, Fields
from grpo_megatron.model.pieces import Shape
from grpo_megatron.paths import is_absent
from grpo_megatron.weights.quantised import fp8_block

SCALES = "_scale_inv"  # behind the name of an FP8 tensor, that of its scales
FP8 = "F8_E4M3"  # as safetensors calls it


@dataclass(frozen=True)
class Stored:
    """block: rows and columns that share a scale in FP8 tensors, None: there are none. left_out: what the names of tensors begin
    with that belong to layers for predicting further tokens, which nothing here trains."""

    block: tuple[int, int] | None = None
    left_out: tuple[str, ...] = ()


def read_stored(folder: Path) -> Stored:
    """Read the config.json in `folder`, if it is there. Raises UserError for damage and for other quantised weights."""
    path = folder / "config.json"
    if is_absent(path):
        return Stored()
    try:
        config = Fields(read_object(path))
        further = config.integer("num_nextn_predict_layers", 0, most=MOST_LAYERS, least=0)
        first = config.integer("num_hidden_layers", most=MOST_LAYERS) if further else 0
        block = fp8_block(folder, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    left_out = tuple(f"model.layers.{first + number}." for number in range(further))
    return Stored(block, left_out)


def scales_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Of the scales of a whole FP8 tensor; the last block of a row or column may be smaller than the others."""
    return tuple(math.ceil(size / part) for size, part in zip(shape, block, strict=True))


def scales_box(start: Shape, shape: Shape, block: tuple[int, int]) -> tuple[Shape, Shape]:
    """(start, shape) of the scales that a rectangle of an FP8 tensor needs."""
    first = tuple(at // part for at, part in zip(start, block, strict=True))
    last = tuple(math.ceil((at + size) / part) for at, size, part in zip(start, shape, block, strict=True))
    return first, tuple(end - begin for begin, end in zip(first, last, strict=True))


def dequantised(
    values: torch.Tensor, scales: torch.Tensor, start: Shape, block: tuple[int, int]
) -> torch.Tensor:
    """float32 [r, c]: each element times the scale of its block.

    values: float8_e4m3fn [r, c], the rectangle of the whole tensor that begins at `start`. scales: float32, those of
    `scales_box`.
    """
    rows, columns = (
        (at % part + torch.arange(size)) // part
        for at, size, part in zip(start, values.shape, block, strict=True)
    )
    return values.float().mul_(scales.float()[rows][:, columns])

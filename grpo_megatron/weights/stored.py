"""Functions for HF checkpoints with block-scaled FP8 tensors, or with tensors that are not loaded."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.errors import UserError
from grpo_megatron.files import read_object
from grpo_megatron.model.config_json import MOST_LAYERS, Fields
from grpo_megatron.model.pieces import Shape
from grpo_megatron.model.text_config import text_config
from grpo_megatron.paths import is_absent
from grpo_megatron.weights.quantised import fp8_block, quantisation_method
from grpo_megatron.weights.stacked_experts import StackForm, is_stack
from grpo_megatron.weights.stored_names import GEMMA, MODEL, QWEN, Prefixes
from grpo_megatron.weights.weight_files import names_in_files

SCALES = "_scale_inv"  # name of an FP8 tensor + this suffix = name of its scales
FP8 = "F8_E4M3"  # safetensors' name of the dtype
# Model types whose layers for multi-token prediction are named mtp.*. Their config.json may not mention them.
_BESIDE_THE_LAYERS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
# Key of config.json in a Megatron checkpoint's subfolder hf/: the HF files had stacks of experts.
STACKED = "grpo_megatron_stacked_experts"


@dataclass(frozen=True)
class Stored:
    """Properties of an HF checkpoint. They decide how its files are read, and how exports are written."""

    block: tuple[int, int] | None = None
    """The (rows, columns) that share a scale in FP8 tensors; None if there are no such tensors."""
    left_out: tuple[str, ...] = ()
    """Name prefixes of layers that predict tokens beyond the next one (multi-token prediction). These layers
    are not trained, so they are not loaded."""
    with_vision: Prefixes | None = None
    """Prefixes of tensors' names, if the checkpoint also has a vision model. It is neither loaded nor
    trained, but exported. None: there is no vision model."""
    stacks: StackForm | None = None
    """How all experts of a layer are arranged in one tensor of the files; None if there are no such tensors.
    Exports have the same tensors."""
    mxfp4: bool = False
    """True if the experts' weights are in MXFP4."""

    @property
    def prefix(self) -> str:
        """Prefix of the language model's tensors in the files."""
        return self.with_vision.language if self.with_vision else MODEL


def read_stored(folder: Path) -> Stored:
    """Return the properties of an HF checkpoint.

    They are read from config.json, and for Qwen3.5 with experts from the names of the tensors, too.

    Without config.json, the tensors are taken to be unquantised, and all of them are loaded.

    Raises UserError if config.json or the index of the weights is damaged, or if the weights are quantised in
    another way than FP8 with one scale per block, or MXFP4 of gpt-oss.
    """
    path = folder / "config.json"
    if is_absent(path):
        return Stored()
    try:
        values = read_object(path)
        config = Fields(text_config(values))
        further = config.integer("num_nextn_predict_layers", 0, most=MOST_LAYERS, least=0)
        first = config.integer("num_hidden_layers", most=MOST_LAYERS) if further else 0
        kind = config.text("model_type", None)
        mxfp4 = kind == "gpt_oss" and quantisation_method(config) == "mxfp4"
        block = None if mxfp4 else fp8_block(folder, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    left_out = tuple(f"model.layers.{first + offset}." for offset in range(further))
    if kind in _BESIDE_THE_LAYERS:
        left_out += ("mtp.",)
    with_vision = None
    if values.get("text_config") is not None:
        with_vision = GEMMA if kind == "gemma3_text" else QWEN
    return Stored(block, left_out, with_vision, _stack_form(folder, kind, values), mxfp4)


def _stack_form(folder: Path, kind: str | None, config: dict[str, Any]) -> StackForm | None:
    """Return how the experts lie in a checkpoint's stacks; None if it has no stacks.

    kind: model type of the language model.
    config: all of config.json.
    """
    if kind == "gpt_oss":
        return StackForm.interleaved
    # transformers writes separate experts of Qwen3.5, but published files have stacks.
    if kind == "qwen3_5_moe_text" and (config.get(STACKED) or any(map(is_stack, names_in_files(folder)))):
        return StackForm.rows
    return None


def scales_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Return the shape of the tensor of scales that belongs to a whole FP8 tensor: one scale per block.

    A block at the end of a dimension may be smaller than the other blocks.

    shape: shape of the FP8 tensor.
    block: the (rows, columns) that share a scale.
    """
    return tuple(math.ceil(size / part) for size, part in zip(shape, block, strict=True))


def scales_box(start: Shape, shape: Shape, block: tuple[int, int]) -> tuple[Shape, Shape]:
    """Return (start, shape) of the scales that are needed to dequantise a rectangle of an FP8 tensor.

    start: index of the first element of the rectangle of the FP8 tensor.
    shape: shape of the rectangle of the FP8 tensor.
    block: the (rows, columns) that share a scale.
    """
    first = tuple(at // part for at, part in zip(start, block, strict=True))
    last = tuple(math.ceil((at + size) / part) for at, size, part in zip(start, shape, block, strict=True))
    return first, tuple(end - begin for begin, end in zip(first, last, strict=True))


def dequantised(
    values: torch.Tensor, scales: torch.Tensor, start: Shape, block: tuple[int, int]
) -> torch.Tensor:
    """Dequantise a rectangle of an FP8 tensor: multiply each element by the scale of its block.

    Return float32 [r, c].

    values: float8_e4m3fn [r, c], the elements of the rectangle.
    scales: the scales that `scales_box` selects for the rectangle, of any float dtype.
    start: index of the rectangle's first element in the whole FP8 tensor.
    block: the (rows, columns) that share a scale.
    """
    rows, columns = (
        (at % part + torch.arange(size)) // part
        for at, size, part in zip(start, values.shape, block, strict=True)
    )
    return values.float().mul_(scales.float()[rows][:, columns])


class Dequantised(Mapping):
    """The weights of an engine that has loaded an FP8 checkpoint, {name: tensor}, without their scales.

    An FP8 weight is dequantised each time its name is looked up, to the dtype in which the engine computes.
    The last result is cached, because a weight sync looks up a tensor's name for each slice. All other
    weights are returned as they are.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], block: tuple[int, int]):
        """Wrap an engine's weights. They are dequantised only if FP8 weights with scales are among them.

        weights: {name of an engine's parameter: this rank's part of it}, with the scales of FP8 weights.
        block: the (rows, columns) that share a scale.
        """
        self._weights, self._block = weights, block
        self._kept: tuple[str, torch.Tensor | None] = ("", None)

    def __getitem__(self, name: str) -> torch.Tensor:
        weight, scales = self._weights[name], self._weights.get(name + SCALES)
        if scales is None:
            return weight
        if self._kept[0] != name:
            self._kept = ("", None)
            self._kept = (name, self._values(weight, scales).to(self._dtype))
        return self._kept[1]

    def _values(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 3:  # the experts of a layer
            return torch.stack(list(map(self._values, weight, scales)))
        return dequantised(weight, scales, (0, 0), self._block)

    @cached_property
    def _dtype(self) -> torch.dtype:
        return next(own.dtype for name, own in self._weights.items() if name.endswith("embed_tokens.weight"))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._weights if not name.endswith(SCALES))

    def __len__(self) -> int:
        return sum(1 for _ in self)

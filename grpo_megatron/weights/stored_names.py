"""Names of the tensors in the files of an HF checkpoint, where they differ from those in the weight map.

In checkpoints with a vision model, the names of the language model's tensors have a prefix. Some checkpoints
have all experts of a layer in one tensor (weights.stacked_experts).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from grpo_megatron.model.pieces import Shape
from grpo_megatron.weights.stacked_experts import StoredPlace, members

# Prefix of the weight map's names, and of the files of a checkpoint without a vision model.
MODEL = "model."
_ADAPTER = "base_model.model."  # PEFT's prefix


class Prefixes(NamedTuple):
    """Name prefixes of the tensors in the files of a checkpoint with a language model and a vision model."""

    language: str
    """Prefix of the language model's tensors."""
    vision: tuple[str, ...]
    """Prefixes of the vision model's tensors, and of the projection of its outputs."""


QWEN = Prefixes("model.language_model.", ("model.visual.",))
GEMMA = Prefixes("language_model.model.", ("vision_tower.", "multi_modal_projector."))


def in_files(name: str, prefix: str) -> str:
    """Return the name that a tensor of the language model has in the files of a checkpoint.

    name: name of the tensor in the weight map, or of an adapter's tensor as model.adapters names it for PEFT.
    prefix: prefix of the language model's tensors in the files, such as `model.language_model.`.
    """
    if name.startswith(_ADAPTER):
        # PEFT names transformers' modules, which are called alike in all families with a vision model.
        modules = MODEL if prefix == MODEL else QWEN.language
        return _ADAPTER + in_files(name.removeprefix(_ADAPTER), modules)
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
        inside = members(ours, name, shape_of_stack) if shape_of_stack else {}
        found.update(inside or {ours: StoredPlace(name)})
    # The scales of stacks are read with the stacks.
    scales = {place.scales for place in found.values()}
    return {ours: place for ours, place in found.items() if place.name not in scales}

"""The type of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry


@dataclass(frozen=True)
class Family:
    """A model family: how to read its models' config.json, and how their weights are named and arranged."""

    name: str
    """Common name, such as `qwen2`."""
    architecture: str
    """Name of the transformers class, as in `architectures` of config.json."""
    read: Callable[[Fields], Architecture]
    """Function that reads config.json. It raises UserError for unsupported settings."""
    entries: Callable[[Architecture], list[Entry]]
    """Function that returns the weight map entries in the order of the forward pass. Their Megatron names are
    the names in Megatron's local layers, not in TransformerEngine's."""
    defaults: Mapping[str, Any]
    """{key: value} of transformers' defaults for keys that config.json may lack. Sizes have no default,
    unless published files lack them."""
    has_classifier: bool = True
    """True if transformers has a *ForSequenceClassification class for the family. Reward models need it."""
    vision_architecture: str | None = None
    """Name of the transformers class for models of the family that also have a vision model; None if there is
    no such class."""

    @property
    def reward_architecture(self) -> str | None:
        """Name of the transformers class for reward models of the family; None if there is no such class."""
        return (
            self.architecture.replace("ForCausalLM", "ForSequenceClassification")
            if self.has_classifier
            else None
        )

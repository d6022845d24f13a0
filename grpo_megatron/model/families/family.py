"""The interface of a model family to the rest of the system."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry


@dataclass(frozen=True)
class Family:
    """One model family. Each family is an instance of this class in a file of its own."""

    name: str
    """Common name, such as `qwen2`."""
    architecture: str
    """Name in `architectures` of config.json."""
    read: Callable[[Fields], Architecture]
    """Reads config.json. Raises UserError for what changes the forward pass and is not implemented."""
    entries: Callable[[Architecture], list[Entry]]
    """Returns the weight map in the order of the forward pass, with the names of Megatron's local layers."""
    defaults: Mapping[str, Any]
    """{key: value} for keys that config.json may lack: transformers' defaults. Sizes have no default."""
    has_classifier: bool = True
    """True if transformers has a class of this decoder for sequence classification."""

    @property
    def reward_architecture(self) -> str | None:
        """Name of a reward model in `architectures`; None if there is no such class."""
        return (
            self.architecture.replace("ForCausalLM", "ForSequenceClassification")
            if self.has_classifier
            else None
        )

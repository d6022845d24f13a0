"""What a family of models is to the rest of the system."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.model.architecture import Architecture
from grpo_megatron.model.config_json import Fields
from grpo_megatron.model.entries import Entry


@dataclass(frozen=True)
class Family:
    """One family. A new one is an instance of this class in a file of its own."""

    name: str
    """what people call it"""
    architecture: str
    """its name in `architectures` of config.json"""
    read: Callable[[Fields], Architecture]
    """what config.json says; raises UserError for what would change the forward pass and is not implemented"""
    entries: Callable[[Architecture], list[Entry]]
    """the weight map in the order of the forward pass, with the names of Megatron's local layers"""
    defaults: Mapping[str, Any]
    """{key: value} of keys that config.json may lack: transformers' defaults. Sizes have none and must be there"""
    has_classifier: bool = True
    """transformers has a class of this decoder for sequence classification"""

    @property
    def reward_architecture(self) -> str | None:
        """The name in `architectures` of a reward model; None if there is no such class."""
        return (
            self.architecture.replace("ForCausalLM", "ForSequenceClassification")
            if self.has_classifier
            else None
        )

"""The type of a prompt.

This module imports no heavy library, because it is the only one that environment processes import at start.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a data set, tokenized and ready to be sent to an inference engine."""

    uid: int
    """Index of the prompt's record among all training records, the same in every epoch."""
    ids: np.ndarray
    """Token ids, int32 [P], P > 0."""
    text: str
    """The text that was tokenized. If the record gives token ids, the text that they decode to."""
    answer: str | list[str]
    """The reference answer that the reward compares with, or a list of answers that are all accepted."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The other fields of the record, as plain Python values that can be written as JSON."""
    source: str = ""
    """Name of the file or data set that the record is from."""
    messages: list[dict[str, Any]] | None = None
    """The chat messages that were rendered to `text`, or None if the prompt is not a chat."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the record offers to the model, or None if it offers none."""

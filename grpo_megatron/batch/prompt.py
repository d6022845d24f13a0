"""One prompt. Light to import: processes with environments start with it alone."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One prompt as the prompt source hands it out."""

    uid: int
    """Index of the record among all training records, stable over epochs."""
    ids: np.ndarray
    """int32 [P] tokens, P > 0."""
    text: str
    """What was tokenized; for ids that were given, what they spell."""
    answer: str | list[str]
    """The reference that the reward compares with, or a list of several that are all accepted."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The rest of the record, in plain Python that can be written as JSON."""
    source: str = ""
    """Name of the file or data set."""
    messages: list[dict[str, Any]] | None = None
    """The chat that the text spells; None where it is no chat."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the record offers to the model; None if it has none."""

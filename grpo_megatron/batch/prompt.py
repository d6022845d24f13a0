"""One prompt. Light to import: processes with environments start with it alone."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One prompt as the prompt source hands it out.

    ids: int32 [P] tokens; text: what was tokenized; answer: the reference the reward compares
    with; uid: the record's place among all training records, stable over epochs; fields: the rest
    of the record; source: name of the file or data set it came from.
    """

    uid: int
    ids: np.ndarray
    text: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    source: str = ""

"""The table of a training step: one row for each sequence, without the tokens."""

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

Columns = TypeVar("Columns")


@dataclass(frozen=True)
class SampleTable:
    """Columns of S rows, one for each sequence. Most trajectories have one sequence."""

    group_id: np.ndarray
    """int64 [S]. Id of the sequence's group (all trajectories of one prompt)."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the sequence's trajectory. Its sequences are in the order of time."""
    reward: np.ndarray
    """float [S]. Reward of the sequence's trajectory."""


def concatenated(parts: list[Columns]) -> Columns:
    """Return the rows of all parts, in order. A part is a dataclass whose fields are arrays [S, ...]."""
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, spec.name) for part in parts]) for spec in fields(kind)))

"""The table of a training step: group, trajectory and reward of each sequence, without the tokens."""

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

Columns = TypeVar("Columns")


@dataclass(frozen=True)
class SampleTable:
    """Group, trajectory and reward of each of S sequences, as columns of a table with S rows.

    Most trajectories have one sequence.
    """

    group_id: np.ndarray
    """int64 [S]. Id of the sequence's group (all trajectories of one prompt)."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the sequence's trajectory. The sequences of a trajectory are in the order in which
    they were generated."""
    reward: np.ndarray
    """float [S]. Reward of the sequence's trajectory."""


def concatenated(parts: list[Columns]) -> Columns:
    """Return one object with the rows of all parts, in order.

    parts: objects of the same dataclass, whose fields are all arrays [S, ...] with one row per sequence.
    """
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, spec.name) for part in parts]) for spec in fields(kind)))

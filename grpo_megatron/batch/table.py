"""The table of a training step: one row for each sequence, without the tokens."""

from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class SampleTable:
    """Columns of S rows, one for each sequence. Most trajectories have one sequence."""

    group_id: np.ndarray
    """int64 [S]. Id of the sequence's group (all trajectories of one prompt)."""
    trajectory_id: np.ndarray
    """int64 [S]. Id of the sequence's trajectory. Its sequences are in the order of time."""
    reward: np.ndarray
    """float [S]. Reward of the sequence's trajectory."""

    @classmethod
    def concatenate(cls, parts: list["SampleTable"]) -> "SampleTable":
        """Return the rows of all parts, in order."""
        return cls(*(np.concatenate([getattr(part, spec.name) for part in parts]) for spec in fields(cls)))

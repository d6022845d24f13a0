"""The table of a training step: group, trajectory and reward of each sequence, without the tokens."""

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from grpo_megatron.batch.sample import Sample

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
    """float32 [S]. Reward of the sequence's trajectory. NaN: not known."""
    num_tokens: np.ndarray
    """int64 [S]. Number of tokens of the sequence, prompt and response."""

    @classmethod
    def of(cls, samples: list[Sample]) -> "SampleTable":
        """Return the table with one row for each sample, in order."""
        return cls(
            group_id=np.array([sample.group_id for sample in samples], dtype=np.int64),
            trajectory_id=np.array([sample.trajectory_id for sample in samples], dtype=np.int64),
            reward=np.array(
                [np.nan if sample.reward is None else sample.reward for sample in samples], dtype=np.float32
            ),
            num_tokens=np.array([sample.num_tokens for sample in samples], dtype=np.int64),
        )


def concatenated(parts: list[Columns]) -> Columns:
    """Return one object with the rows of all parts, in order.

    parts: objects of the same dataclass, whose fields are all arrays [S, ...] with one row per sequence.
    """
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, spec.name) for part in parts]) for spec in fields(kind)))


def chosen_rows(columns: Columns, rows: np.ndarray) -> Columns:
    """Return an object of the same dataclass as `columns` with only some of the rows, in the order of `rows`.

    columns: an object of a dataclass whose fields are all arrays [S, ...] with one row per sequence.
    rows: int, indices of the rows.
    """
    return type(columns)(*(getattr(columns, spec.name)[rows] for spec in fields(columns)))

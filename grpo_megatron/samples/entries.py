"""Entries of the ledger: one for each sample and state, as a row of 48 bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from grpo_megatron.batch.sample import Group


class SampleState(IntEnum):
    """State of a sample in the ledger. A sample has one entry for each state that it reaches.

    In the ledger, a sample is a whole trajectory, which may consist of several sequences (batch.Sample).
    """

    admitted = 1  # its prompt was taken for a training step
    generated = 2
    scored = 3
    filtered = 4
    trained = 5
    failed = 6  # its reward or environment failed, or left too few samples of its group
    lost = 7  # its group was aborted before it was needed
    rewind = 8  # no sample's state: the run went back to the end of a step, which undoes later steps


# Every admitted sample of a step ends in exactly one of these.
FINAL = (SampleState.filtered, SampleState.trained, SampleState.failed, SampleState.lost)

ENTRY = np.dtype(
    [
        ("state", "u1"),
        ("unused", "u1"),
        ("name", "<u2"),  # number of a name: the filter that dropped the sample, or a reason; 0: none
        ("step", "<u4"),  # training step, from 1; of a rewind, the last step that is kept
        ("sample", "<i8"),  # trajectory_id
        ("prompt", "<i8"),  # uid of the prompt
        ("member", "<u4"),  # position of the sample in its group, from 0
        ("tokens", "<u4"),  # generated, trained: tokens of all its sequences, prompt and response
        ("oldest", "<i4"),  # generated: oldest weight version; -1: unknown
        ("newest", "<i4"),  # generated: newest weight version; -1: unknown
        ("optimizer_step", "<u2"),  # trained: optimizer step within an epoch of the training step, from 1
        ("updates", "<u2"),  # trained: number of its optimizer steps that were not dropped
        ("value", "<f4"),  # scored: reward; trained: loss weight of each of its trained tokens
    ]
)


@dataclass(frozen=True)
class LeftOut:
    """Samples that a training step took but does not train on, for the ledger.

    rows: ENTRY [n], a row for each sample, as `rows_of` returns it
    state: what became of the samples: filtered, failed or lost
    reason: name of the filter, or why the samples failed or were lost
    """

    rows: np.ndarray
    state: SampleState
    reason: str


def rows_of(groups: Sequence[Group], n: int | None = None) -> np.ndarray:
    """Return an array with a row (dtype ENTRY) for each trajectory, sorted by group and trajectory id.

    The column `state` is `generated`, and `value` is the reward, or NaN if there is none. Columns `step` and
    `name` are 0. Trajectories that a group lacks also have a row, with the state `failed`.

    n: number of trajectories that each group was to get. None: those that the group has, and Group.failed
        more.
    """
    sequences = [sample for group in groups for sample in group.samples]
    ids = np.array([sample.trajectory_id for sample in sequences], np.int64)
    of = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    # The sequences of a trajectory are adjacent.
    first = np.flatnonzero(np.diff(ids, prepend=-1) | np.diff(of, prepend=-1))
    found = np.zeros(len(first), ENTRY)
    found["state"], found["sample"] = SampleState.generated, ids[first]
    if len(first):
        spans = [sample.weight_spans for sample in sequences]
        oldest, newest = ([own[end].version if own else -1 for own in spans] for end in (0, -1))
        found["tokens"] = np.add.reduceat([sample.num_tokens for sample in sequences], first)
        found["oldest"] = np.minimum.reduceat(oldest, first)
        found["newest"] = np.maximum.reduceat(newest, first)
        rewards = [sample.reward for sample in sequences]
        found["value"] = np.array(rewards, np.float32)[first]  # None becomes NaN
    return _in_groups(groups, found, of[first], n)


def _in_groups(groups: Sequence[Group], found: np.ndarray, of: np.ndarray, n: int | None) -> np.ndarray:
    """Add a row of state `failed` for each missing sample. Return all rows, with prompt and `member` set.

    The rows are sorted by group and sample id.

    found: ENTRY [n], rows of the samples that the groups have.
    of: int [n], index of each row's group.
    n: number of samples that each group was to get. None: those that the group has, and Group.failed more.
    """
    counts = np.bincount(of, minlength=len(groups)).tolist()
    lacking = [
        (place, group, has, n or has + group.failed)
        for place, (group, has) in enumerate(zip(groups, counts, strict=True))
        if group.failed or (n and n > has)
    ]
    for place, group, has, size in lacking:
        # RolloutManager numbers the samples of a group like this.
        ids = np.setdiff1d(group.group_id * size + np.arange(size), found["sample"][of == place])[
            : size - has
        ]
        missing = np.zeros(len(ids), ENTRY)
        missing["state"], missing["sample"] = SampleState.failed, ids
        found, of = np.concatenate([found, missing]), np.concatenate([of, np.full(len(ids), place)])
    order = np.lexsort((found["sample"], of))
    found, of = found[order], of[order]
    found["prompt"] = np.array([group.prompt.uid for group in groups], np.int64)[of]
    found["member"] = np.arange(len(of)) - np.searchsorted(of, of)
    return found

"""The books: counts of samples by step and state, and the check that every sample ends exactly once."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_megatron.samples.blocks import LedgerBlock
from grpo_megatron.samples.entries import FINAL, SampleState

# Counts of a step: samples by state, prompts that are used up, and tokens of trained samples.
COUNTED = ("admitted", "trained", "filtered", "failed", "lost", "prompts", "tokens")
_COLUMN = {name: column for column, name in enumerate(COUNTED)}
# Number of steps for which the samples that they admitted are remembered. It is larger than the largest
# rollout.staleness, so that no group is overtaken for longer.
_OVERTAKING_STEPS = 128


@dataclass(frozen=True)
class Fault:
    """Samples of one step whose ledger entries are wrong, such as samples that do not end exactly once.

    step: index of the step
    samples: int64 [n], ids of the samples
    text: what is wrong with each sample; the end of a sentence that begins with the sample
    """

    step: int
    samples: np.ndarray
    text: str

    def __str__(self) -> str:
        ids = ", ".join(map(str, self.samples[:5].tolist()))
        more = f" and {len(self.samples) - 5} more" if len(self.samples) > 5 else ""
        which = f"sample {ids}" if len(self.samples) == 1 else f"each of the samples {ids}{more}"
        return f"step {self.step}: {which} {self.text}"


class Books:
    """Counts the entries of a ledger, and finds samples that do not end exactly once.

    `add` must get the blocks in order, from the beginning of the file or from the end of the part that a
    checkpoint's summary covers. In memory are a row of counts for each step, and the ids of the samples of
    recent steps. A rewind is an entry that undoes all steps after a given one.

    attempt: number of the run's attempt that wrote the last block
    step: step of the last entry
    names: name number i of the entries is names[i - 1]
    first: first step with counts of its own; earlier steps are only included in the totals
    faults: faults of steps that no rewind has undone
    waiting: int64, sorted: ids of the samples of the last step that have no final state yet
    highest: largest id of a sample that was admitted after the last rewind; -1 before the first
    """

    def __init__(self, summary: dict[str, Any] | None = None):
        """Begin to count at the start of a ledger, or continue after a checkpoint.

        summary: what the method `summary` returned for the checkpoint; None: begin at the start.
        """
        summary = summary or {"attempt": 1, "step": 0, "names": [], "totals": dict.fromkeys(COUNTED, 0)}
        self.attempt, self.step = summary["attempt"], summary["step"]
        self.names, self.first = list(summary["names"]), summary["step"] + 1
        self.faults: list[Fault] = []
        self.waiting = np.zeros(0, np.int64)
        self.highest = -1
        self._recent: deque[np.ndarray] = deque()  # samples that the last steps have admitted, sorted
        self._lowest = -1  # no sample up to this id may be admitted any more
        self._before = np.array([summary["totals"][name] for name in COUNTED], np.int64)
        # Counts from step `first` on, with unused rows at the end.
        self._rows = np.zeros((64, len(COUNTED)), np.int64)

    def add(self, block: LedgerBlock) -> None:
        """Add a block of the ledger: take over its attempt and names, and count its entries."""
        self.attempt = block.attempt
        self.names += block.names
        self.count(block.entries)

    def count(self, entries: np.ndarray) -> None:
        """Count entries of the ledger, and note faults. The first entry of a step closes the step before.

        entries: ENTRY [n]. If one of them is a rewind, which undoes later steps, it must be the only one.
        """
        if not len(entries):
            return
        if entries["state"][0] == SampleState.rewind:
            self._rewind(int(entries["step"][0]))
            return
        for part in np.split(entries, np.flatnonzero(np.diff(entries["step"])) + 1):
            step = int(part["step"][0])
            if step != self.step:
                # Training is synchronous: a step admits samples when all samples of earlier steps have ended.
                self.close()
                self.step = step
            self._count_step(part)

    def _count_step(self, entries: np.ndarray) -> None:
        row, states = self._row(self.step), entries["state"]
        counts = np.bincount(states, minlength=len(SampleState) + 1)
        for state in (SampleState.admitted, *FINAL):
            row[_COLUMN[state.name]] += counts[state]
        row[_COLUMN["tokens"]] += entries["tokens"][states == SampleState.trained].sum(dtype=np.int64)
        # A prompt counts with the first sample of its group. The prompt of a lost group is used later.
        firsts = states[entries["member"] == 0]
        row[_COLUMN["prompts"]] += (firsts == SampleState.admitted).sum() - (firsts == SampleState.lost).sum()
        if counts[SampleState.admitted]:
            self._admit(entries["sample"][states == SampleState.admitted])
        for state in (SampleState.generated, SampleState.scored, *FINAL):
            if counts[state]:
                self._note(state, entries["sample"][states == state])

    def _admit(self, samples: np.ndarray) -> None:
        new, times = np.unique(samples, return_counts=True)
        again = times > 1
        if new[0] <= self.highest:
            # Ids rise in the order in which groups are started. Others may overtake a group for a few steps.
            again |= new <= self._lowest
            for earlier in self._recent:
                again |= _are_in(new, earlier)
        self._fault(new[again], "was admitted twice")
        self.highest = max(self.highest, int(new[-1]))
        self._recent.append(new)
        if len(self._recent) > _OVERTAKING_STEPS:
            self._lowest = max(self._lowest, int(self._recent.popleft()[-1]))
        self.waiting = np.union1d(self.waiting, new)

    def _note(self, state: SampleState, samples: np.ndarray) -> None:
        found, times = np.unique(samples, return_counts=True)
        self._fault(found[times > 1], f"was {state.name} twice")
        unknown = found[~_are_in(found, self.waiting)]
        self._fault(unknown, f"was {state.name}, but had ended before or was never admitted")
        if state in FINAL:
            self.waiting = self.waiting[~_are_in(self.waiting, found)]

    def close(self) -> None:
        """End the current step. If some of its samples have no final state, note a fault."""
        self._fault(self.waiting, "was admitted, but was never trained, filtered, failed or lost")
        self.waiting = self.waiting[:0]

    def _fault(self, samples: np.ndarray, text: str) -> None:
        if len(samples):
            self.faults.append(Fault(self.step, samples, text))

    def _rewind(self, step: int) -> None:
        """Undo all steps after `step`: count their samples as lost, and drop their faults.

        If steps before `first` are among them, all samples so far count as lost, because these steps have no
        counts of their own. Ids of undone samples may be admitted again.
        """
        if step < self.first - 1:
            # The summary does not say which of its samples belong to later steps. Count them all as lost.
            self._before += self._rows.sum(axis=0)
            self._rows[:], self.first = 0, step + 1
            _lose(self._before)
        _lose(self._rows[step + 1 - self.first :])
        self.faults = [fault for fault in self.faults if fault.step <= step]
        self.waiting, self.highest, self.step = self.waiting[:0], -1, step
        self._recent, self._lowest = deque(), -1

    def _row(self, step: int) -> np.ndarray:
        place = step - self.first
        while place >= len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        return self._rows[place]

    def last_step(self) -> int:
        """Return the last step from `first` on that has admitted samples, even if a rewind has undone it.

        If there is none, the result is first - 1, which is 0 without a summary.
        """
        found = np.flatnonzero(self._rows[:, _COLUMN["admitted"]])
        return self.first + int(found[-1]) if len(found) else self.first - 1

    def totals(self) -> dict[str, int]:
        """Return {name: count} over all steps.

        The names are "admitted", "trained", "filtered", "failed" and "lost" (samples), "prompts" (used up),
        "tokens" (of trained samples), and "waiting" (admitted samples that have no final state yet).
        """
        return _named(self._before + self._rows.sum(axis=0))

    def of_step(self, step: int) -> dict[str, int]:
        """Return {name: count} of one step, such as {"trained": 512, ...}. `totals` lists the names.

        step: index of the step, at least `first`.
        """
        return _named(self._row(step))

    def summary(self) -> dict[str, Any]:
        """Return the state from which a new Books can continue, as JSON values for a checkpoint."""
        return {"attempt": self.attempt, "step": self.step, "names": [*self.names], "totals": self.totals()}


def _named(counts: np.ndarray) -> dict[str, int]:
    named = dict(zip(COUNTED, counts.tolist(), strict=True))
    return named | {"waiting": named["admitted"] - sum(named[state.name] for state in FINAL)}


def _lose(counts: np.ndarray) -> None:
    """Change counts in place, so that all admitted samples count as lost, because a rewind has undone them.

    counts: int64 [..., 7], columns as in COUNTED.
    """
    counts[..., _COLUMN["lost"]] = counts[..., _COLUMN["admitted"]]
    for name in ("trained", "filtered", "failed", "prompts", "tokens"):
        counts[..., _COLUMN[name]] = 0


def _are_in(ids: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return bool [n]: for each of n ids, True if it is in `others`, which must be sorted."""
    if not len(others):
        return np.zeros(len(ids), bool)
    return others[np.searchsorted(others[:-1], ids)] == ids

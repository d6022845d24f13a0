"""The ledger that a training run writes: what became of each sample of each step."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.errors import UserError
from grpo_megatron.paths import is_absent
from grpo_megatron.samples.blocks import LEDGER, DamagedLedger, LedgerFile, read_blocks
from grpo_megatron.samples.books import Books
from grpo_megatron.samples.entries import ENTRY, LeftOut, SampleState, rows_of

logger = logging.getLogger(__name__)

_COUNTERS = ("tokens", "prompts")  # counts that a resumed run continues
FAILED = "its reward or environment failed"


class Ledger:
    """Writes the entries of a run's samples to ledger.bin, and checks that each sample ends exactly once.

    The training loop makes these calls for each step, in this order: `taken`, `filtered`, `trained`,
    `balance`.
    """

    def __init__(
        self,
        folder: str,
        step: int = 0,
        summary: dict[str, Any] | None = None,
        own: bool = True,
        replayed: bool = False,
    ):
        """Open the ledger in a run's folder. If the ledger has entries, append a rewind.

        A rewind is an entry that undoes all steps after a given one, here after `step`. If `own` is False, or
        if the entries after the summary include a rewind to a step before `step`, all samples so far belong
        to abandoned steps, and the rewind undoes all steps.

        step: last step of the checkpoint that the run continues from; 0 for a new run.
        summary: what `state_dict` returned for that checkpoint; None for a new run.
        own: False if another run wrote the checkpoint. The samples in the folder's ledger then count as lost.
        replayed: True if the samples come from a recording. Their ids may begin anew in each step. The ledger
            then adds the same number to all ids of a step, so that no id occurs twice.

        Raises UserError if the ledger does not fit the summary or is damaged.
        """
        path = Path(folder, LEDGER)
        books, last, end = read_books(path, summary if own else None)
        self._books, self._file = books, LedgerFile(path, last, end)
        self._num_written = len(books.names)  # number of names that the file has
        if end:
            books.attempt += 1
            # The run may have gone back to an earlier step after the checkpoint was written, and now leaves
            # that branch. All samples so far then belong to abandoned steps.
            continues = own and (summary is None or books.first == step + 1)
            self._append(_rewind(step if continues else 0))
        counted = books.totals()
        # Counts of another run before the checkpoint that it wrote.
        self._before = {name: summary[name] - counted[name] if summary else 0 for name in _COUNTERS}
        self._replayed, self._shift = replayed, 0
        self._rows = np.zeros(0, ENTRY)  # the samples that the step has taken, sorted by id

    @property
    def tokens(self) -> int:
        """Number of tokens of the sequences that all steps have trained on. Undone steps do not count."""
        return self._before["tokens"] + self._books.totals()["tokens"]

    @property
    def prompts(self) -> int:
        """Number of prompts that all steps have used up. Undone steps do not count."""
        return self._before["prompts"] + self._books.totals()["prompts"]

    def sample_of(self, trajectory_id: int) -> int:
        """Return the id by which the ledger knows a trajectory of the current step."""
        return trajectory_id + self._shift

    def taken(self, step: int, groups: Sequence[Group], left_out: Sequence[LeftOut]) -> None:
        """Record the samples that a step has taken, with tokens, weight versions and rewards.

        groups: the groups to filter and to train on.
        left_out: samples that the step does not train on.

        Raises UserError if no response of `groups` has a token to train on, or if a sample was taken before.
        """
        rows = rows_of(groups)
        every = np.concatenate([rows, *(left.rows for left in left_out)])
        if self._replayed and len(every):
            self._shift = max(0, self._books.highest + 1 - int(every["sample"].min()))
            for own in (rows, every):
                own["sample"] += self._shift
        done = every[every["state"] == SampleState.generated]
        parts = [
            _entries(SampleState.admitted, step, every),
            _entries(SampleState.generated, step, done, ("tokens", "oldest", "newest")),
            _entries(SampleState.scored, step, done, ("value",)),
        ]
        ends = [LeftOut(rows[rows["state"] == SampleState.failed], SampleState.failed, FAILED)]
        for left in left_out:
            # A sample of an aborted group is lost, whether it was finished or not.
            failed = (left.rows["state"] == SampleState.failed) & (left.state != SampleState.lost)
            ends += [
                replace(left, rows=left.rows[~failed]),
                LeftOut(left.rows[failed], SampleState.failed, FAILED),
            ]
        parts += [
            _entries(end.state, step, end.rows, name=self._number(end.reason))
            for end in ends
            if len(end.rows)
        ]
        self._append(np.concatenate(parts))
        self._rows = every[np.argsort(every["sample"])]
        self._must_balance()
        if groups and not any(sample.num_trained for group in groups for sample in group.samples):
            some = ", ".join(map(str, rows["sample"][:5].tolist()))
            raise UserError(
                f"step {step}: all {len(rows)} responses are empty, so there is nothing to train on (samples "
                f"{some}, ...): none has a token that the model wrote. Look at the responses with "
                "rollout.record, and check the chat template, rollout.stop and rollout.stop_token_ids"
            )

    def filtered(self, step: int, removed: Sequence[tuple[str, np.ndarray]]) -> None:
        """Record the samples that filters removed. removed: for each filter its name and the samples' ids."""
        parts = [
            _entries(SampleState.filtered, step, self._of(samples), name=self._number(name))
            for name, samples in removed
            if len(samples)
        ]
        if parts:
            self._append(np.concatenate(parts))

    def trained(
        self,
        step: int,
        tables: Sequence[SampleTable],
        weights: Sequence[np.ndarray],
        dropped: Sequence[bool],
    ) -> None:
        """Record the samples that a step has trained on: one entry for each, whatever train.ppo_epochs is.

        tables: the sequences of each mini-batch.
        weights: float64 [S] for each mini-batch: loss weight of the trained tokens of each sequence.
        dropped: for each optimizer step of all epochs, in order, True if the step was dropped.
        """
        dropped_by_epoch = np.array(dropped, bool).reshape(-1, len(tables))
        parts = []
        for index, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            first = np.flatnonzero(np.diff(table.trajectory_id, prepend=-1))
            entries = _entries(SampleState.trained, step, self._of(table.trajectory_id[first]))
            entries["tokens"] = np.add.reduceat(table.num_tokens, first)
            entries["value"] = np.maximum.reduceat(weight, first)  # a sequence without trained tokens has 0
            entries["optimizer_step"] = index + 1
            entries["updates"] = (~dropped_by_epoch[:, index]).sum()
            parts.append(entries)
        self._append(np.concatenate(parts))

    def balance(self) -> None:
        """End the current step. Raises UserError unless each of its samples is accounted for exactly once.

        Each sample must have ended in one of these ways: trained, filtered, failed or lost.
        """
        self._books.close()
        self._must_balance()

    def _must_balance(self) -> None:
        if self._books.faults:
            fault = self._books.faults[0]
            raise UserError(
                f"the sample ledger does not balance: {fault}. The usual cause is a filter "
                "(algorithm.filters) that returns a group twice or creates new samples; correct the filter. "
                f"`grpo-megatron ledger {self._file.path.parent} --sample {fault.samples[0]}` shows what "
                "happened to one of the samples"
            )

    def _of(self, samples: np.ndarray) -> np.ndarray:
        """Return rows, ENTRY [n], with id, prompt and member (position in the group) of samples.

        A sample that the current step has not taken gets the prompt -1, and its member has no meaning.

        samples: int64 [n], ids of the samples.
        """
        samples = samples + self._shift
        place = np.searchsorted(self._rows["sample"][:-1], samples)
        rows = self._rows[place] if len(self._rows) else np.zeros(len(samples), ENTRY)
        rows["prompt"][rows["sample"] != samples] = -1
        rows["sample"] = samples
        return rows

    def _number(self, name: str) -> int:
        """Return the number, from 1, that stands for the name of a filter or reason in entries.

        A new name gets the next number. It is written with the next block.
        """
        if name not in self._books.names:
            self._books.names.append(name)
        return self._books.names.index(name) + 1

    def _append(self, entries: np.ndarray) -> None:
        names = self._books.names
        self._file.append(self._books.attempt, names[self._num_written :], entries)
        self._num_written = len(names)
        self._books.count(entries)

    def state_dict(self) -> dict[str, Any]:
        """Return a summary of the ledger for a checkpoint, so that a resumed run need not read all entries.

        Entries that could not be written before are written now. Raises OSError if this fails again: no run
        could continue from a checkpoint whose entries are not in the file.
        """
        if error := self._file.flush():
            raise OSError(error.errno, error.strerror, str(self._file.path)) from error
        counters = {"tokens": self.tokens, "prompts": self.prompts}
        return self._books.summary() | counters | {"last": self._file.last, "end": self._file.end}


def read_books(path: Path, summary: dict[str, Any] | None = None) -> tuple[Books, int, int]:
    """Read a ledger. Return (its counts, offset of its last block, offset of the byte after the last block).

    The offsets are 0 if there is no block or no file.

    summary: what `Ledger.state_dict` returned for the checkpoint that a run continues from. Only the blocks
        after this checkpoint are read. At the first damaged one, reading ends with a warning, because the
        run undoes them all anyway. None: the whole ledger is read.

    Raises UserError if the ledger lacks the last block that the summary covers. Raises DamagedLedger if the
    ledger is damaged and there is no summary, or if that last block is damaged and others follow.
    """
    books, last, end = Books(), 0, 0
    if summary:
        must_reach(path, summary)
        books, last, end = Books(summary), summary["last"], summary["end"]
    if is_absent(path):
        return books, last, end
    try:
        for block in read_blocks(path, end):
            books.add(block)
            last, end = block.start, block.end
    except DamagedLedger as error:
        if not summary:
            raise
        logger.warning(
            f"{path} is damaged at byte {error.offset}. All entries from there on are removed. They belong "
            "to steps that the run will repeat"
        )
    return books, last, end


def must_reach(path: Path, summary: dict[str, Any]) -> None:
    """Raise UserError unless the ledger contains the block that was the last one when `summary` was made.

    summary: what `Ledger.state_dict` returned for a checkpoint.
    """
    if not summary["end"]:
        return
    found = None if is_absent(path) else next(read_blocks(path, summary["last"]), None)
    if found is None or found.end != summary["end"]:
        raise UserError(
            f"{path} is not the ledger that the checkpoint of step {summary['step']} belongs to: it lacks "
            f"the entries at byte {summary['last']}. Restore the file, continue from another checkpoint with "
            "run.resume=FOLDER, or start over with run.resume=none"
        )


def _entries(
    state: SampleState, step: int, rows: np.ndarray, keep: Sequence[str] = (), name: int = 0
) -> np.ndarray:
    """Return a ledger entry for each row, with this state and step, and the row's sample, prompt and member.

    rows: ENTRY [n].
    keep: further columns to take from the rows.
    name: number of the name of a filter or reason; 0: none.

    Returns ENTRY [n].
    """
    entries = np.zeros(len(rows), ENTRY)
    entries["state"], entries["step"], entries["name"] = state, step, name
    for column in ("sample", "prompt", "member", *keep):
        entries[column] = rows[column]
    return entries


def _rewind(step: int) -> np.ndarray:
    return _entries(SampleState.rewind, step, np.zeros(1, ENTRY))

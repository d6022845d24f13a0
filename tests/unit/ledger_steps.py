"""Steps of a training as a ledger records them, with groups made of numbers only."""

from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.samples.blocks import LEDGER, read_blocks
from grpo_megatron.samples.entries import LeftOut, SampleState, rows_of
from grpo_megatron.samples.ledger import Ledger, read_books

N = 2


def sample(number: int, member: int, length: int = 3, reward: float = 0.5, trained: bool = True) -> Sample:
    return Sample.of(
        group_id=number,
        trajectory_id=N * number + member,
        prompt_ids=np.array([5, 6], np.int32),
        response_ids=np.full(length, 7, np.int32),
        loss_mask=np.full(length, trained),
        rollout_logprobs=np.zeros(length, np.float32),
        finish_reason="stop",
        weight_spans=(WeightSpan(3, 0, 1), WeightSpan(4, 1, length)),
        reward=reward,
    )


def group(number: int, *members: int, failed: int = 0, **values) -> Group:
    """Return group `number` of prompt 100 + `number`, with these members, by default all N."""
    members = members or (() if failed else range(N))
    samples = tuple(sample(number, member, **values) for member in members)
    return Group(number, Prompt(100 + number, np.array([5, 6], np.int32), "", ""), samples, failed)


def tables(*parts: list[Group]) -> list[SampleTable]:
    """Return the table of each mini-batch."""
    return [SampleTable.of([sample for group in part for sample in group.samples]) for part in parts]


def train(
    ledger: Ledger, step: int, *parts: list[Group], dropped=None, left_out: tuple[LeftOut, ...] = ()
) -> None:
    """Record a step that trains on all its groups, in one mini-batch for each list of groups."""
    ledger.taken(step, [group for part in parts for group in part], left_out)
    of = tables(*parts)
    weights = [np.full(len(table.reward), 0.25) for table in of]
    ledger.trained(step, of, weights, dropped or [False] * len(parts))
    ledger.balance()


def ledger_of(folder: Path, steps: int) -> Ledger:
    """Write the ledger of a run of `steps` steps with two groups of N samples in each."""
    ledger = Ledger(str(folder))
    for step in range(1, steps + 1):
        train(ledger, step, [group(2 * step)], [group(2 * step + 1)])
    return ledger


def continued_run(folder: Path) -> None:
    """Write the ledger of a run that was killed in step 3, and continued from step 1 to the end of step 2."""
    ledger = ledger_of(folder, 1)
    saved = ledger.state_dict()
    train(ledger, 2, [group(4)], [group(5)], dropped=[False, True])
    ledger.taken(3, [group(6, 0, failed=1)], [])
    ledger = Ledger(str(folder), 1, saved)
    aborted = LeftOut(rows_of([group(5, 0)], N), SampleState.lost, "aborted")
    ledger.taken(2, [group(4), group(6)], [aborted])
    ledger.filtered(2, [("nonzero_variance", np.array([12, 13]))])
    ledger.trained(2, tables([group(4)]), [np.full(2, 0.125)], [False])
    ledger.balance()


def states_of(folder: Path, sample: int) -> list[tuple[int, int, str]]:
    """Return (attempt, step, name of the state) of each entry of a sample."""
    return [
        (block.attempt, int(entry["step"]), SampleState(entry["state"]).name)
        for block in read_blocks(folder / LEDGER)
        for entry in block.entries[
            (block.entries["sample"] == sample) & (block.entries["state"] != SampleState.rewind)
        ]
    ]


def entries_of(folder: Path, state: SampleState) -> np.ndarray:
    """Return all entries of a state, in order."""
    blocks = read_blocks(folder / LEDGER)
    return np.concatenate([block.entries[block.entries["state"] == state] for block in blocks])


def totals(folder) -> dict[str, int]:
    return read_books(folder / LEDGER)[0].totals()


def counts(**changed) -> dict[str, int]:
    names = ("admitted", "trained", "filtered", "failed", "lost", "prompts", "tokens", "waiting")
    return dict.fromkeys(names, 0) | changed

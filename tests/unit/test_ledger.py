"""The ledger of a run: every sample has a story, and each fault in the books is noticed, by id."""

import re
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.errors import UserError
from grpo_megatron.samples.blocks import LEDGER, LedgerFile, read_blocks
from grpo_megatron.samples.books import Books
from grpo_megatron.samples.entries import ENTRY, LeftOut, SampleState, rows_of
from grpo_megatron.samples.ledger import Ledger, read_books
from tests.ledgers import used_prompts
from tests.unit.ledger_steps import N, counts, entries_of, group, ledger_of, states_of, tables, totals, train

# What is recorded


def test_each_state_of_a_sample_is_recorded(tmp_path):
    ledger = Ledger(str(tmp_path))
    first, second = [group(0, reward=0.25)], [group(1, length=5)]
    ledger.taken(1, [*first, *second], [])
    of = tables(first, second)
    ledger.trained(1, of, [np.array([0.5, 0.0]), np.array([0.125, 0.25])], [False, True, False, False])
    ledger.balance()
    assert states_of(tmp_path, 3) == [
        (1, 1, state) for state in ("admitted", "generated", "scored", "trained")
    ]
    generated = entries_of(tmp_path, SampleState.generated)
    assert generated["sample"].tolist() == [0, 1, 2, 3]
    assert generated["prompt"].tolist() == [100, 100, 101, 101]
    assert generated["member"].tolist() == [0, 1, 0, 1]
    assert generated["tokens"].tolist() == [5, 5, 7, 7]
    assert (generated["oldest"] == 3).all()
    assert (generated["newest"] == 4).all()
    assert entries_of(tmp_path, SampleState.scored)["value"].tolist() == [0.25, 0.25, 0.5, 0.5]
    trained = entries_of(tmp_path, SampleState.trained)
    assert trained["sample"].tolist() == [0, 1, 2, 3]
    assert trained["prompt"].tolist() == [100, 100, 101, 101]
    assert trained["value"].tolist() == [0.5, 0.0, 0.125, 0.25]
    assert trained["optimizer_step"].tolist() == [1, 1, 2, 2]
    # Two epochs: the second mini-batch's optimizer step was dropped once. That counts as trained once.
    assert trained["updates"].tolist() == [2, 2, 1, 1]
    assert totals(tmp_path) == counts(admitted=4, trained=4, prompts=2, tokens=24)


def test_a_trajectory_of_several_sequences_is_one_sample(tmp_path):
    whole = group(0)
    one, two = whole.samples
    later = replace(one, weight_spans=(WeightSpan(2, 0, 1), WeightSpan(6, 1, 3)))
    split = replace(whole, samples=(one, later, two))
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, [split], [])
    ledger.trained(1, tables([split]), [np.array([0.0, 0.5, 0.25])], [False])
    ledger.balance()
    trained = entries_of(tmp_path, SampleState.trained)
    assert trained["sample"].tolist() == [0, 1]
    assert trained["tokens"].tolist() == [10, 5]
    assert trained["value"].tolist() == [0.5, 0.25]
    assert totals(tmp_path)["tokens"] == 15
    generated = entries_of(tmp_path, SampleState.generated)
    assert [(e["tokens"], e["oldest"], e["newest"]) for e in generated] == [(10, 2, 6), (5, 3, 4)]


def test_what_is_not_trained_on_ends_too(tmp_path):
    """One of group 0 has failed, a filter removed group 1 before and group 2 after the batch was full, group
    3 failed as a whole, and group 4 was aborted with one sample done and one not.
    """
    ledger, kept = Ledger(str(tmp_path)), group(0, 1, failed=1)
    left_out = [
        LeftOut(rows_of([group(1, 1, failed=1)], N), SampleState.filtered, "hard"),
        LeftOut(rows_of([group(3, failed=N)], N), SampleState.failed, "too few"),
        LeftOut(rows_of([group(4, 0)], N), SampleState.lost, "aborted"),
        LeftOut(rows_of([group(5, failed=N)], N), SampleState.lost, "aborted"),
    ]
    ledger.taken(1, [kept, group(2)], left_out)
    ledger.filtered(1, [("easy", np.array([4, 5])), ("hard", np.array([], int))])
    ledger.trained(1, tables([kept]), [np.ones(1)], [False])
    ledger.balance()
    assert totals(tmp_path) == counts(
        admitted=12, trained=1, filtered=3, failed=4, lost=4, prompts=4, tokens=5
    )
    ends = {sample: states_of(tmp_path, sample)[-1][2] for sample in range(12)}
    assert ends == dict(
        enumerate(["failed", "trained", "failed", *["filtered"] * 3, *["failed"] * 2, *["lost"] * 4])
    )
    names = [name for block in read_blocks(tmp_path / LEDGER) for name in block.names]
    filtered = entries_of(tmp_path, SampleState.filtered)
    assert {names[e["name"] - 1]: int(e["sample"]) for e in filtered} == {"hard": 3, "easy": 5}
    assert [state for _, _, state in states_of(tmp_path, 8)] == ["admitted", "generated", "scored", "lost"]
    assert [state for _, _, state in states_of(tmp_path, 9)] == ["admitted", "lost"]
    assert used_prompts(tmp_path) == {1: [100, 102, 101, 103]}


def test_a_step_of_empty_responses_ends_with_one_message(tmp_path):
    ledger = Ledger(str(tmp_path))
    some = group(1, 1, trained=True, length=1)
    train(ledger, 1, [group(0, trained=False), some])
    with pytest.raises(UserError) as caught:
        ledger.taken(2, [group(2, trained=False), group(3, trained=False)], [])
    assert re.search(
        r"step 2: all 4 responses are empty.*samples 4, 5, 6, 7, \.\.\.\).*rollout\.stop", str(caught.value)
    )


# Faults, each planted


def fault_of(call) -> str:
    with pytest.raises(UserError, match="the sample ledger does not balance: ") as caught:
        call()
    return str(caught.value).split("balance: ")[1].split(". ")[0]


def test_groups_may_overtake_others_but_not_come_twice(tmp_path):
    """A step with rollout.order=window trains on a group that was started before others of earlier steps."""
    ledger = Ledger(str(tmp_path))
    for step, numbers in enumerate(([0, 2], [3, 1], [6, 4], [5, 7]), 1):
        train(ledger, step, [group(number) for number in numbers])
    with pytest.raises(UserError, match="step 5: each of the samples 8, 9 was admitted twice"):
        ledger.taken(5, [group(8), group(4)], ())


def test_a_group_that_comes_again_much_later_is_noticed(tmp_path):
    ledger = Ledger(str(tmp_path))
    for step in range(1, 140):
        train(ledger, step, [group(step)])
    with pytest.raises(UserError, match="step 140: each of the samples 6, 7 was admitted twice"):
        ledger.taken(140, [group(3), group(140)], ())


def test_a_sample_that_is_planted_twice_is_noticed(tmp_path):
    ledger = ledger_of(tmp_path, 1)
    assert (
        fault_of(lambda: ledger.taken(2, [group(4), group(4, 1)], []))
        == "step 2: sample 9 was admitted twice"
    )
    (tmp_path / "other").mkdir()
    ledger = ledger_of(tmp_path / "other", 2)
    assert (
        fault_of(lambda: ledger.taken(3, [group(6), group(3)], []))
        == "step 3: each of the samples 6, 7 was admitted twice"
    )


def test_a_sample_that_is_left_out_is_noticed(tmp_path):
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, [group(0), group(1)], [])
    ledger.trained(1, tables([group(0), group(1, 0)]), [np.ones(3)], [False])
    assert (
        fault_of(ledger.balance)
        == "step 1: sample 3 was admitted, but was never trained, filtered, failed or lost"
    )
    found = read_books(tmp_path / LEDGER)[0]
    assert (found.faults, found.waiting.tolist()) == ([], [3])  # the step may still be going on
    LedgerFile(tmp_path / LEDGER, 0, ledger.state_dict()["end"]).append(
        1, [], _entry(SampleState.admitted, 2, 9)
    )
    assert [str(fault) for fault in read_books(tmp_path / LEDGER)[0].faults] == [
        "step 1: sample 3 was admitted, but was never trained, filtered, failed or lost"
    ]


def test_a_sample_that_is_trained_in_two_steps_is_noticed(tmp_path):
    ledger = ledger_of(tmp_path, 1)
    ledger.taken(2, [group(4)], [])
    ledger.trained(2, tables([group(4), group(3, 0)]), [np.ones(3)], [False])
    assert (
        fault_of(ledger.balance) == "step 2: sample 6 was trained, but had ended before or was never admitted"
    )


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[group(0)], [group(0, 1)]], "step 1: sample 1 was trained twice"),
        ([[group(0), group(7)]], "step 1: each of the samples 14, 15 was trained, but had ended"),
        ([[group(n) for n in range(3)]], "step 1: each of the samples 2, 3, 4, 5 was trained, but had ended"),
    ],
)
def test_what_a_wrong_filter_does_is_noticed(parts, said, tmp_path):
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, [group(0)], [])
    of = tables(*parts)
    ledger.trained(1, of, [np.ones(len(table.reward)) for table in of], [False] * len(of))
    assert fault_of(ledger.balance).startswith(said)


def test_a_sample_that_is_trained_and_filtered_is_noticed(tmp_path):
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, [group(0)], [])
    ledger.filtered(1, [("f", np.array([1]))])
    ledger.trained(1, tables([group(0)]), [np.ones(2)], [False])
    assert (
        fault_of(ledger.balance) == "step 1: sample 1 was trained, but had ended before or was never admitted"
    )


def _entry(state: SampleState, step: int, sample: int) -> np.ndarray:
    entry = np.zeros(1, ENTRY)
    entry["state"], entry["step"], entry["sample"] = state, step, sample
    return entry


# Books


def test_books_balance_whatever_happens(tmp_path):
    """admitted = trained + filtered + failed + lost + waiting, at every point of random steps and rewinds."""
    draw = np.random.default_rng(5)
    books = Books()
    kept: dict[int, dict[str, int]] = {}
    for _ in range(300):
        if draw.random() < 0.1:
            back = int(draw.integers(0, books.step + 1))
            books.count(_entry(SampleState.rewind, back, 0))
            next_id = 0
        step = books.step + 1
        next_id = 1000 * step
        ids = next_id + draw.permutation(draw.integers(1, 40))
        admitted = np.repeat(_entry(SampleState.admitted, step, 0), len(ids))
        admitted["sample"], admitted["member"] = ids, 1
        books.count(admitted)
        ends = admitted.copy()
        ends["state"] = draw.choice(
            [SampleState.trained, SampleState.filtered, SampleState.failed, SampleState.lost], len(ids)
        )
        ends["tokens"] = draw.integers(1, 9, len(ids))
        part = draw.integers(0, len(ids) + 1)
        for own in (ends[:part], ends[part:]):
            books.count(own)
            assert books.of_step(step)["waiting"] == len(books.waiting)
        kept = {one: found for one, found in kept.items() if one < step} | {
            step: {
                state: int((ends["state"] == SampleState[state]).sum())
                for state in ("trained", "filtered", "failed")
            }
        }
    books.close()
    assert books.faults == []
    total = books.totals()
    for state in ("trained", "filtered", "failed"):
        assert total[state] == sum(found[state] for found in kept.values())
    assert total["waiting"] == 0


def test_the_ids_of_a_recording_may_begin_anew_in_each_step(tmp_path):
    """A recording that a run made has ids that rise. They stay."""
    ledger = Ledger(str(tmp_path), replayed=True)
    for step, number in ((1, 3), (2, 3), (3, 10)):
        ledger.taken(step, [group(number), group(number + 1)], [])
        ledger.filtered(step, [("f", N * number + np.arange(1))])
        ledger.trained(step, tables([group(number, 1), group(number + 1)]), [np.ones(3)], [False])
        ledger.balance()
    assert entries_of(tmp_path, SampleState.admitted)["sample"].tolist() == [
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        20,
        21,
        22,
        23,
    ]
    assert entries_of(tmp_path, SampleState.filtered)["sample"].tolist() == [6, 10, 20]
    assert entries_of(tmp_path, SampleState.trained)["prompt"].tolist() == [103, 104, 104] * 2 + [
        110,
        111,
        111,
    ]
    with pytest.raises(UserError, match="samples 24, 25 was admitted twice"):
        ledger.taken(4, [group(10), group(10)], [])

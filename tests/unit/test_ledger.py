"""The ledger of a run: every sample has a story, and each fault in the books is noticed, by id."""

import json
import re

import numpy as np
import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.samples.blocks import LEDGER, LedgerFile, read_blocks
from grpo_megatron.samples.books import Books
from grpo_megatron.samples.entries import ENTRY, LeftOut, State, rows_of
from grpo_megatron.samples.ledger import Ledger, read_books
from tests.ledgers import used_prompts
from tests.unit.ledger_steps import N, group, ledger_of, states_of, tables, train


def totals(folder) -> dict[str, int]:
    return read_books(folder / LEDGER)[0].totals()


def counts(**changed) -> dict[str, int]:
    names = ("admitted", "trained", "filtered", "failed", "lost", "prompts", "tokens", "waiting")
    return dict.fromkeys(names, 0) | changed


def entries_of(folder, state) -> np.ndarray:
    return np.concatenate([b.entries[b.entries["state"] == state] for b in read_blocks(folder / LEDGER)])


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
    generated = entries_of(tmp_path, State.generated)
    assert generated["sample"].tolist() == [0, 1, 2, 3]
    assert generated["prompt"].tolist() == [100, 100, 101, 101]
    assert generated["member"].tolist() == [0, 1, 0, 1]
    assert generated["tokens"].tolist() == [5, 5, 7, 7]
    assert (generated["oldest"] == 3).all()
    assert (generated["newest"] == 4).all()
    assert entries_of(tmp_path, State.scored)["value"].tolist() == [0.25, 0.25, 0.5, 0.5]
    trained = entries_of(tmp_path, State.trained)
    assert trained["sample"].tolist() == [0, 1, 2, 3]
    assert trained["prompt"].tolist() == [100, 100, 101, 101]
    assert trained["value"].tolist() == [0.5, 0.0, 0.125, 0.25]
    assert trained["optimizer_step"].tolist() == [1, 1, 2, 2]
    # Two epochs: the second mini-batch's optimizer step was dropped once. That counts as trained once.
    assert trained["updates"].tolist() == [2, 2, 1, 1]
    assert totals(tmp_path) == counts(admitted=4, trained=4, prompts=2, tokens=24)


def test_a_trajectory_of_several_sequences_is_one_sample(tmp_path):
    from dataclasses import replace

    whole = group(0)
    one, two = whole.samples
    split = replace(whole, samples=(one, replace(one, response_ids=one.response_ids + 1), two))
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, [split], [])
    ledger.trained(1, tables([split]), [np.array([0.0, 0.5, 0.25])], [False])
    ledger.balance()
    trained = entries_of(tmp_path, State.trained)
    assert trained["sample"].tolist() == [0, 1]
    assert trained["tokens"].tolist() == [10, 5]
    assert trained["value"].tolist() == [0.5, 0.25]
    assert totals(tmp_path)["tokens"] == 15


def test_what_is_not_trained_on_ends_too(tmp_path):
    """One of group 0 has failed, a filter removed group 1 before and group 2 after the batch was full, group
    3 failed as a whole, and group 4 was aborted with one sample done and one not.
    """
    ledger, kept = Ledger(str(tmp_path)), group(0, 1, failed=1)
    left_out = [
        LeftOut(rows_of([group(1, 1, failed=1)], N), State.filtered, "hard"),
        LeftOut(rows_of([group(3, failed=N)], N), State.failed, "too few"),
        LeftOut(rows_of([group(4, 0)], N), State.lost, "aborted"),
        LeftOut(rows_of([group(5, failed=N)], N), State.lost, "aborted"),
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
    filtered = entries_of(tmp_path, State.filtered)
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
    with pytest.raises(UserError, match="the books of the samples do not balance: ") as caught:
        call()
    return str(caught.value).split("balance: ")[1].split(". ")[0]


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
        == "step 1: sample 3 was admitted, but was neither trained nor filtered, failed or lost"
    )
    found = read_books(tmp_path / LEDGER)[0]
    assert (found.faults, found.waiting.tolist()) == ([], [3])  # the step may still be going on
    LedgerFile(tmp_path / LEDGER, 0, ledger.state_dict()["end"]).append(1, [], _entry(State.admitted, 2, 9))
    assert [str(fault) for fault in read_books(tmp_path / LEDGER)[0].faults] == [
        "step 1: sample 3 was admitted, but was neither trained nor filtered, failed or lost"
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


def _entry(state: State, step: int, sample: int) -> np.ndarray:
    entry = np.zeros(1, ENTRY)
    entry["state"], entry["step"], entry["sample"] = state, step, sample
    return entry


# Resume


def resumed(folder, step: int, summary: dict, own: bool = True) -> Ledger:
    """Return the ledger after a resume. The summary comes from a checkpoint, as JSON."""
    return Ledger(str(folder), step, json.loads(json_text(summary)), own)


def test_the_counters_of_a_resumed_run_are_those_of_an_undisturbed_one(tmp_path):
    """It is killed within step 4, after a checkpoint of step 2, and once more within step 3."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    expected = ledger_of(whole, 5)
    saved = ledger_of(killed, 2).state_dict()
    first = resumed(killed, 2, saved)
    train(first, 3, [group(6)], [group(7, length=9)])
    first.taken(4, [group(8)], [])
    second = resumed(killed, 2, saved)
    second.taken(3, [group(6)], [])
    third = resumed(killed, 2, saved)
    for step in (3, 4, 5):
        train(third, step, [group(2 * step)], [group(2 * step + 1)])
    assert (third.tokens, third.prompts) == (expected.tokens, expected.prompts) == (100, 10)
    assert used_prompts(killed) == used_prompts(whole)
    state, other = third.state_dict(), expected.state_dict()
    assert {name: state[name] for name in ("step", "tokens", "prompts")} == {
        name: other[name] for name in ("step", "tokens", "prompts")
    }
    # What the earlier attempts took is lost. Books from the checkpoint on equal those of the whole file.
    assert (
        totals(killed) == state["totals"] == counts(admitted=28, trained=20, lost=8, prompts=10, tokens=100)
    )
    assert totals(whole) == counts(admitted=20, trained=20, prompts=10, tokens=100)
    assert state["attempt"] == 4
    assert states_of(killed, 12) == [
        (attempt, 3, state)
        for attempt, states in (
            (2, ("admitted", "generated", "scored", "trained")),
            (3, ("admitted", "generated", "scored")),
            (4, ("admitted", "generated", "scored", "trained")),
        )
        for state in states
    ]


def test_a_run_that_begins_anew_in_its_folder_loses_all(tmp_path):
    """A process was lost before the first checkpoint."""
    ledger_of(tmp_path, 2)
    again = Ledger(str(tmp_path))
    assert (again.tokens, again.prompts) == (0, 0)
    train(again, 1, [group(0)])
    assert totals(tmp_path) == counts(admitted=10, trained=2, lost=8, prompts=1, tokens=10)


def test_a_checkpoint_of_another_run_brings_its_counters(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    saved = ledger_of(there, 3).state_dict()
    ledger_of(here, 4)
    ledger = resumed(here, 3, saved, own=False)
    assert (ledger.tokens, ledger.prompts) == (60, 6)
    assert totals(here) == counts(admitted=16, lost=16)
    train(ledger, 4, [group(8)])
    own = ledger.state_dict()
    assert (own["tokens"], own["prompts"]) == (70, 7)
    train(ledger, 5, [group(10)])
    again = resumed(here, 4, own)
    assert (again.tokens, again.prompts) == (70, 7)
    assert totals(here) == again.state_dict()["totals"]


def test_a_return_to_an_abandoned_branch_counts_no_step_of_the_other(tmp_path):
    """The run goes back to step 1, makes step 2 anew, and then continues from the first checkpoint of step 2,
    which was set aside.
    """
    ledger = ledger_of(tmp_path, 1)
    early = ledger.state_dict()
    train(ledger, 2, [group(4)], [group(5)])
    aside = ledger.state_dict()
    train(resumed(tmp_path, 1, early), 2, [group(4, length=9)])
    ledger = resumed(tmp_path, 2, aside)
    assert (ledger.tokens, ledger.prompts) == (40, 4)
    train(ledger, 3, [group(6)])
    saved = ledger.state_dict()
    assert (saved["tokens"], saved["prompts"]) == (50, 5)
    assert (
        saved["totals"] == totals(tmp_path) == counts(admitted=12, trained=2, lost=10, prompts=1, tokens=10)
    )
    assert (resumed(tmp_path, 3, saved).tokens, read_books(tmp_path / LEDGER)[0].faults) == (50, [])


@pytest.mark.parametrize("cut", [1, 30, 500])
def test_a_ledger_that_does_not_reach_to_the_checkpoint_is_refused_and_stays(tmp_path, cut):
    saved = ledger_of(tmp_path, 2).state_dict()
    path = tmp_path / LEDGER
    path.write_bytes(path.read_bytes()[:-cut])
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"lacks the entries at byte \d+\. Restore the file, .*run\.resume"):
        resumed(tmp_path, 2, saved)
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(UserError, match="lacks the entries"):
        resumed(tmp_path, 2, saved)


def test_damage_after_the_checkpoint_goes_with_the_steps_that_are_made_anew(tmp_path, capsys):
    ledger = ledger_of(tmp_path, 1)
    saved, path = ledger.state_dict(), tmp_path / LEDGER
    train(ledger, 2, [group(4)])
    train(ledger, 3, [group(6)])
    whole = bytearray(path.read_bytes())
    whole[saved["end"] + 50] ^= 1
    path.write_bytes(whole)
    ledger = resumed(tmp_path, 1, saved)
    assert (
        f"{path} is damaged at byte {saved['end']}. All entries from there on are removed"
        in capsys.readouterr().out
    )
    train(ledger, 2, [group(4)])
    assert used_prompts(tmp_path) == {1: [102, 103], 2: [104]}


def test_names_keep_their_numbers_over_a_resume(tmp_path):
    ledger = Ledger(str(tmp_path))

    def step(number, name):
        ledger.taken(number, [group(number), group(number + 10)], [])
        ledger.filtered(number, [(name, N * (number + 10) + np.arange(N))])
        ledger.trained(number, tables([group(number)]), [np.ones(2)], [False])

    def filtered_by() -> list[str]:
        names = [name for block in read_blocks(tmp_path / LEDGER) for name in block.names]
        return [names[entry["name"] - 1] for entry in entries_of(tmp_path, State.filtered)[::N]]

    step(1, "one")
    saved = ledger.state_dict()
    step(20, "two")
    ledger = resumed(tmp_path, 1, saved)
    step(40, "three")
    step(60, "one")
    assert filtered_by() == ["one", "two", "three", "one"]


# Books


def test_books_balance_whatever_happens(tmp_path):
    """admitted = trained + filtered + failed + lost + waiting, at every point of random steps and rewinds."""
    draw = np.random.default_rng(5)
    books = Books()
    kept: dict[int, dict[str, int]] = {}
    for _ in range(300):
        if draw.random() < 0.1:
            back = int(draw.integers(0, books.step + 1))
            books.count(_entry(State.rewind, back, 0))
            next_id = 0
        step = books.step + 1
        next_id = 1000 * step
        ids = next_id + draw.permutation(draw.integers(1, 40))
        admitted = np.repeat(_entry(State.admitted, step, 0), len(ids))
        admitted["sample"], admitted["member"] = ids, 1
        books.count(admitted)
        ends = admitted.copy()
        ends["state"] = draw.choice([State.trained, State.filtered, State.failed, State.lost], len(ids))
        ends["tokens"] = draw.integers(1, 9, len(ids))
        part = draw.integers(0, len(ids) + 1)
        for own in (ends[:part], ends[part:]):
            books.count(own)
            assert books.of_step(step)["waiting"] == len(books.waiting)
        kept = {one: found for one, found in kept.items() if one < step} | {
            step: {
                state: int((ends["state"] == State[state]).sum())
                for state in ("trained", "filtered", "failed")
            }
        }
    books.close()
    assert books.faults == []
    total = books.totals()
    for state in ("trained", "filtered", "failed"):
        assert total[state] == sum(found[state] for found in kept.values())
    assert total["waiting"] == 0

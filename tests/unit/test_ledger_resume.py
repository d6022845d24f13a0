"""The ledger of a run that is killed and continued: what is undone is lost, and no counter is wrong."""

import json

import numpy as np
import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.files import json_text
from grpo_megatron.samples.blocks import LEDGER, read_blocks
from grpo_megatron.samples.entries import SampleState
from grpo_megatron.samples.ledger import Ledger, read_books
from tests.ledgers import used_prompts
from tests.unit.ledger_steps import N, counts, entries_of, group, ledger_of, states_of, tables, totals, train


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


def test_a_ledger_of_another_run_is_refused_and_stays(tmp_path):
    """Its last step begins at the same byte, but has another size."""
    ledger = ledger_of(tmp_path, 1)
    train(ledger, 2, [group(4)], [group(5)])
    saved, path = ledger.state_dict(), tmp_path / LEDGER
    path.unlink()
    ledger = ledger_of(tmp_path, 1)
    ledger.taken(2, [group(4), group(5)], [])
    ledger.trained(2, tables([group(4)]), [np.ones(2)], [False])
    assert ledger.state_dict()["last"] == saved["last"]
    before = path.read_bytes()
    with pytest.raises(UserError, match="lacks the entries"):
        resumed(tmp_path, 2, saved)
    assert path.read_bytes() == before


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
        return [names[entry["name"] - 1] for entry in entries_of(tmp_path, SampleState.filtered)[::N]]

    step(1, "one")
    saved = ledger.state_dict()
    step(20, "two")
    ledger = resumed(tmp_path, 1, saved)
    step(40, "three")
    step(60, "one")
    assert filtered_by() == ["one", "two", "three", "one"]

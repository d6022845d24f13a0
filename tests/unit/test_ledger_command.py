"""`grpo-megatron ledger`: the balance of a run, and the story of a sample, through the command line."""

import json

import numpy as np
import pytest

from grpo_megatron.cli import main
from grpo_megatron.samples.blocks import LEDGER, LedgerFile
from grpo_megatron.samples.entries import ENTRY, SampleState
from grpo_megatron.samples.ledger import Ledger
from tests.unit.ledger_steps import continued_run, group, ledger_of, train


@pytest.fixture
def run(tmp_path):
    continued_run(tmp_path)
    return tmp_path


def call(capsys, *words, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["ledger", *map(str, words)]) == status
    shown = capsys.readouterr()
    return shown.err if status == 2 else shown.out


BALANCE = """\
 step  admitted  trained  filtered  failed  lost  waiting  prompts  tokens
    1         4        4         0       0     0        0        2      20
    2        10        2         2       0     6        0        2      10
    3         2        0         0       0     2        0        0       0
total        16        6         2       0     8        0        4      30
"""


def test_the_balance_has_a_row_for_each_step(run, capsys):
    assert call(capsys, run) == BALANCE
    lines = BALANCE.splitlines(keepends=True)
    assert call(capsys, run, "--steps", 1) == "".join([lines[0], *lines[3:]])
    found = json.loads(call(capsys, run, "--json", "--steps", 2))
    assert [row["step"] for row in found["steps"]] == [2, 3]
    assert found["total"]["admitted"] == 16
    assert found["faults"] == []


def test_a_step_that_goes_on_is_no_fault(tmp_path, capsys):
    ledger_of(tmp_path, 1).taken(2, [group(4)], [])
    assert call(capsys, tmp_path).splitlines()[2].split() == ["2", "2", "0", "0", "0", "0", "2", "1", "0"]


def test_books_that_do_not_balance_are_exit_status_1(tmp_path, capsys):
    ledger = ledger_of(tmp_path, 1)
    first = ledger.state_dict()
    train(ledger, 2, [group(4)], [group(5)])
    saved = ledger.state_dict()
    entry = np.zeros(1, ENTRY)
    entry["state"], entry["step"], entry["sample"] = SampleState.trained, 2, 8
    LedgerFile(tmp_path / LEDGER, saved["last"], saved["end"]).append(1, [], entry)
    said = "step 2: sample 8 was trained, but had ended before or was never admitted"
    assert call(capsys, tmp_path, status=1).splitlines()[-1] == f"not balanced: {said}"
    assert json.loads(call(capsys, tmp_path, "--json", status=1))["faults"] == [said]
    Ledger(str(tmp_path), 1, first)  # a resume undoes the step and its fault
    assert json.loads(call(capsys, tmp_path, "--json"))["faults"] == []


def test_the_story_of_a_sample_has_all_attempts(run, capsys):
    lines = call(capsys, run, "--sample", 10).splitlines()
    undone = " (undone by the return to step 1)"
    assert lines == [
        f"attempt {attempt}  step 2  prompt 105  sample 10  {text}"
        for attempt, text in (
            (1, f"admitted{undone}"),
            (1, f"generated: 5 tokens with its prompt, weight version 3 to 4{undone}"),
            (1, f"scored: reward 0.5{undone}"),
            (1, f"trained: optimizer step 2, weight 0.25 per token, 0 updates of the model{undone}"),
            (2, "admitted"),
            (2, "generated: 5 tokens with its prompt, weight version 3 to 4"),
            (2, "scored: reward 0.5"),
            (2, "lost: aborted"),
        )
    ]
    found = json.loads(call(capsys, run, "--sample", 10, "--json"))
    assert [(row["attempt"], row["undone_by"]) for row in found] == [(1, 1)] * 4 + [(2, None)] * 4
    Ledger(str(run))  # the run begins from the beginning
    found = json.loads(call(capsys, run, "--sample", 10, "--json"))
    assert [row["undone_by"] for row in found] == [1] * 4 + [0] * 4


def test_a_prompt_has_the_stories_of_its_samples_one_after_the_other(run, capsys):
    ends = [line.split("  ") for line in call(capsys, run, "--prompt", 106).splitlines()]
    assert [(words[0], words[3], words[4].split(" (")[0]) for words in ends] == [
        ("attempt 1", "sample 12", "admitted"),
        ("attempt 1", "sample 12", "generated: 5 tokens with its prompt, weight version 3 to 4"),
        ("attempt 1", "sample 12", "scored: reward 0.5"),
        ("attempt 1", "sample 13", "admitted"),
        ("attempt 1", "sample 13", "failed: its reward or environment failed"),
        *(
            ("attempt 2", f"sample {sample}", text)
            for sample in (12, 13)
            for text in (
                "admitted",
                "generated: 5 tokens with its prompt, weight version 3 to 4",
                "scored: reward 0.5",
                "filtered by nonzero_variance",
            )
        ),
    ]


def test_what_is_not_there_is_one_message(run, tmp_path, capsys):
    assert f"error: {run / LEDGER} has no sample 99" in call(capsys, run, "--sample", 99, status=2)
    assert "has no prompt 0" in call(capsys, run, "--prompt", 0, status=2)
    assert "does not exist; only `train` writes a ledger" in call(capsys, tmp_path / "none", status=2)
    path = run / LEDGER
    path.write_bytes(path.read_bytes()[:200] + b"?" + path.read_bytes()[201:])
    for words in ([], ["--sample", 1]):
        assert f"error: {path} is damaged at byte " in call(capsys, run, *words, status=2)


def test_steps_of_another_run_have_no_row(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    saved = ledger_of(there, 3).state_dict()
    train(Ledger(str(here), 3, saved, own=False), 4, [group(8)])
    assert [line.split()[0] for line in call(capsys, here).splitlines()] == ["step", "4", "total"]

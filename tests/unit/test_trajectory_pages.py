"""Pages with trees of trajectories, and the links to them."""

import json
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from grpo_megatron.batch.sample import Group
from grpo_megatron.cli import main
from grpo_megatron.monitoring.report import trees
from grpo_megatron.monitoring.run_files import RunFiles, read_texts
from grpo_megatron.samples.ledger import Ledger
from tests.rollouts import recorder_of
from tests.unit.ledger_steps import continued_run
from tests.unit.shown_runs import Talk, run_with
from tests.unit.test_report import ATTACK, Elements

BRANCHED = Talk("ask").turn("ask", "first").turn("askfirst!", "second").turn("askfirst?", "third")


class Anchors(HTMLParser):
    """A parser of a page.

    inside: {id of an element: tags around it}.
    """

    def __init__(self, page: str):
        super().__init__()
        self.inside, self._open = {}, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag not in Elements.VOID:
            found = dict(attributes).get("id")
            if found:
                assert found not in self.inside
                self.inside[found] = tuple(self._open)
            self._open.append(tag)

    def handle_endtag(self, tag):
        self._open.pop()


def page_of(folder, *options, command="report", name="report.html") -> str:
    assert main([command, str(folder), *options]) == 0
    return (folder / name).read_text()


def words(page: str) -> str:
    return " ".join(Elements(page).text.split())


def test_a_tree_is_on_the_page(tmp_path):
    page = page_of(run_with(tmp_path, (3, BRANCHED.shown())))
    found, text = Elements(page), words(page)
    assert found.open == []
    for part in (
        "step 3: best reward, reward 1, 3 turns, 21 tokens, prompt 105, sample 12",
        "format 0.5, finish reason stop, 16 trained tokens, sampled with weight version 3 (trained: 4",
        ", age up to 1), reference answer: 5",
        "2 sequences. What several of them begin with is shown once.",
        "1 model, 5 tokens, version 3 (age 1)",
        "4 read, 1 token, branches off after 1",
        "0.25",
    ):
        assert part in text, part
    assert page.count('<pre id="step-3-sample-12-1">first</pre>') == 1
    assert page.count('<a href="#step-3-sample-12-3">3</a>') == 1  # the turn of a token that differs
    details = [attributes for tag, attributes in found.tags if tag == "details"]
    assert [attributes["class"] for attributes in details] == [
        "trajectory",
        "node prompt",
        "node written",
        "node read",
        "node written",
        "node read",
        "node written",
    ]
    # All is folded but the turns of a small trajectory.
    assert ["open" in attributes for attributes in details] == [False, False, True, False, True, False, True]


def test_the_anchor_is_within_what_is_folded(tmp_path):
    """A browser unfolds what contains the target of a link."""
    anchors = Anchors(page_of(run_with(tmp_path, (3, BRANCHED.shown()))))
    assert anchors.inside["step-3-sample-12"][-1] == "details"


def test_nothing_that_a_model_or_a_tool_wrote_is_markup(tmp_path):
    call = json.dumps({"name": ATTACK, "arguments": {ATTACK: ATTACK}})
    talk = Talk(ATTACK).turn(ATTACK, f"{ATTACK}<tool_call>{call}</tool_call>")
    page = page_of(run_with(tmp_path, (3, talk.shown())))
    found = Elements(page)
    assert found.open == []
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "base", "b>"}
    assert not [name for _, values in found.tags for name in values if name.startswith("on") or name == "src"]
    assert found.text.count(ATTACK) >= 3
    assert "default-src 'none'" in page


def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    talk, read = Talk("ask"), "ask"
    for number in range(150):
        talk.turn(read, str(number))
        read += f"{number}?"
    page = page_of(run_with(tmp_path, (3, talk.shown())))
    assert "100 nodes not shown here: the trajectory has 300." in words(page)
    assert page.count('class="node') == 200
    assert 'class="node written" style="margin-left:0.0em" open' not in page
    short = Talk("ask").turn("ask", "yes")
    shown = [(step, short.shown()) for step in range(1, 9)]
    monkeypatch.setattr(trees, "MOST_TRAJECTORIES", 3)
    page = words(page_of(run_with(tmp_path, *shown)))
    assert "5 further trajectories are not shown, because the page would get too large." in page
    assert [step for step in range(1, 9) if f"step {step}: best" in page] == [1, 7, 8]
    monkeypatch.setattr(trees, "_MOST_CHARACTERS", 13)
    page = words(page_of(run_with(tmp_path, *shown)))
    assert [step for step in range(1, 9) if f"step {step}: best" in page] == [1, 8]


def test_a_run_of_an_earlier_version_has_no_trees(tmp_path):
    folder = run_with(tmp_path)
    (folder / "texts.jsonl").write_text('{"step": 1, "name": "samples/0", "text": "old <i>"}\n')
    text = words(page_of(folder))
    assert "old <i>" in text
    assert "Trajectories The run has none." in text
    (folder / "texts.jsonl").unlink()
    assert "Trajectories The run has none." in words(page_of(folder))


def test_a_resumed_run_keeps_the_trees_of_the_steps_before(tmp_path):
    folder = run_with(tmp_path, (1, BRANCHED.shown()), (2, BRANCHED.shown()), (3, BRANCHED.shown()))
    files = RunFiles(str(folder), 2)
    files.trajectory(3, BRANCHED.shown(reward=0.0))
    files.close()
    rows = read_texts(folder / "texts.jsonl")
    assert [(row["step"], row["trajectory"]["reward"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 0.0)]


# --- `grpo-megatron ledger`


def test_the_ledger_links_to_the_report(tmp_path, capsys):
    continued_run(tmp_path)
    main(["ledger", str(tmp_path), "--sample", "12"])
    assert "report" not in capsys.readouterr().out
    page_of(run_with(tmp_path, (2, BRANCHED.shown())))
    capsys.readouterr()
    main(["ledger", str(tmp_path), "--sample", "12"])
    link = f"{tmp_path.as_uri()}/report.html#step-2-sample-12"
    assert capsys.readouterr().out.splitlines()[-1] == f"step 2  sample 12  in the report: {link}"
    main(["ledger", str(tmp_path), "--prompt", "106"])  # sample 13 is not in the report
    assert capsys.readouterr().out.count("in the report") == 1
    main(["ledger", str(tmp_path), "--sample", "12", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert {(row["attempt"], row["step"], row["report"]) for row in rows} >= {(2, 2, link)}
    # An undone step has left no trace in the report.
    assert {row["report"] for row in rows if row["undone_by"] is not None} == {None}
    Ledger(str(tmp_path))  # the run begins from the beginning
    main(["ledger", str(tmp_path), "--sample", "12"])
    assert "in the report" not in capsys.readouterr().out


# --- `grpo-megatron trajectories`


def test_without_a_recording_the_page_has_what_the_run_keeps(tmp_path):
    other = Talk("other", trajectory_id=13, uid=7).turn("other", "yes").shown()
    folder = run_with(tmp_path, (2, BRANCHED.shown()), (5, BRANCHED.shown()), (5, other))
    text = words(page_of(folder, command="trajectories", name="trajectories_00000005.html"))
    assert "The trajectories that the run has kept. A run with rollout.record keeps all." in text
    assert text.count("step 5: best reward") == 2
    assert "step 2: best reward" not in text
    for option in (["--prompt", "7"], ["--sample", "13"]):
        text = words(page_of(folder, *option, command="trajectories", name="trajectories_00000005.html"))
        assert text.count("step 5: best reward") == 1
        assert "prompt 7, sample 13" in text


def test_what_cannot_be_shown_is_one_message(tmp_path, capsys):
    folder = run_with(tmp_path)
    assert main(["trajectories", str(folder)]) == 2
    assert "has no trajectories; a run keeps some with monitor.samples_every" in capsys.readouterr().err
    run_with(tmp_path, *((step, BRANCHED.shown()) for step in range(1, 13)))
    assert main(["trajectories", str(folder), "--step", "20"]) == 2
    assert "of 12 steps, the last of them 3, 4, 5, 6, 7, 8, 9, 10, 11, 12" in capsys.readouterr().err
    assert main(["trajectories", str(folder), "--recording", f"{folder}/none"]) == 2
    assert "does not exist; or name the recording by --recording" in capsys.readouterr().err


def in_tokens(talk: Talk, tokenizer, reward: float) -> Group:
    """Return a trajectory as a group, with the token ids of a tokenizer in place of characters."""

    def ids(array):
        return np.array([tokenizer.encode(chr(one))[0] for one in array], np.int32)

    samples = [
        sample.with_arrays(
            prompt_ids=ids(sample.arrays.prompt_ids), response_ids=ids(sample.arrays.response_ids)
        )
        for sample in talk.samples(reward)
    ]
    prompt = replace(talk.group.prompt, ids=ids(talk.group.prompt.ids))
    return replace(talk.group, prompt=prompt, samples=tuple(samples))


@pytest.fixture
def recorded(tmp_path):
    """A run that has recorded the trajectories 12 and 13 in step 2, and has kept the first one."""
    from make_tiny_model import make_tokenizer

    tokenizer = make_tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path / "model")
    other = Talk("other", trajectory_id=13, uid=7).turn("other", "<script>yes")
    groups = [in_tokens(BRANCHED, tokenizer, 1.0), in_tokens(other, tokenizer, 0.0)]
    recorder_of(tmp_path / "rollouts").write(2, groups)
    folder = run_with(tmp_path / "run", (2, BRANCHED.shown()))
    (folder / "config.yaml").write_text(
        f"rollout: {{record: {tmp_path}/rollouts}}\nmodel: {{path: {tmp_path}/model}}\n"
        "monitor: {sample_characters: 1000}\nold: 3\n"
    )
    return folder


def test_a_recording_has_all_trajectories_of_a_step(recorded, capsys, monkeypatch):
    out = recorded / "trajectories_00000002.html"
    page = page_of(recorded, command="trajectories", name=out.name)
    assert capsys.readouterr().out.strip() == str(out)
    text = words(page)
    assert "All trajectories of the recording" in text
    # The one that the run has kept has log-probs of the trainer.
    assert "best reward, reward 1, 3 turns, 21 tokens, prompt 105, sample 12" in text
    assert "step 2: reward 0, 1 turn, 16 tokens, prompt 7, sample 13" in text
    assert text.count("Trained tokens with the largest difference") == 1
    assert text.count("No log-probs of the trainer are known for these tokens.") == 1
    assert ">&lt;script&gt;yes</pre>" in page
    text = words(page_of(recorded, "--sample", "13", command="trajectories", name=out.name))
    assert "sample 12" not in text
    assert "sample 13" in text
    monkeypatch.setattr("grpo_megatron.commands.trajectories.MOST_TRAJECTORIES", 1)
    text = words(page_of(recorded, command="trajectories", name=out.name))
    assert "1 further trajectories are not shown" in text
    assert "Choose some with --prompt or --sample." in text


def test_recorded_trees_are_those_of_the_run(recorded):
    """A tree of a recording has the same texts as one of the ranks' tokens."""
    kept = page_of(recorded, command="trajectories", name="trajectories_00000002.html")
    (recorded / "texts.jsonl").unlink()
    page = page_of(recorded, command="trajectories", name="trajectories_00000002.html")

    def nodes(text):
        return [part.split("</details>")[0] for part in text.split('<details class="node')[1:]]

    assert [part.replace(" (age 1)", "") for part in nodes(kept)] == nodes(page)


def test_a_model_that_was_moved(recorded, tmp_path, capsys):
    (tmp_path / "model").rename(tmp_path / "moved")
    assert main(["trajectories", str(recorded)]) == 2
    assert "or name a folder with the run's tokenizer by --model" in capsys.readouterr().err
    page_of(
        recorded, "--model", f"{tmp_path}/moved", command="trajectories", name="trajectories_00000002.html"
    )

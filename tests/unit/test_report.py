"""`grpo-megatron report`: the page shows what the files contain, and is safe to open."""

import json
import math
import re
from html.parser import HTMLParser

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.cli import main
from grpo_megatron.config.load import plain
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.report.chart import Line, line_chart, nice_ticks
from grpo_megatron.monitoring.report.idle import busy_shares
from grpo_megatron.monitoring.report.read import read_run
from grpo_megatron.monitoring.timeline import TIMELINE, Timeline, read_timeline

ATTACK = "</pre><script>alert('x')</script><img src=http://nowhere/y.png onerror=alert(1)> & \"quoted\""


class Elements(HTMLParser):
    """A parser of HTML.

    tags: every start tag with its attributes.
    text: all visible text.
    open: tags that were not closed.
    """

    VOID = ("meta", "br")

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def make_run(folder, reward=(0.1, 0.5, 0.9), seed=1234, sample=ATTACK):
    folder.mkdir()
    config = Config()
    config.run.name, config.run.seed, config.model.path = ATTACK[:9].strip("</>"), seed, "m"
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    rows = [
        {
            "step": step,
            "reward/mean": value,
            "time/step": 2.0,
            "time/train": 1.5,
            "time/other": 0.5,
            "time/monitor": 0.01,
            "own": 1.0,
        }
        for step, value in enumerate(reward, start=1)
    ]
    rows.append({"step": len(reward), "eval/greedy": 0.75})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [
        {"step": 3, "name": "samples/0", "text": sample},
        {"step": 3, "name": "eval/sums/0", "text": "held out <i>"},
        {"step": 3, "name": "mismatch/worst", "text": "|delta| 0.5 >>7<<"},
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def page_of(folder, *options) -> str:
    assert main(["report", str(folder), *options]) == 0
    return (folder / "report.html").read_text()


def test_all_that_is_known_is_on_the_page(tmp_path, capsys):
    page = page_of(make_run(tmp_path / "mine"))
    assert capsys.readouterr().out.strip() == str(tmp_path / "mine" / "report.html")
    found = Elements(page)
    assert found.open == []
    for text in (
        "Learning",
        "Speed",
        "Others",
        "Seconds per phase",
        "eval/greedy",
        "0.75",
        "1.500 s a step, 75.0%",
        "0.50% of it",
    ):
        assert text in found.text
    for text in ("|delta| 0.5 >>7<<", "held out <i>", ATTACK, "max_response_length"):
        assert text in found.text
    assert "against" not in found.text


def test_samples_of_evaluations_are_the_first_and_last_of_every_data_set(tmp_path):
    folder = make_run(tmp_path / "mine")
    names = [f"eval/{name}/{number}" for name in ("sums", "<i>", "words") for number in range(2)]
    rows = [
        {"step": step, "name": name, "text": f"{name} after {step}"} for step in (3, 6, 9) for name in names
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = Elements(page_of(folder)).text
    shown = re.findall(r"step (\d): (\S+/\d)(\S+) after (\d)", text)
    assert shown == [(step, name, name, step) for name in names for step in "39"]


def test_the_last_samples_are_shown_those_of_a_step_side_by_side(tmp_path):
    folder = make_run(tmp_path / "mine")
    names = ["samples/0", "samples/1", "samples/<i>"]
    rows = [{"step": step, "name": name, "text": f"{name} of {step}"} for step in (3, 6, 9) for name in names]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = re.findall(r"step (\d): (\S+/\S+?)samples/\S+ of (\d)", Elements(page_of(folder)).text)
    assert shown == [(step, name, step) for step in "96" for name in names]


@pytest.mark.parametrize("steps", ["", "3", "36"])
def test_samples_of_evaluations_that_are_few(tmp_path, steps):
    folder = make_run(tmp_path / "mine")
    rows = [{"step": int(step), "name": "eval/sums/0", "text": f"after {step}"} for step in steps]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert re.findall(r"eval/sums/0after (\d)", Elements(page_of(folder)).text) == list(steps)


def test_nothing_that_a_model_wrote_is_markup_and_nothing_is_loaded(tmp_path):
    found = Elements(page_of(make_run(tmp_path / ATTACK.replace("/", "_"), sample=ATTACK)))
    names = {tag for tag, _ in found.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "base"}
    attributes = {(tag, name): value for tag, values in found.tags for name, value in values.items()}
    assert not [name for _, name in attributes if name.startswith("on") or name in ("src", "srcset")]
    assert all(value.startswith("#") for (_, name), value in attributes.items() if name == "href")
    assert "default-src 'none'" in attributes[("meta", "content")]


def test_against_another_run(tmp_path):
    mine, other = make_run(tmp_path / "mine"), make_run(tmp_path / "other", reward=(0.2, 0.3), seed=7)
    page = page_of(mine, "--against", str(other))
    assert "run.seed1234" + "7" in Elements(page).text
    assert page.count('stroke-dasharray="5 3"') > 3
    assert "run.n" not in re.search(r"What differs.*?</table>", page, re.DOTALL)[0].replace(
        "run.name", "run.n ame"
    )
    same = page_of(mine, "--against", str(make_run(tmp_path / "same")))
    assert "Both have the same configuration." in same
    (other / "config.yaml").write_text("run: {sead: 1}")
    assert "did you mean" in Elements(page_of(mine, "--against", str(other))).text


def test_a_run_that_was_killed_while_it_wrote(tmp_path):
    folder = make_run(tmp_path / "mine")
    for name in ("metrics.jsonl", "texts.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 4, "rew')
    (folder / "config.yaml").unlink()
    assert "The run has none." in page_of(folder)


def test_damaged_lines_are_left_out_and_counted(tmp_path, capsys):
    whole, damaged = make_run(tmp_path / "whole"), make_run(tmp_path / "damaged")
    rows = (whole / "metrics.jsonl").read_text()
    torn = 'damaged\n{"a": 1}\n[1]\n{"step": 2, "a": "b"}\n' + 9 * "\0" + "\n"
    torn += rows + '{"step": 4, "own": 7.0}'
    (damaged / "metrics.jsonl").write_text(torn)
    assert read_run(str(damaged)).curves == read_run(str(whole)).curves
    page_of(damaged)
    assert "metrics.jsonl: damaged lines are left out (5)\n" in capsys.readouterr().out


def test_a_folder_that_is_not_of_a_run(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "so it is not the folder of a run" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    folder = make_run(tmp_path / "mine")
    assert main(["report", str(folder), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_an_empty_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert "The run has none." in page_of(tmp_path)


def test_idle_shares_are_of_the_time_in_no_phase_of_its_own(tmp_path):
    folder = make_run(tmp_path / "mine")
    timeline = Timeline(str(folder), 2**20)
    timeline.open()
    for start in (0.0, 100.0):
        timeline.add("driver", "train", start, 10.0)
        timeline.add("driver", "generate", start + 10, 20.0)
        timeline.add_step(start, 40.0)
    timeline.add("trainer rank 0 of 2", "train_step", 0.0, 10.0)
    timeline.add("trainer rank 0 of 2", "forward_backward", 2.0, 5.0)  # within the other
    timeline.add("trainer rank 1 of 2", "train_step", 95.0, 10.0)
    timeline.add("engine 0 of 1", "generate", 12.0, 18.0)
    timeline.add("engine 0 of 1", "generate", 108.0, 7.0)
    timeline.flush()
    assert busy_shares(read_timeline(folder / TIMELINE)) == {
        "train": {"trainer rank": (10 / 20 + 5 / 20) / 2, "engine": 2 / 20},
        "generate": {"trainer rank": 0.0, "engine": (18 + 5) / 40},
    }
    text = Elements(page_of(folder)).text
    assert "Idle share of each phase" in text
    assert "train62.5%90.0%" in text


def coordinates(svg: str) -> list[tuple[float, float]]:
    path = re.search(r'class="line".*? d="M([^"]*)"', svg)[1].replace("h0", "")
    return [tuple(map(float, point.split())) for point in path.split("L")]


def test_a_line_goes_where_its_values_are():
    (x0, y0), (x1, y1), (x2, y2) = coordinates(line_chart([Line("a", [(0, 0.0), (5, 1.0), (10, 0.5)])]))
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.1)
    assert y1 < y2 < y0  # up is towards 0
    assert y2 == pytest.approx((y0 + y1) / 2, abs=0.1)


def test_points_that_are_no_numbers_are_left_out():
    assert len(coordinates(line_chart([Line("a", [(1, math.nan), (2, 1.0), (3, math.inf), (4, 2.0)])]))) == 2
    assert "no finite value" in line_chart([Line("a", [(1, math.nan)])])


def test_a_long_run_is_thinned_to_the_means():
    points = coordinates(line_chart([Line("a", [(step, float(step % 2)) for step in range(8000)])]))
    assert len(points) == 400
    assert len({y for _, y in points}) == 1


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_cover_the_range(low, width):
    high = low + width
    if high - low < 1e-10 * abs(low):
        return
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    assert ticks[0] >= low - 1.01 * step
    assert ticks[-1] <= high + 1.01 * step
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= high - 1e-6 * step


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=20))
def test_any_values_make_a_chart(values):
    svg = line_chart([Line("<a>", list(enumerate(values)))])
    assert "<a>" not in svg
    # A legend may say that the last value is none; nothing is drawn there.
    assert not re.search(r'(d|x|y)="[^"]*(nan|inf)', svg)


@pytest.mark.parametrize("written", ["null", "NaN"])
def test_a_scalar_that_was_not_finite_is_a_gap(written, tmp_path):
    """Runs write null. Runs of earlier versions wrote NaN."""
    folder = make_run(tmp_path / "mine")
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(rows[0] + rows[1].replace("0.5,", f"{written},", 1) + rows[2])
    assert "reward/mean" in Elements(page_of(folder)).text

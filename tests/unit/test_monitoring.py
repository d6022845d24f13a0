"""The monitor's reports (scalars, texts, distributions). No part of the monitor may stop a run."""

import json
import math
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard import plugin_util
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from grpo_megatron.batch.sample import Group
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.charts import OTHERS, SECTIONS, charts_of
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.samples import TrainedOn, group_text
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.monitoring.tensorboard import TensorBoard, verbatim
from grpo_megatron.monitoring.throughput import Throughput
from grpo_megatron.monitoring.timeline import TIMELINE, read_timeline
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.rollout.statistics import step_statistics
from tests.unit.scored_groups import group

MARKUP = "<script>alert(1)</script>\n# no heading\n\r**not bold** ![](http://nowhere/x.png)\x0b<b>"


def configured(**options) -> Config:
    config = Config()
    config.run.total_steps, config.model.path = 10, "a model"
    for name, value in options.items():
        setattr(config.monitor, name, value)
    return config


@pytest.fixture
def monitor_of(tmp_path):
    """A function (config, resumed) -> open Monitor in one folder. All monitors are closed at the end."""
    opened = []
    with StatusFile(str(tmp_path), "run", total_steps=10) as status:

        def make(config: Config, resumed: int = 0) -> Monitor:
            for one in opened:
                one.close()
            throughput = Throughput(CostModel(), ranks=2, engine_devices=1)
            opened[:] = [Monitor(str(tmp_path), config, status, resumed, throughput)]
            opened[0].open()
            return opened[0]

        yield make
        for one in opened:
            one.close()


def a_step(monitor: Monitor, step: int, groups: list[Group], scalars=None, seconds=0.02) -> dict[str, float]:
    monitor.start_step(step)
    with monitor.phases("generate"):
        time.sleep(seconds)
    with monitor.phases("train"):
        time.sleep(seconds)
    lengths = np.array([sample.num_tokens for one in groups for sample in one.samples])
    advantages = np.zeros(len(lengths)) if groups else None
    trained_on = TrainedOn(lengths, 1, groups, advantages)
    return monitor.finish_step(step, {"reward/mean": 0.5} if scalars is None else scalars, trained_on)


def events(folder) -> EventAccumulator:
    return EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"tensors": 0, "histograms": 0}
    ).Reload()


def test_a_step_in_every_file(monitor_of, tmp_path, capsys):
    monitor = monitor_of(configured(samples_every=2, sample_groups=1))
    groups = [group(0, (1.0, 1.0)), group(1, (0.0, 1.0), MARKUP)]
    for step in (1, 2):
        scalars = a_step(monitor, step, groups)
    monitor.line(2, scalars)
    monitor.close()
    assert re.search(
        r"^step +2/10 \| reward 0.5 \| \d+ tok/s \| \d+\.\d\d s \(generate .* ETA",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [next(iter(row)) for row in rows] == ["step", "step"]
    assert rows[1] == {"step": 2, **scalars}
    found = events(tmp_path)
    assert [event.step for event in found.Scalars("reward/mean")] == [1, 2]
    assert [event.step for event in found.Histograms("response/lengths")] == [1, 2]
    lengths = found.Histograms("response/lengths")[0].histogram_value
    assert (lengths.min, lengths.max, lengths.num) == (3, 3, 4)
    assert found.Histograms("actor/advantages")[0].histogram_value.num == 4
    # Of two groups the one that something can be learnt from is shown, every second step.
    texts = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [(text["step"], text["name"]) for text in texts] == [(0, "configuration"), (2, "samples/0")]
    assert "prompt 1" in texts[1]["text"]
    assert MARKUP in texts[1]["text"]
    assert "rollout:" in texts[0]["text"]
    layout = found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    for section in SECTIONS:
        assert section.encode() in layout
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= found.summary_metadata.keys()


def test_times_and_throughput_add_up(monitor_of, tmp_path):
    monitor = monitor_of(configured())
    scalars = a_step(monitor, 1, [group(0, (0.0, 1.0))])
    assert scalars["time/generate"] + scalars["time/train"] + scalars["time/other"] == pytest.approx(
        scalars["time/step"]
    )
    assert scalars["throughput/tokens_per_second"] == pytest.approx(10 / scalars["time/step"])
    assert scalars["throughput/tokens_per_second_per_device"] == pytest.approx(10 / scalars["time/step"] / 3)
    assert scalars["idle/trainer"] == pytest.approx(1 - scalars["time/train"] / scalars["time/step"])
    assert scalars["idle/engines"] == pytest.approx(1 - scalars["time/generate"] / scalars["time/step"])
    assert 0 < scalars["time/monitor"] < 1
    assert 0.01 < scalars["memory/driver_gib"] < scalars["memory/host_available_gib"] + 100
    assert "throughput/mfu_train" not in scalars
    monitor.close()
    spans = [event for event in read_timeline(tmp_path / TIMELINE) if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["generate", "train", "step 1"]
    *phases, step = spans
    assert sum(event["dur"] for event in phases) == pytest.approx(
        1e6 * (scalars["time/generate"] + scalars["time/train"]), abs=1
    )
    assert all(step["ts"] <= phase["ts"] for phase in phases)


def test_a_resumed_run_takes_back_what_came_later(monitor_of, tmp_path):
    groups = [group(0, (0.0, 1.0))]
    monitor = monitor_of(configured(samples_every=1))
    for step in (1, 2, 3):
        a_step(monitor, step, groups)
    monitor = monitor_of(configured(samples_every=1), resumed=2)
    a_step(monitor, 3, groups, {"reward/mean": 0.75})
    monitor.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("reward/mean")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.75),
    ]
    texts = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [text["step"] for text in texts if text["name"] == "samples/0"] == [1, 2, 3]
    steps = [
        event["name"] for event in read_timeline(tmp_path / TIMELINE) if event["name"].startswith("step")
    ]
    assert steps == ["step 1", "step 2", "step 3"]


def test_what_cannot_be_written_is_said_once_and_the_run_goes_on(monitor_of, tmp_path, capsys):
    monitor = monitor_of(configured(histograms_every=0))
    # This integer is no valid JSON number. The fault is the listener's own, here that of its file's encoder.
    bad = {"reward/mean": object()}
    for step in (1, 2):
        a_step(monitor, step, [group(0, (0.0, 1.0))], bad)
    a_step(monitor, 3, [group(0, (0.0, 1.0))])
    said = capsys.readouterr().out
    assert said.count("RunFiles has lost some") == 1
    assert said.count("TensorBoard has lost some") == 1
    monitor.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of that writer
def test_curves_go_on_after_a_failure_to_write_them(monitor_of, tmp_path, monkeypatch, capsys):
    """TensorBoard's writer ends at its first failure.

    A disk that was full for a minute used to cost all later curves.
    """
    folder, groups = tmp_path / "tensorboard", [group(0, (0.0, 1.0))]
    # Files of the same second are read in the order of their names, in which the tenth precedes the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    monitor = monitor_of(configured())
    a_step(monitor, 1, groups)
    end = time.monotonic() + 60
    while not events(tmp_path).Tags()["scalars"]:  # a thread writes them
        assert time.monotonic() < end
        time.sleep(0.02)
    folder.rename(tmp_path / "kept")
    folder.write_text("no folder")
    while "TensorBoard has lost some" not in capsys.readouterr().out:
        assert time.monotonic() < end
        a_step(monitor, 2, groups)
    tries = []
    monkeypatch.setattr(TensorBoard, "_open", lambda self, purge_step: tries.append(purge_step))
    a_step(monitor, 3, groups)
    assert tries == []  # not yet
    monkeypatch.undo()
    monkeypatch.setattr("grpo_megatron.monitoring.tensorboard._AGAIN", 0.0)
    a_step(monitor, 4, groups)  # in vain
    folder.unlink()
    (written,) = (tmp_path / "kept").iterdir()
    written.write_bytes(written.read_bytes() + b"\x40\0\0")  # half an event, as a full disk leaves it
    (tmp_path / "kept").rename(folder)
    for step in (5, 6):
        a_step(monitor, step, groups)
    monitor.close()
    assert "TensorBoard" not in capsys.readouterr().out
    assert [event.step for event in events(tmp_path).Scalars("reward/mean")] == [1, 5, 6]


def test_distributions_can_be_switched_off(monitor_of, tmp_path):
    monitor = monitor_of(configured(histograms_every=0, samples_every=0))
    a_step(monitor, 10, [group(0, (0.0, 1.0))])
    monitor.close()
    found = events(tmp_path)
    assert found.Tags()["histograms"] == []
    assert not any(tag.startswith("samples") for tag in found.Tags()["tensors"])


@given(
    st.text(
        alphabet=st.characters(codec=None, categories=("L", "N", "P", "S", "Zl", "Zp", "Cc", "Cs")),
        max_size=60,
    )
)
def test_tensorboard_shows_a_text_as_it_is(text):
    html = plugin_util.markdown_to_safe_html(verbatim(MARKUP + text + MARKUP))
    assert set(re.findall(r"</?(\w+)", html)) == {"pre", "code"}
    assert "&lt;script&gt;" in html
    assert "**not bold**" in html


def test_a_group_as_text():
    text = group_text(group(7, (0.25, 1.0), "x" * 300 + "the answer"), characters=100)
    for part in (
        "prompt 7",
        "what?",
        "this",
        "response 2 of 2: reward 1, format 0.5; 3 tokens, stop",
        "[... 210 characters ...]",
    ):
        assert part in text
    assert text.endswith("the answer")


def test_every_chart_is_of_scalars_that_there_can_be():
    """No scalar without a chart is lost."""
    assert charts_of(["reward/mean", "reward/pass@4", "no/such", "time/train", "time/step"]) == {
        "Learning": {"Reward": ["reward/mean"], "pass@k of training prompts": ["reward/pass@4"]},
        "Speed": {"Seconds of a step": ["time/step"], "Seconds per phase": ["time/train"]},
        OTHERS: {"no/such": ["no/such"]},
    }


def test_statistics_of_a_step():
    groups = [group(0, (1.0, 1.0, 0.0, 0.0), version=3), group(1, (0.0, 0.0, 0.0, 0.0), version=5)]
    scalars = step_statistics(groups, Rollout(groups, dropped=2, aborted=3), pass_reward=1.0, version=5)
    assert scalars["reward/pass@2"] == pytest.approx((1 - 1 / 6) / 2)
    assert scalars["reward/pass@4"] == pytest.approx(1 / 2)
    assert scalars["reward/filtered_groups"] == 0.5
    assert (scalars["rollout/scored_groups"], scalars["rollout/aborted_groups"]) == (4, 3)
    assert (scalars["staleness/mean"], scalars["staleness/max"]) == (1.0, 2.0)
    assert "staleness/mean" not in step_statistics(groups, Rollout(groups), 1.0, None)
    single = [group(0, (1.0,))]
    assert not any("pass@" in name for name in step_statistics(single, Rollout(single), 1.0, None))


def test_time_in_monitoring_is_that_of_the_run_itself(monitor_of, monkeypatch):
    monitor = monitor_of(configured())
    monkeypatch.setattr("grpo_megatron.monitoring.monitor.logger.info", lambda text: time.sleep(3.0))
    groups = [group(0, (0.0, 1.0))]
    a_step(monitor, 1, groups)
    other = threading.Thread(target=monitor.evaluated, args=(1, {"eval/greedy": 0.5}))
    other.start()
    other.join()
    assert a_step(monitor, 2, groups)["time/monitor"] < 3.0
    monitor.evaluated(2, {"eval/greedy": 0.5})
    assert a_step(monitor, 3, groups)["time/monitor"] > 3.0


def test_nan_is_told_like_any_number(monitor_of, tmp_path):
    monitor = monitor_of(configured())
    a_step(monitor, 1, [group(0, (0.0, 1.0))], {"actor/loss": math.nan})
    monitor.close()
    assert math.isnan(events(tmp_path).Scalars("actor/loss")[0].value)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["actor/loss"] is None

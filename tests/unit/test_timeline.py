"""timeline.json: what viewers load, also from a run that was killed."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from grpo_megatron.files import RowFile
from grpo_megatron.monitoring.timeline import PREVIOUS, TIMELINE, Timeline, read_timeline


def timeline_in(folder, limit: int = 2**20, resumed: int = 0) -> Timeline:
    timeline = Timeline(str(folder), limit, resumed)
    timeline.open()
    return timeline


def spans(path) -> list[tuple]:
    return [(event["name"], event["args"]["step"]) for event in read_timeline(path) if event["ph"] == "X"]


def as_viewers_load(text: str) -> list[dict]:
    """Parse the Trace Event Format: a missing bracket at the end is added."""
    return json.loads(text if text.rstrip().endswith("]") else text + "]")


def test_a_finished_file_is_json_with_every_span(tmp_path):
    timeline = timeline_in(tmp_path)
    timeline.step = 1
    timeline.add("driver", "train", 100.0, 2.5)
    timeline.add("trainer rank 1", "forward", 100.25, 0.5)
    timeline.add_step(99.0, 4.0)
    timeline.close()
    events = json.loads((tmp_path / TIMELINE).read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = {
        (names[e["pid"]], e["name"], e["ts"], e["dur"], e["args"]["step"]) for e in events if e["ph"] == "X"
    }
    assert found == {
        ("driver", "train", 100.0e6, 2.5e6, 1),
        ("trainer rank 1", "forward", 100.25e6, 0.5e6, 1),
        ("driver", "step 1", 99.0e6, 4.0e6, 1),
    }


def test_the_file_of_a_run_that_goes_on_loads(tmp_path):
    timeline = timeline_in(tmp_path)
    as_viewers_load((tmp_path / TIMELINE).read_text())
    timeline.add("driver", "train", 1.0, 1.0)
    timeline.flush()
    assert [e["name"] for e in as_viewers_load((tmp_path / TIMELINE).read_text()) if e["ph"] == "X"] == [
        "train"
    ]


def test_a_resumed_run_takes_back_later_spans_and_keeps_the_processes(tmp_path):
    timeline = timeline_in(tmp_path)
    for step in (1, 2, 3):
        timeline.step = step
        timeline.add(f"engine {step}", "generate", float(step), 0.5)
    timeline.flush()  # and killed in the middle of a row
    with open(tmp_path / TIMELINE, "a") as file:
        file.write(',\n{"name": "half')
    resumed = timeline_in(tmp_path, resumed=2)
    assert resumed.step == 2
    resumed.step = 3
    resumed.add("engine 1", "generate", 9.0, 0.5)
    resumed.add("engine 9", "generate", 9.0, 0.5)
    resumed.close()
    events = json.loads((tmp_path / TIMELINE).read_text())
    assert spans(tmp_path / TIMELINE) == [("generate", 1), ("generate", 2), ("generate", 3), ("generate", 3)]
    numbers = [event["pid"] for event in events if event["ph"] == "X"]
    assert numbers[2] == numbers[0]
    assert len(set(numbers)) == 3


@pytest.mark.parametrize("left", [b"", b"[\n", bytes(4096)])
def test_a_resumed_run_begins_anew_where_a_lost_node_left_nothing(left, tmp_path):
    """It used to continue behind the first bracket, with a comma, which is not JSON.

    It also lacked the driver's name, by which idle shares are found.
    """
    (tmp_path / TIMELINE).write_bytes(left)
    (tmp_path / PREVIOUS).write_bytes(left)
    timeline = timeline_in(tmp_path, resumed=2)
    timeline.add("driver", "train", 1.0, 1.0)
    timeline.flush()
    events = as_viewers_load((tmp_path / TIMELINE).read_text())
    assert [(event["name"], event["pid"]) for event in events] == [("process_name", 0), ("train", 0)]
    assert events[0]["args"] == {"name": "driver"}
    timeline.close()
    assert not (tmp_path / PREVIOUS).exists()


def test_a_run_that_starts_again_from_the_beginning_keeps_only_its_starts(tmp_path):
    """Steps in the file that had been put aside for its size used to stay."""
    for name in (TIMELINE, PREVIOUS):
        rows = [{"name": "old", "ph": "X", "args": {"step": step}} for step in range(3)]
        (tmp_path / name).write_text("[\n" + ",\n".join(map(json.dumps, rows)))
    timeline_in(tmp_path).close()
    assert spans(tmp_path / TIMELINE) == spans(tmp_path / PREVIOUS) == [("old", 0)]


def test_a_file_that_is_large_is_put_aside(tmp_path):
    timeline = timeline_in(tmp_path, limit=2000)
    for step in range(100):
        timeline.step = step
        timeline.add("driver", "train", float(step), 1.0)
        timeline.flush()
    timeline.close()
    assert (tmp_path / TIMELINE).stat().st_size < 2300
    assert (tmp_path / PREVIOUS).stat().st_size < 2300
    events = as_viewers_load((tmp_path / PREVIOUS).read_text()) + json.loads(
        (tmp_path / TIMELINE).read_text()
    )
    steps = [event["args"]["step"] for event in events if event["ph"] == "X"]
    assert steps == list(range(100 - len(steps), 100))
    assert len(steps) > 10
    named = [
        event for event in json.loads((tmp_path / TIMELINE).read_text()) if event["name"] == "process_name"
    ]
    assert [event["args"]["name"] for event in named] == ["driver"]


def test_where_no_new_file_can_be_begun_the_old_one_goes_on(tmp_path, monkeypatch):
    """Its descriptor used to be closed before, and later rows went into whatever file had this number
    next.
    """
    timeline = timeline_in(tmp_path, limit=300)

    def flush(step: int) -> None:
        timeline.step = step
        timeline.add("engine 0", "generate", float(step), 1.0)
        timeline.flush()

    flush(1)
    (tmp_path / PREVIOUS).mkdir()  # onto which no file can be moved
    for step in (2, 3):
        with pytest.raises(OSError, match=PREVIOUS):
            flush(step)
    (tmp_path / PREVIOUS).rmdir()

    def full(file: RowFile, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    append = RowFile.append
    monkeypatch.setattr(
        RowFile, "append", lambda file, text: (full if text.startswith("[") else append)(file, text)
    )
    with pytest.raises(OSError, match="No space left"):
        flush(4)
    assert [step for _, step in spans(tmp_path / TIMELINE)] == [1, 2, 3, 4]
    as_viewers_load((tmp_path / TIMELINE).read_text())
    monkeypatch.undo()
    flush(5)
    flush(6)
    timeline.close()
    assert [step for _, step in spans(tmp_path / PREVIOUS)] == [1, 2, 3, 4, 5]
    events = json.loads((tmp_path / TIMELINE).read_text())
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"driver", "engine 0"}


def test_a_closed_file_takes_nothing_more(tmp_path):
    file = RowFile(tmp_path / "rows")
    file.close()
    with open(tmp_path / "another", "w") as another:  # with the number that became free
        with pytest.raises(OSError, match="Bad file descriptor"):
            file.append("late")
        file.close()  # a second time, which must not close the other file
        another.write("")
        another.flush()
    assert (tmp_path / "another").read_text() == ""


def test_what_is_added_waits_for_no_file_system(tmp_path, monkeypatch):
    """The thread of the hang detector adds spans, and would have hung with the disk."""
    timeline = timeline_in(tmp_path, limit=330)  # bytes, which the first two spans exceed
    append, stalled, answers = RowFile.append, threading.Event(), threading.Event()

    def slow(file: RowFile, text: str) -> None:
        stalled.set()
        assert answers.wait(60)
        append(file, text)

    timeline.add("engine 0", "first", 1.0, 1.0)
    timeline.add("engine 0", "second", 2.0, 1.0)
    monkeypatch.setattr(RowFile, "append", slow)
    flushes = [threading.Thread(target=timeline.flush) for _ in range(2)]
    flushes[0].start()
    assert stalled.wait(60)
    adding = threading.Thread(target=timeline.add, args=("engine 0", "third", 3.0, 1.0), daemon=True)
    adding.start()
    adding.join(30)
    waited = adding.is_alive()
    flushes[1].start()
    answers.set()
    for thread in flushes:
        thread.join()
    assert not waited
    timeline.close()
    found = [read_timeline(tmp_path / name) for name in (PREVIOUS, TIMELINE)]
    # In their order, and each file names its processes.
    assert [[event["name"] for event in events if event["ph"] == "X"] for events in found] == [
        ["first", "second"],
        ["third"],
    ]
    assert ["engine 0" in [event["args"].get("name") for event in events] for events in found] == [True, True]


FULL = """
import json, resource, sys
from grpo_megatron.monitoring.timeline import Timeline
timeline = Timeline(sys.argv[1], 2**20)
timeline.open()
timeline.add("driver", "first", 1.0, 1.0)
timeline.flush()
before = timeline._file.size
resource.setrlimit(resource.RLIMIT_FSIZE, (before + 50, resource.RLIM_INFINITY))
timeline.add("driver", "second", 2.0, 1.0)
try:
    timeline.flush()
except OSError as error:
    assert timeline._file.size == before
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    timeline.add("driver", "third", 3.0, 1.0)
    timeline.close()
    sys.exit(7)
"""


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_FSIZE"), reason="the system has no limit on the size of files"
)
def test_no_half_row_where_there_is_no_room(tmp_path):
    """A limit on the file's size makes the write fail in the middle, like a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    assert done.returncode == 7
    assert [e["name"] for e in json.loads((tmp_path / TIMELINE).read_text()) if e["ph"] == "X"] == [
        "first",
        "third",
    ]

"""The hang detector: which process hangs, judged by what processes report of themselves."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_megatron.cluster import hang_detector
from grpo_megatron.cluster.hang import Watched, at_work, find_hang
from grpo_megatron.cluster.heartbeat import Beat, Heartbeat, PythonThreads
from grpo_megatron.cluster.processes import Process
from grpo_megatron.progress import moves
from grpo_megatron.run import manifest

LIMIT = 600.0


def watched(name: str, silent: float = 0.0, **beat) -> Watched:
    return Watched(
        Process(name, "log"), SimpleNamespace(), Beat(sequence_number=1, role=name, **beat), silent
    )


def ranks(*still: float, phase="train_step", **beat) -> list[Watched]:
    """Return ranks that are all in one call. Rank 0 is at another place than the others."""
    return [
        watched(
            f"rank {rank}",
            phase=phase,
            seconds=still + 2,
            still=still,
            place="here" if rank else "there",
            **beat,
        )
        for rank, still in enumerate(still)
    ]


def test_nothing_hangs_while_anything_in_the_same_call_moves():
    assert find_hang([], LIMIT) is None
    assert find_hang([watched("idle", still=9000.0), *ranks(3.0, 700.0, 800.0)], LIMIT) is None
    assert (
        find_hang([*ranks(700.0, 800.0), watched("engine 0", phase="train_step", still=5.0)], LIMIT) is None
    )
    started = Watched(Process("rank 9", "log"), SimpleNamespace(), beat=None, silent=0.0)
    assert find_hang([started], LIMIT) is None


def test_the_one_elsewhere_is_at_fault():
    others = [watched("engine 0", phase="generate", alone=True, still=2.0, place="")]
    hang = find_hang([*ranks(700.0, 701.0, 701.0), *others], LIMIT)
    assert [one.name for one in hang.at_fault] == ["rank 0"]
    assert hang.message().splitlines() == [
        "rank 0 in `train_step` for 702 s, at there",
        "other processes: 2 in `train_step`, at here; 1 in `generate`",
    ]


def test_who_is_in_a_collective_waits():
    places = [
        "clock.py:1 sleep",
        "distributed_c10d.py:9 all_reduce",
        "distributed_c10d.py:7 recv",
        "distributed_c10d.py:7 recv",
    ]
    pairs = enumerate(places)
    still = [
        watched(f"rank {rank}", phase="train_step", still=700.0, place=f"here/{place}")
        for rank, place in pairs
    ]
    assert [one.name for one in find_hang(still, LIMIT).at_fault] == ["rank 0"]
    assert [one.name for one in find_hang(still[1:], LIMIT).at_fault] == ["rank 1"]


def test_all_are_at_fault_in_one_place_and_the_message_stays_short():
    hang = find_hang([one for one in ranks(*[700.0] * 9) if one.name != "rank 0"], LIMIT)
    assert len(hang.at_fault) == 8
    assert hang.message().splitlines()[2:] == ["rank 3 in `train_step` for 702 s, at here", "and 5 more"]


def test_engines_that_wait_for_a_rank_are_in_one_place():
    """Their places contain process ids.

    Each engine used to be alone at its place, so that all of them were at fault.
    """
    engines = [
        watched(
            f"engine {n}",
            phase="weight_sync",
            still=700.0,
            place=f"sglang::scheduler (pid {4711 + n}) sleeping",
        )
        for n in range(16)
    ]
    hang = find_hang([*engines, *ranks(*[700.0] * 4, phase="weight_sync")], LIMIT)
    assert [one.name for one in hang.at_fault] == ["rank 0"]


def test_an_engine_that_generates_waits_for_no_other():
    working = watched("engine 0", phase="generate", alone=True, still=1.0)
    stuck = watched(
        "engine 1",
        phase="generate",
        alone=True,
        seconds=650.0,
        still=640.0,
        place="sglang::scheduler stopped",
    )
    hang = find_hang([working, stuck], LIMIT)
    assert [one.name for one in hang.at_fault] == ["engine 1"]
    assert "engine 1 in `generate` for 650 s, at sglang::scheduler stopped" in hang.message()


def test_the_silent_one_is_at_fault_before_those_that_stand_still():
    stopped = watched("rank 5", silent=610.0, phase="train_step")
    hang = find_hang([*ranks(700.0, 700.0), stopped], LIMIT)
    assert [one.name for one in hang.at_fault] == ["rank 5"]
    assert hang.message().startswith(
        "rank 5 has sent no heartbeat for 610 s, last in `train_step`\nother processes: "
    )
    idle = find_hang([watched("rank 6", silent=610.0)], LIMIT)
    assert idle.message() == "rank 6 has sent no heartbeat for 610 s"


def test_phases_nest_and_those_of_one_name_are_one_span():
    heartbeat = Heartbeat()
    with heartbeat.phase("train_step"):
        heartbeat._look()
        assert (heartbeat._beat.phase, heartbeat._beat.alone) == ("train_step", False)
        with heartbeat.phase("generate", alone=True), heartbeat.phase("generate", alone=True):
            time.sleep(0.01)
            heartbeat._look()
            assert (heartbeat._beat.phase, heartbeat._beat.alone) == ("generate", True)
        with pytest.raises(ValueError, match="planted"), heartbeat.phase("failed"):
            raise ValueError("planted")
    heartbeat._look()
    assert heartbeat._beat.phase is None
    assert [(span.sequence_number, span.phase) for span in heartbeat._spans] == [
        (1, "generate"),
        (2, "failed"),
        (3, "train_step"),
    ]
    assert heartbeat._spans[2].seconds >= heartbeat._spans[0].seconds >= 0.01
    beat = Beat(sequence_number=3, role="rank 0", stacks="a\nb", spans=list(heartbeat._spans))
    assert Beat.decode(beat.encode()) == beat


def test_a_process_stands_still_unless_its_place_or_its_counter_changes():
    asleep = threading.Event()

    class ThisThread(PythonThreads):
        """A process view that ignores other threads of the test's process, which may move."""

        def progress(self):
            return super().progress()[sleeper.ident]

    sleeper = threading.Thread(target=asleep.wait, daemon=True)
    sleeper.start()
    time.sleep(0.2)
    heartbeat = Heartbeat(ThisThread())

    def look(times: int) -> Beat:
        """Look as the process's own thread does."""
        looker = threading.Thread(
            target=lambda: [heartbeat._look() or time.sleep(0.05) for _ in range(times)]
        )
        looker.start()
        looker.join()
        return heartbeat._beat

    heartbeat._beat = replace(heartbeat._beat, still=10.0)
    with heartbeat.phase("train_step"):
        beat = look(3)
        assert 0.05 <= beat.still < 10.0  # from when the phase began
        assert beat.place
        assert not beat.stacks
        heartbeat._beat = replace(beat, still=10.0)
        assert "thread MainThread" in look(1).stacks
        heartbeat.tick()
        assert look(1).still == 0.0
        asleep.set()
        sleeper.join()


class _Slow:
    """A file that records, in each call, what the process's heartbeat has seen since the call before."""

    def __init__(self, file, heartbeat: Heartbeat, seen: list):
        self._file, self._heartbeat, self._seen = file, heartbeat, seen

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def read(self, size):
        self._look()
        return self._file.read(size)

    def write(self, data):
        self._look()
        return self._file.write(data)

    def _look(self):
        self._heartbeat._look()
        self._seen.append(self._heartbeat._beat.still)


class _OnePlace:
    """A process view that always shows the same call."""

    def progress(self):
        return "read"

    def place(self):
        return "manifest.py:1 read"

    stacks = place


def test_a_rank_that_reads_or_writes_a_checkpoint_slowly_moves(tmp_path, monkeypatch):
    """It was always found in a `read` of its file, and killed as hanging, the same after each restart."""
    heartbeat, seen = Heartbeat(_OnePlace()), []
    monkeypatch.setattr(manifest, "_READ_BYTES", 4)
    monkeypatch.setattr(manifest, "_WRITE_BYTES", 4)
    path = tmp_path / "file"
    with heartbeat.phase("verify_checkpoint"):
        with path.open("wb") as file:
            written = manifest.DigestedFile(_Slow(file, heartbeat, seen))
            assert written.write(b"ten bytes.") == 10

        def slow_open(*of, **how):
            return _Slow(open(*of, **how), heartbeat, seen)

        monkeypatch.setattr(manifest, "open", slow_open, raising=False)
        assert manifest.record_of(path) == written.record()
        assert seen == [0.0] * (3 + 4)
        heartbeat._look()
        heartbeat._look()
        assert heartbeat._beat.still > 0


@pytest.mark.slow
def test_a_rank_that_takes_its_pieces_from_a_checkpoint_moves():
    from grpo_megatron.megatron.state import checkpoint_files  # loads Megatron

    before = moves()
    checkpoint_files._Targets({}).commit_tensor(None, None)
    assert moves() != before


def test_a_file_system_that_hangs_does_not_keep_the_watch_from_its_verdict(tmp_path, monkeypatch):
    """The stacks may be written to the same file system that the processes hang in."""
    monkeypatch.setattr(hang_detector, "_STACKS_SECONDS", 0.2)
    monkeypatch.setattr(Path, "write_text", lambda *_, **__: time.sleep(60))
    killed = []
    monkeypatch.setattr(hang_detector.ray, "kill", killed.append)
    eye = hang_detector.HangDetector(str(tmp_path), LIMIT)
    hang = find_hang(ranks(700.0, 701.0), LIMIT)
    eye._watched = {one.name: one for one in hang.still}
    start = time.monotonic()
    eye._end(hang)
    assert time.monotonic() - start < 30
    assert killed == [one.actor for one in hang.at_fault]
    assert eye._verdict.endswith("could not be written within 0 s")


def test_what_is_being_done_is_told_by_call_with_the_one_that_is_longest_in_it():
    processes = [
        *ranks(3.0, 700.0),
        watched("rank 2", silent=40.0, phase="train_step", seconds=10.0),
        watched("engine 0"),
    ]
    processes.append(watched("engine 1", phase="generate", seconds=5.0))
    assert at_work(processes, now=1000.0) == [
        {"name": "rank 1 and 2 more", "phase": "train_step", "since": 298.0, "heard": 960.0},
        {"name": "engine 1", "phase": "generate", "since": 995.0, "heard": 1000.0},
    ]
    assert at_work([Watched(Process("rank 9", "log"), SimpleNamespace(), beat=None)], now=1000.0) == []

"""The hang detector's thread: what it kills, and how the run goes on."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from grpo_megatron.cluster import hang_detector
from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.errors import UserError
from tests.unit.test_hang_detector import LIMIT, watched


class _Ray:
    """Stands in for the Ray that a hang detector asks, with only these actors dead."""

    def __init__(self, dead):
        self.dead, self.killed = dead, []

    def wait(self, calls, num_returns, timeout):
        return [call for call in calls if call in self.dead], []

    def get(self, call):
        raise ActorDiedError

    def kill(self, actor):
        self.killed.append(actor)


@pytest.fixture
def eye(tmp_path, monkeypatch):
    """A function (processes, dead processes) -> a hang detector that looks often."""
    monkeypatch.setattr(hang_detector, "BEAT_SECONDS", 0.01)

    def make(processes, dead=()) -> hang_detector.HangDetector:
        for one in processes:
            one.actor.beat = SimpleNamespace(remote=lambda one=one: one.name)
        eye = hang_detector.HangDetector(str(tmp_path), LIMIT)
        eye._watched = {one.name: one for one in processes}
        eye._read = lambda passed: None
        monkeypatch.setattr(hang_detector, "ray", _Ray([one.name for one in dead]))
        return eye

    return make


def leave_with(eye: hang_detector.HangDetector, error: Exception, once) -> Exception | None:
    """Raise an error within the detector's context once the condition holds, and return what comes out."""
    try:
        with eye:
            deadline = time.monotonic() + 20
            while not once():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise error
    except Exception as raised:
        return raised


def test_a_process_that_has_died_is_no_hang_and_does_not_end_the_watch(eye):
    """An idle engine that was killed used to become "has sent no heartbeat", which replaced every later
    failure.

    A rank that hung in the same attempt was not noticed any more.
    """
    idle, rank = watched("engine 0", silent=610.0), watched("rank 0", phase="train_step", still=3.0)
    one = eye([idle, rank], dead=[idle])
    died = ProcessDied("engine 0 died in `begin_update`")
    assert leave_with(one, died, once=lambda: "engine 0" not in one._watched) is died
    assert hang_detector.ray.killed == []

    def later() -> bool:
        rank.beat = replace(rank.beat, still=700.0, seconds=700.0)
        return bool(hang_detector.ray.killed)

    idle.silent, one._watched["engine 0"] = 610.0, idle
    error = leave_with(one, ProcessDied("rank 0 died in `train_step`"), once=later)
    assert isinstance(error, hang_detector.ProcessHangs)
    assert str(error).startswith("rank 0 in `train_step` for 700 s")
    assert hang_detector.ray.killed == [rank.actor]


def test_the_watch_goes_on_if_the_run_goes_on_without_what_was_killed(eye, caplog):
    """A second engine that hangs is found, too. An error that has nothing to do with them stays as it is."""
    first, second = engines = [watched(f"engine {index}", silent=610.0) for index in range(2)]
    one = eye(engines)
    del one._watched[second.name]

    def both() -> bool:
        for process in engines:
            if hang_detector.ray.killed == [process.actor]:
                one._watched = {second.name: second} if process is first else {}
                hang_detector.ray.killed.clear()
                one.outlived(process.actor)
        return caplog.text.count("has sent no heartbeat for 610 s") == 2

    error = RuntimeError("planted")
    assert leave_with(one, error, once=both) is error


def test_the_watch_goes_on_if_an_engine_is_lost_while_its_stacks_are_written(eye, caplog):
    """The detector used to keep a verdict about it for ever, and so looked for no further hang."""
    engine, rank = watched("engine 0", silent=610.0), watched("rank 0", phase="train_step", still=3.0)
    one = eye([engine, rank])
    write = one._write_stacks

    def lost_meanwhile(hang):
        if hang.at_fault == [engine]:
            one.outlived(engine.actor)
        return write(hang)

    one._write_stacks = lost_meanwhile

    def later() -> bool:
        if "already gone on without" in caplog.text:
            rank.beat = replace(rank.beat, still=700.0, seconds=700.0)
        return bool(hang_detector.ray.killed)

    found = leave_with(one, ProcessDied("rank 0 died in `train_step`"), once=later)
    assert isinstance(found, hang_detector.ProcessHangs)
    assert hang_detector.ray.killed == [rank.actor]


def test_ranks_that_waited_for_an_engine_that_was_killed_get_time_to_go_on(eye):
    """They had waited as long as the engine, and used to be killed two seconds after it."""
    engine = watched("engine 0", phase="receive_weights", still=700.0)
    rank = watched("rank 0", phase="weights.send", still=1.0)
    one = eye([engine, rank])

    def killed() -> bool:
        if hang_detector.ray.killed != [engine.actor]:
            return False
        one._watched = {rank.name: rank}
        rank.beat = replace(rank.beat, still=700.0)
        one.outlived(engine.actor)
        time.sleep(0.2)  # the detector looks twenty times
        return True

    error = RuntimeError("planted")
    assert leave_with(one, error, once=killed) is error
    assert hang_detector.ray.killed == [engine.actor]
    one._patient_until = time.monotonic()  # the time is over, and the rank has not gone on
    hang_detector.ray.killed.clear()
    found = leave_with(one, error, once=lambda: hang_detector.ray.killed == [rank.actor])
    assert isinstance(found, hang_detector.ProcessHangs)


def test_a_silent_process_that_lives_or_cannot_be_reached_hangs(eye, monkeypatch):
    stopped, cut_off = watched("rank 0", silent=610.0), watched("rank 1", silent=610.0)
    one = eye([stopped, cut_off], dead=[cut_off])

    def cannot_be_reached(call):
        raise ActorUnavailableError("planted", None)

    monkeypatch.setattr(hang_detector.ray, "get", cannot_be_reached)
    assert isinstance(
        leave_with(one, RuntimeError("planted"), once=lambda: len(hang_detector.ray.killed) == 2),
        hang_detector.ProcessHangs,
    )


def test_nobody_is_asked_where_there_is_nobody(tmp_path, monkeypatch):
    """ray.wait would start Ray, or look for one for minutes."""
    monkeypatch.setattr(hang_detector.ray, "wait", lambda *_, **__: pytest.fail("Ray is asked"))
    hang_detector.HangDetector(str(tmp_path), LIMIT).flush()


def test_a_refusal_after_a_hang_stays_a_refusal(eye):
    """It would come again after a restart."""
    refusal = UserError("the weights are NaN")
    assert (
        leave_with(eye([watched("rank 0", silent=610.0)]), refusal, once=lambda: hang_detector.ray.killed)
        is refusal
    )

"""A pool of processes that knows nothing of training: calls, faults, and a restart."""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import ray

from grpo_megatron.cluster import worker_group
from grpo_megatron.cluster.hang_detector import HangDetector, ProcessHangs
from grpo_megatron.cluster.heartbeat import BEAT_SECONDS, Heartbeat
from grpo_megatron.cluster.processes import ProcessDied, gather
from grpo_megatron.cluster.store import StoreAddress
from grpo_megatron.cluster.worker_group import WorkerGroup
from grpo_megatron.errors import UserError

# `make test` has the pool in the runs that it makes.
pytestmark = pytest.mark.slow

# Beats of a loaded machine come late.
HANG_SECONDS = 10.0


class Info(NamedTuple):
    rank: int
    pid: int

    def __str__(self):
        return f"rank {self.rank} (place {self.rank})"


class Member:
    def __init__(self, rank: int, heartbeat: Heartbeat):
        self.rank, self.calls, self.heartbeat = rank, 0, heartbeat

    def echo(self, *words):
        self.calls += 1
        return self.rank, self.calls, words

    def sleep(self, seconds):
        time.sleep(seconds)

    def meet(self, absent):
        """Simulate a collective: the others wait for the rank that is asleep."""
        if self.rank == absent:
            time.sleep(1000)
        threading.Event().wait()

    def stop(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()

    def work(self, rank, times):
        """Simulate slow work: one rank is at the same place at every beat, but its counter moves.

        The others wait for it.
        """
        for _ in range(times):
            time.sleep(1)
            if self.rank == rank:
                self.heartbeat.tick()

    def fail_on(self, rank, kind):
        if rank == self.rank:
            raise {"user": UserError, "defect": ZeroDivisionError}[kind]("planted")

    def die(self, rank, failing=None):
        """Simulate the death of a rank, and the failure of another one that notices it first."""
        if failing == self.rank:
            raise ConnectionError("planted")
        if rank == self.rank:
            time.sleep(0 if failing is None else 1)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)


def build(rank: int, store: StoreAddress, heartbeat: Heartbeat):
    meeting = store.connect(timeout=30)
    meeting.set(str(rank), "here")
    meeting.wait(["0", "1", "2"])
    return Member(rank, heartbeat), Info(rank, os.getpid())


@pytest.fixture(params=["direct"])
def group(request, ray_here, tmp_path, monkeypatch):
    """A group of three ranks. If the parameter is "forwarded", ranks 0 and 1 have a forwarder.

    The third rank runs on the same node, but the group takes it for a rank that is alone on its node.
    """
    options = [{"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": os.getcwd()}}} for _ in range(3)]
    if request.param == "forwarded":
        monkeypatch.setattr(worker_group, "FORWARDED_FROM", 3)
    here, work = ray.get_runtime_context().get_node_id(), []
    group = WorkerGroup(
        "member",
        options,
        [here, here, "another node"],
        str(tmp_path),
        build,
        120,
        HangDetector(str(tmp_path), HANG_SECONDS, work.append),
    )
    assert len(group._forwarders) == (request.param == "forwarded")
    group.work = work
    yield group
    group.close()


both_ways = pytest.mark.parametrize("group", ["direct", "forwarded"], indirect=True)


@both_ways
def test_calls_answer_in_the_order_of_ranks(group):
    assert [info.rank for info in group.ranks] == [0, 1, 2]
    assert len({info.pid for info in group.ranks}) == 3
    assert group.call("echo") == [(0, 1, ()), (1, 1, ()), (2, 1, ())]
    assert group.call("echo", [("a",), ("b", 1), ()]) == [(0, 2, ("a",)), (1, 2, ("b", 1)), (2, 2, ())]
    alike, own = ray.put(("a",)), ray.put(("b", 1))
    shared = group.call_shared("echo", [alike, own, alike])
    assert shared == [(0, 3, ("a",)), (1, 3, ("b", 1)), (2, 3, ("a",))]
    calls = group.submit("echo", "c")
    results = gather(calls.references, group.processes, "echo", 60, calls.forwarded)
    assert results == {rank: (rank, 4, ("c",)) for rank in range(3)}
    assert min(group.occupied()) > 0


@both_ways
def test_what_fails_names_the_rank_and_the_call(group):
    with pytest.raises(UserError, match=r"^planted$"):
        group.call("fail_on", [(1, "user")] * 3)
    for rank in (1, 2):
        with pytest.raises(
            RuntimeError,
            match=rf"(?s)member {rank} of 3 failed in `fail_on`: ZeroDivisionError: planted; "
            rf"its log is .*rank{rank}\.log",
        ):
            group.call("fail_on", [(rank, "defect")] * 3)
    assert [rank for rank, *_ in group.call("echo")] == [0, 1, 2]


@both_ways
def test_a_call_that_takes_too_long_names_who_is_not_done(group):
    group._timeout = 2
    with pytest.raises(UserError, match=r"^member 1 of 3 did not finish `sleep` within 2 s$"):
        group.call("sleep", [(0,), (30,), (0,)])


@both_ways
def test_a_death_is_noticed_and_the_group_starts_anew(group):
    start = time.monotonic()
    with pytest.raises(ProcessDied, match=r"member 1 of 3 died in `die`.*; its log is .*rank1\.log"):
        group.call("die", [(1,)] * 3)
    assert time.monotonic() - start < 120
    before = {info.pid for info in group.ranks}
    with pytest.raises(RuntimeError, match="already running"):
        group.start()
    group.restart()
    assert not before & {info.pid for info in group.ranks}
    assert group.call("echo") == [(0, 1, ()), (1, 1, ()), (2, 1, ())]


@pytest.mark.parametrize(("failing", "dying"), [(0, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize("group", ["forwarded"], indirect=True)
def test_a_death_is_the_error_even_if_another_rank_fails_before(group, failing, dying):
    with pytest.raises(ProcessDied, match=rf"member {dying} of 3 died in `die`"):
        group.call("die", [(dying, failing)] * 3)


@pytest.mark.parametrize("group", ["forwarded"], indirect=True)
def test_the_death_of_a_forwarder_is_noticed_and_the_group_starts_anew(group):
    actor = group._forwarders[0]._actor
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    threading.Timer(1, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(
        ProcessDied,
        match=r"^forwarder of member 0 and 1 more died in `sleep`.*; its log is .*forwarder0\.log",
    ):
        group.call("sleep", [(20,)] * 3)
    group.restart()
    assert [rank for rank, *_ in group.call("echo")] == [0, 1, 2]


@contextmanager
def ended(pids):
    """End one of the processes within this context, and all of them at its end."""
    yield
    deadline = time.monotonic() + 60
    while alive := [
        pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)


# In `make test`, test_recovery.py has one that a run outlives.
def test_a_rank_asleep_is_told_from_those_that_wait_for_it(group, tmp_path):
    with pytest.raises(ProcessHangs) as raised, group._hang_detector:
        group.call("meet", [(1,)] * 3)
    (seen,) = group.work[-1]
    assert re.fullmatch(r"rank \d \(place \d\) and 2 more meet", f"{seen['name']} {seen['phase']}")
    assert seen["heard"] - seen["since"] > HANG_SECONDS / 2
    first, others, stacks = str(raised.value).splitlines()
    assert re.fullmatch(
        r"rank 1 \(place 1\) in `meet` for \d+ s, at integration/test_worker_group.py:\d+ meet", first
    )
    assert re.fullmatch(r"other processes: 2 in `meet`, at \S+/threading.py:\d+ wait", others)
    text = Path(stacks.removeprefix("Python stacks: ")).read_text()
    assert text.count("thread MainThread") == 3
    assert text.index("time.sleep(1000)") < text.index("threading.Event().wait()")
    with ended(info.pid for info in group.ranks):
        group.restart()
    assert [rank for rank, *_ in group.call("echo")] == [0, 1, 2]


def test_a_stopped_rank_is_reported_and_ended(group):
    time.sleep(2 * BEAT_SECONDS)  # for beats that have the ranks' places
    with (
        ended([group.ranks[2].pid]),
        pytest.raises(ProcessHangs, match=r"^rank 2 \(place 2\) has sent no heartbeat"),
        group._hang_detector,
    ):
        group.call("stop", [(2,)] * 3)


def test_ranks_that_wait_for_one_that_works_do_not_hang(group):
    with group._hang_detector:
        group.call("work", [(0, 3 * int(HANG_SECONDS))] * 3)


def test_what_ranks_did_is_known_in_their_own_time(group):
    told, began = [], time.time()
    group._hang_detector.tell_spans(lambda *span: told.append(span))
    group.call("sleep", [(0.0,), (0.3,), (0.0,)])
    group._hang_detector.flush()
    spans = {process: span for process, phase, *span in told if phase == "sleep"}
    assert len(spans) == 3
    start, seconds = spans["member 1 of 3"]
    assert 0.3 <= seconds < 60
    assert began - 1 <= start <= time.time()
    before = len(told)
    group._hang_detector.flush()
    assert len(told) == before

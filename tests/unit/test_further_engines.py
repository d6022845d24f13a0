"""Engines that a run gets after its start: when they are asked for, and added."""

import threading

import pytest

from grpo_megatron.errors import ProcessLost
from grpo_megatron.sglang import further
from grpo_megatron.sglang.further import FurtherEngines
from tests.tools import wait_until


class Cluster:
    """A cluster whose requests for devices are answered by `answers`, one after the other.

    asked: number of requests
    released: number of requests that were taken back
    """

    def __init__(self):
        self.asked = self.released = 0
        self.answers = []

    def request_engine(self):
        self.asked += 1
        return self

    def slots(self):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self):
        self.released += 1


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(further, "_LOOK_SECONDS", 0.01)
    return Cluster()


def test_one_engine_at_a_time_is_asked_for(cluster):
    added = []
    engines = FurtherEngines(cluster, 2, lambda slots, _: added.append(slots) or True)
    wait_until(lambda: cluster.asked, "nothing is asked for")
    cluster.answers = [None, ["first"]]
    wait_until(lambda: cluster.asked == 2, "the second engine is not asked for")
    assert added == [["first"]]
    cluster.answers = [["second"]]
    wait_until(lambda: len(added) == 2, "the second engine is not added")
    assert cluster.asked == 2
    engines.replace_one()
    cluster.answers = [["third"]]
    wait_until(lambda: len(added) == 3, "the engine is not replaced")
    engines.close()


def test_devices_are_offered_again_until_the_run_takes_them(cluster):
    """A run that recovers from a failure takes none."""
    takes, offered = threading.Event(), []
    cluster.slots = lambda: ["slot"]
    engines = FurtherEngines(cluster, 1, lambda slots, _: offered.append(slots) or takes.is_set())
    wait_until(lambda: len(offered) > 2, "they are not offered again")
    takes.set()
    engines.close()
    assert cluster.asked == 1


def test_a_node_that_leaves_at_once_is_not_waited_for(cluster, caplog):
    cluster.answers = [ProcessLost("planted"), ["slot"]]
    added = []
    engines = FurtherEngines(cluster, 1, lambda slots, _: added.append(slots) or True)
    wait_until(lambda: added, "no engine is added")
    assert added == [["slot"]]
    assert (cluster.asked, cluster.released) == (2, 1)
    assert "left the cluster before an engine was started on it: planted" in caplog.text
    engines.close()


def test_the_end_of_a_run_ends_the_asking(cluster):
    engines = FurtherEngines(cluster, 1, lambda *_: True)
    engines.close()
    assert not engines._thread.is_alive()

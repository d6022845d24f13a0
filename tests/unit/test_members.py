"""Engines that are lost and come back: when they get requests, and when weights."""

import threading

import pytest

from grpo_megatron.cluster.processes import ProcessDied
from grpo_megatron.errors import UserError
from grpo_megatron.sglang import members
from grpo_megatron.sglang.members import Membership
from tests.tools import wait_until

NAMES = ["engine 0", "engine 1", "engine 2"]
DIED = ProcessDied("engine 1 died")


class Starts:
    """Starts engines when it is told to.

    started: indices of the engines, in the order of their starts
    """

    def __init__(self, failures=0):
        self.started, self.may_end, self._failures = [], threading.Event(), failures

    def __call__(self, index):
        self.started.append(index)
        assert self.may_end.wait(10)
        if len(self.started) <= self._failures:
            raise UserError("planted")


@pytest.fixture
def starts():
    return Starts()


def test_an_engine_gets_requests_again_after_it_has_the_weights(starts):
    """Rule R9: no recovered engine is routable before its weights. Another stack sent it requests before."""
    pool = Membership(NAMES, starts)
    assert pool.serving == pool.in_updates == [0, 1, 2]
    pool.lose(1, DIED)
    assert pool.serving == pool.in_updates == [0, 2]
    update = pool.in_updates
    starts.may_end.set()
    wait_until(lambda: pool.in_updates == [0, 1, 2], "it is not ready")
    assert pool.serving == [0, 2]
    pool.updated(update)  # it was not ready when this update began
    assert pool.serving == [0, 2]
    pool.updated(pool.in_updates)
    assert pool.serving == [0, 1, 2]
    assert [pool.starts(index) for index in range(3)] == [0, 1, 0]


def test_many_groups_that_notice_the_loss_start_the_engine_once(starts):
    pool = Membership(NAMES, starts)
    for _ in range(5):
        pool.lose(1, DIED)
    starts.may_end.set()
    wait_until(lambda: pool.in_updates == [0, 1, 2], "it is not ready")
    assert starts.started == [1]


def test_an_engine_that_dies_again_is_started_again(starts):
    starts.may_end.set()
    pool = Membership(NAMES, starts)
    for number in (1, 2, 3):
        pool.lose(1, DIED)
        wait_until(lambda: pool.in_updates == [0, 1, 2], "it is not ready")
        pool.updated(pool.in_updates)
        assert pool.starts(1) == number


@pytest.mark.parametrize(("failures", "comes_back"), [(1, True), (2, True), (3, False)])
def test_a_start_that_fails_is_repeated_a_few_times(failures, comes_back, monkeypatch, caplog):
    monkeypatch.setattr(members, "_BETWEEN_SECONDS", 0.01)
    starts = Starts(failures)
    starts.may_end.set()
    pool = Membership(NAMES, starts)
    pool.lose(1, DIED)
    pool.join()
    assert pool.in_updates == ([0, 1, 2] if comes_back else [0, 2])
    assert len(starts.started) == min(failures + 1, 3)
    assert caplog.text.count("could not be started again: planted") == failures


def test_nothing_is_started_after_the_stop(starts):
    pool = Membership(NAMES, starts)
    pool.lose(1, DIED)
    pool.stop()
    pool.lose(2, DIED)
    starts.may_end.set()
    pool.join()
    assert starts.started == [1]

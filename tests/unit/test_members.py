"""Engines that are lost and come back: when they get requests, and when weights."""

import threading
import time

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

    def __init__(self, failures=0, error=None):
        self.started, self.may_end, self._failures, self._error = [], threading.Event(), failures, error

    def __call__(self, index):
        self.started.append(index)
        assert self.may_end.wait(10)
        if len(self.started) <= self._failures:
            raise self._error


@pytest.fixture
def starts():
    starts = Starts()
    yield starts
    starts.may_end.set()  # otherwise threads that still start an engine would log in later tests


EVERY = {0: 0, 1: 0, 2: 0}


def back(pool, starts):
    wait_until(lambda: pool.in_updates.get(1) == starts, "it is not ready")


def test_an_engine_gets_requests_again_after_it_has_the_weights(starts):
    """Rule R9: no recovered engine is routable before its weights. Another stack sent it requests before."""
    pool = Membership(NAMES, starts)
    assert pool.serving == pool.in_updates == EVERY
    pool.lose(1, 0, DIED)
    assert pool.serving == pool.in_updates == {0: 0, 2: 0}
    update = pool.in_updates
    starts.may_end.set()
    back(pool, 1)
    assert pool.serving == {0: 0, 2: 0}
    pool.updated(update)  # it was not ready when this update began
    assert pool.serving == {0: 0, 2: 0}
    pool.updated(pool.in_updates)
    assert pool.serving == {0: 0, 1: 1, 2: 0}


def test_an_engine_that_was_replaced_during_an_update_has_not_got_its_weights(starts):
    starts.may_end.set()
    pool = Membership(NAMES, starts)
    update = pool.in_updates
    pool.lose(1, 0, DIED)
    back(pool, 1)
    pool.updated(update)
    assert pool.serving == {0: 0, 2: 0}


def test_many_groups_that_notice_the_loss_start_the_engine_once(starts):
    pool = Membership(NAMES, starts)
    for _ in range(5):
        pool.lose(1, 0, DIED)
    starts.may_end.set()
    back(pool, 1)
    pool.lose(1, 0, DIED)  # an episode that was with its tools meanwhile
    pool.updated(pool.in_updates)
    pool.lose(1, 0, DIED)
    assert pool.serving == {0: 0, 1: 1, 2: 0}
    assert starts.started == [1]


def test_the_loss_of_the_last_engine_is_raised(starts):
    pool = Membership(NAMES, starts)
    pool.lose(0, 0, DIED)
    pool.lose(1, 0, DIED)
    with pytest.raises(ProcessDied):
        pool.lose(2, 0, DIED)
    assert pool.serving == {2: 0}
    starts.may_end.set()


def test_the_only_engine_is_waited_for(starts):
    pool = Membership(NAMES[:1], starts, patience=60)
    pool.lose(0, 0, DIED)
    assert pool.serving == pool.in_updates == {}
    pool.must_come_back()
    starts.may_end.set()
    pool.join()
    assert (pool.serving, pool.in_updates) == ({}, {0: 1})
    pool.must_come_back()
    pool.updated(pool.in_updates)
    assert pool.serving == {0: 1}


def test_patience_has_an_end(starts):
    pool = Membership(NAMES[:1], starts, patience=0.05)
    pool.lose(0, 0, DIED)
    time.sleep(0.1)
    with pytest.raises(ProcessDied):
        pool.must_come_back()
    starts.may_end.set()
    pool.join()
    pool.must_come_back()  # it waits for the weights
    pool.updated(pool.in_updates)
    pool.must_come_back()


def test_the_only_engine_is_not_waited_for_if_it_stays_away(starts):
    starts.may_end.set()
    pool = Membership(NAMES[:1], starts, patience=60)
    pool.lose(0, 0, DIED)
    for number in (1, 2):
        pool.join()
        pool.lose(0, number, DIED)
    pool.join()
    with pytest.raises(ProcessDied):
        pool.lose(0, 3, DIED)


def test_an_engine_that_cannot_be_started_again_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(members, "_BETWEEN_SECONDS", 0.01)
    starts = Starts(failures=3, error=UserError("planted"))
    starts.may_end.set()
    pool = Membership(NAMES[:1], starts, patience=60)
    pool.lose(0, 0, DIED)
    pool.join()
    with pytest.raises(ProcessDied):
        pool.must_come_back()


def test_an_engine_that_dies_again_is_started_again(starts):
    starts.may_end.set()
    pool = Membership(NAMES, starts)
    for number in range(1, 6):
        pool.lose(1, number - 1, DIED)
        back(pool, number)
        for _ in range(2):
            pool.updated(pool.in_updates)


def test_an_engine_that_dies_soon_after_each_start_stays_away(starts, caplog):
    """Otherwise a broken device would cost a whole transfer of the weights at every sync."""
    starts.may_end.set()
    given_up = []
    pool = Membership(NAMES, starts, given_up.append)
    for number in range(3):
        pool.lose(1, number, DIED)
        back(pool, number + 1)
    assert "stays" not in caplog.text
    assert given_up == []
    pool.lose(1, 3, DIED)
    assert "engine 1 is not started again, because it was lost soon after each start" in caplog.text
    pool.join()
    assert len(starts.started) == 3
    assert given_up == [1]
    assert pool.in_updates == {0: 0, 2: 0}


@pytest.mark.parametrize("error", [UserError("planted"), RuntimeError("planted")])
@pytest.mark.parametrize(("failures", "comes_back"), [(1, True), (2, True), (3, False)])
def test_a_start_that_fails_is_repeated_a_few_times(failures, comes_back, error, monkeypatch, caplog):
    monkeypatch.setattr(members, "_BETWEEN_SECONDS", 0.01)
    starts = Starts(failures, error)
    starts.may_end.set()
    pool = Membership(NAMES, starts)
    pool.lose(1, 0, DIED)
    pool.join()
    assert pool.in_updates == ({0: 0, 1: 1, 2: 0} if comes_back else {0: 0, 2: 0})
    assert len(starts.started) == min(failures + 1, 3)
    assert caplog.text.count("could not be started: planted") == failures


def test_nothing_is_started_after_the_stop(starts):
    pool = Membership(NAMES, starts)
    pool.lose(1, 0, DIED)
    pool.stop()
    pool.lose(2, 0, DIED)
    starts.may_end.set()
    pool.join()
    assert starts.started == [1]


def test_an_engine_that_joins_serves_after_an_update(starts):
    pool = Membership(NAMES[:1], starts)
    pool.add("engine 1")
    assert pool.serving == pool.in_updates == {0: 0}
    starts.may_end.set()
    back(pool, 1)
    assert pool.serving == {0: 0}
    pool.updated(pool.in_updates)
    assert pool.serving == {0: 0, 1: 1}
    pool.lose(1, 1, DIED)
    back(pool, 2)


def test_missing_engines_are_started_while_the_others_serve(starts):
    pool = Membership(NAMES, starts, missing=[1])
    assert pool.serving == {0: 0, 2: 0}
    starts.may_end.set()
    back(pool, 1)
    assert starts.started == [1]
    pool.updated(pool.in_updates)
    assert pool.serving == {0: 0, 1: 1, 2: 0}


def test_an_engine_that_is_held_is_in_no_update_until_it_is_released(starts):
    pool = Membership(NAMES, starts)
    assert pool.hold(5) == {1: 0, 2: 0}  # one is left that serves
    assert pool.hold(1) == {}
    assert pool.serving == pool.in_updates == {0: 0}
    assert pool.alive == EVERY
    pool.release({1: 0})
    assert pool.serving == {0: 0}
    assert pool.in_updates == {0: 0, 1: 0}
    pool.lose(2, 0, DIED)
    assert pool.not_lost(EVERY) == {0: 0, 1: 0}
    pool.release({2: 0})  # its replacement has not started
    assert pool.in_updates == {0: 0, 1: 0}

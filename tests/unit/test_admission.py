"""Admission: which rounds and updates the engines admit, and the reasons that are named."""

import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.sglang.admission import Admission, Closed


def test_the_most_important_reason_is_named_why_engines_are_closed():
    admission = Admission()
    with pytest.raises(UserError, match="the engines cannot generate: their weights have not been compared"):
        admission.must_be_open()
    admission.close(Closed.asleep, "release memory")
    admission.close(Closed.asleep, "release memory")
    for reason in (Closed.asleep, Closed.unsynced):
        with pytest.raises(UserError, match=reason.value.split(";")[0]):
            admission.must_be_open()
        admission.open(reason)
    admission.must_be_open()
    admission.stop()
    for call in (admission.must_be_open, lambda: admission.close(Closed.updating, "begin a weight update")):
        with pytest.raises(UserError, match="they have been stopped; start a new run"):
            call()


def test_a_round_that_allows_updates_allows_nothing_else():
    admission = Admission()
    admission.open(Closed.unsynced)
    with admission.round("train", over_updates=True):
        with pytest.raises(UserError, match="cannot release memory during a round of `train`; wait"):
            admission.close(Closed.asleep, "release memory")
        admission.close(Closed.updating, "begin a weight update")
        with pytest.raises(UserError, match="a weight update has begun"):
            admission.round("evaluate").__enter__()
        admission.open(Closed.updating, Closed.unsynced)
        with (
            admission.round("evaluate"),
            pytest.raises(UserError, match="cannot begin a weight update during a round of `evaluate`; wait"),
        ):
            admission.close(Closed.updating, "begin a weight update")
    with (
        admission.round("train"),
        pytest.raises(UserError, match="cannot begin a weight update during a round of `train`"),
    ):
        admission.close(Closed.updating, "begin a weight update")


def test_rounds_and_updates_exclude_one_another():
    admission = Admission()
    admission.open(Closed.unsynced)
    with admission.round("train") as first, admission.round("evaluate") as second:
        assert first.number < second.number
        with pytest.raises(UserError, match="a round of `train` is in progress, and one caller cannot have"):
            admission.round("train").__enter__()
        with pytest.raises(
            UserError, match="cannot begin a weight update during a round of `train` and `evaluate`; wait"
        ):
            admission.close(Closed.updating, "begin a weight update")
    admission.close(Closed.updating, "begin a weight update")
    for again in (Closed.updating, Closed.asleep):
        with pytest.raises(UserError, match="a weight update has begun and has not ended"):
            admission.close(again, "do more")
    admission.restart()
    admission.open(Closed.unsynced)
    with admission.round("train") as third:
        assert third.number > second.number
        admission.restart()
    with pytest.raises(UserError, match="have not been compared"):
        admission.must_be_open()

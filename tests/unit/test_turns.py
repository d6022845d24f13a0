"""Device sharing of engines and ranks: there is one order of transitions, and no other is possible."""

import itertools

import pytest

from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.run.turns import RING, State, Turns

ORDER = ["release", "wake", "resume_weights", "sync", "sleep", "resume_kv_cache"]
# Transitions with more calls than their name says: what training left is released before the engines' weights
# come.
CALLS = {"resume_weights": ["make_room", "resume_weights"]}


class Engines:
    """Record their calls. They have 30 GiB: 10 of weights and 20 of KV cache, counted when resumed."""

    def __init__(self, calls):
        self.calls, self.gib = calls, 30

    def release_memory(self):
        self.calls.append("release")
        self.gib = 0

    def resume_weights(self):
        self.calls.append("resume_weights")
        self.gib += 10

    def resume_kv_cache(self):
        self.calls.append("resume_kv_cache")
        self.gib += 20

    def occupied(self):
        return self.gib * 2**30


class Ranks:
    """Record their calls. They have 40 GiB when awake, 35 after making room, otherwise 1."""

    def __init__(self, calls):
        self.calls, self.gib = calls, 40

    def wake(self):
        self.calls.append("wake")
        self.gib = 40

    def make_room(self):
        self.calls.append("make_room")
        self.gib = 35

    def sleep(self):
        self.calls.append("sleep")
        self.gib = 1
        return {"memory/rank_asleep_gib": 1.0}

    def occupied(self):
        return self.gib * 2**30


@pytest.fixture
def monitor(tmp_path):
    with StatusFile(str(tmp_path), "run", total_steps=1) as status:
        monitor = Monitor(str(tmp_path), Config(), status)
        yield monitor
        monitor.close()


@pytest.fixture
def turns(monitor):
    """The turns right after the ranks have started.

    calls: calls of engines and ranks from now on.
    """
    calls = []
    turns = Turns(Engines(calls), monitor)
    turns.release()
    turns.started(Ranks(calls))
    calls.clear()
    turns.calls = calls
    return turns


def transition(turns, name):
    if name == "sync":
        turns.sync(lambda: turns.calls.append("sync"))
    else:
        getattr(turns, name)()


def after(turns, count):
    """Return the turns after `count` further transitions."""
    for name in list(itertools.islice(itertools.cycle([*ORDER[2:], *ORDER[:2]]), count)):
        transition(turns, name)
    turns.calls.clear()
    return turns


def test_the_documented_order_is_the_only_one():
    assert [step.name for step in RING] == ORDER
    assert [step.before for step in RING] == list(State)
    assert [step.after for step in RING] == [*list(State)[1:], State.serving]


@pytest.mark.parametrize(("done", "name"), list(itertools.product(range(len(ORDER)), ORDER)))
def test_every_transition_from_every_state(turns, done, name):
    turns = after(turns, done)
    before = turns.state
    following = ORDER[(done + 2) % len(ORDER)]
    if name == following:
        transition(turns, name)
        assert turns.calls == CALLS.get(name, [name])
        return
    with pytest.raises(
        RuntimeError, match=rf"^`{name}` is out of order: {before.value}, and `{following}` is next$"
    ):
        transition(turns, name)
    assert turns.calls == []
    assert turns.state == before


def test_ranks_do_not_start_while_engines_have_the_devices(monitor):
    with pytest.raises(
        RuntimeError, match=r"^`wake` is out of order: engines serve, ranks sleep, and `release` is next$"
    ):
        Turns(Engines([]), monitor).started(Ranks([]))


def test_turns_are_handed_over_and_measured(turns, capsys):
    turns.to_engines(lambda: turns.calls.append("sync"))
    turns.to_ranks()
    turns.to_ranks()  # they have it
    turns.to_engines(lambda: turns.calls.append("sync"))
    assert turns.calls == ["make_room", *ORDER[2:], *ORDER[:2], "make_room", *ORDER[2:]]
    gib = {
        name: (
            turns.metrics[f"memory/after_{name}/engine_gib"],
            turns.metrics[f"memory/after_{name}/rank_gib"],
        )
        for name in ORDER
    }
    assert gib == {
        "release": (0, 1),
        "wake": (0, 40),
        "resume_weights": (10, 35),
        "sync": (10, 35),
        "sleep": (10, 1),
        "resume_kv_cache": (30, 1),
    }
    assert turns.metrics["memory/rank_asleep_gib"] == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ORDER) - 2  # the fixture showed the first two; nothing is shown twice
    assert (
        lines[-1]
        == "memory after resume_kv_cache: 30.000 GiB in the fullest engine, 1.000 GiB in the fullest rank"
    )


def test_a_transition_that_failed_has_not_happened(turns):
    def fail():
        raise ValueError("no way")

    turns.resume_weights()
    with pytest.raises(ValueError, match="no way"):
        turns.sync(fail)
    with pytest.raises(RuntimeError, match=r"`sleep` is out of order"):
        turns.sleep()

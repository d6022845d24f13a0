"""Device sharing of engines and ranks: there is one order of transitions, and no other is possible."""

import contextlib
import itertools

import pytest

from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.rollout.handover import Handover
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.sharing import RING, DeviceSharing, DeviceUse

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
def sharing(monitor):
    """The device sharing right after the ranks have started.

    calls: calls of engines and ranks from now on.
    """
    calls = []
    sharing = DeviceSharing(Engines(calls), monitor)
    sharing.release()
    sharing.started(Ranks(calls))
    calls.clear()
    sharing.calls = calls
    return sharing


def transition(sharing, name):
    if name == "sync":
        sharing.sync(lambda: sharing.calls.append("sync"))
    else:
        getattr(sharing, name)()


def after(sharing, count):
    """Return the device sharing after `count` further transitions."""
    for name in list(itertools.islice(itertools.cycle([*ORDER[2:], *ORDER[:2]]), count)):
        transition(sharing, name)
    sharing.calls.clear()
    return sharing


def test_the_documented_order_is_the_only_one():
    assert [step.name for step in RING] == ORDER
    assert [step.before for step in RING] == list(DeviceUse)
    assert [step.after for step in RING] == [*list(DeviceUse)[1:], DeviceUse.serving]


@pytest.mark.parametrize(("done", "name"), list(itertools.product(range(len(ORDER)), ORDER)))
def test_every_transition_from_every_state(sharing, done, name):
    sharing = after(sharing, done)
    before = sharing.state
    following = ORDER[(done + 2) % len(ORDER)]
    if name == following:
        transition(sharing, name)
        assert sharing.calls == CALLS.get(name, [name])
        return
    with pytest.raises(
        RuntimeError, match=rf"^`{name}` is out of order: {before.value}, and `{following}` is next$"
    ):
        transition(sharing, name)
    assert sharing.calls == []
    assert sharing.state == before


def test_ranks_do_not_start_while_engines_have_the_devices(monitor):
    with pytest.raises(
        RuntimeError, match=r"^`wake` is out of order: engines serve, ranks sleep, and `release` is next$"
    ):
        DeviceSharing(Engines([]), monitor).started(Ranks([]))


def test_devices_are_handed_over_and_measured(sharing, capsys):
    sharing.to_engines(lambda: sharing.calls.append("sync"))
    sharing.to_ranks()
    sharing.to_ranks()  # they have it
    sharing.to_engines(lambda: sharing.calls.append("sync"))
    assert sharing.calls == ["make_room", *ORDER[2:], *ORDER[:2], "make_room", *ORDER[2:]]
    gib = {
        name: (
            sharing.metrics[f"memory/after_{name}/engine_gib"],
            sharing.metrics[f"memory/after_{name}/rank_gib"],
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
    assert sharing.metrics["memory/rank_asleep_gib"] == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ORDER) - 2  # the fixture showed the first two; nothing is shown twice
    assert (
        lines[-1]
        == "memory after resume_kv_cache: 30.000 GiB in the fullest engine, 1.000 GiB in the fullest rank"
    )


def test_a_transition_that_failed_has_not_happened(sharing):
    def fail():
        raise ValueError("no way")

    sharing.resume_weights()
    with pytest.raises(ValueError, match="no way"):
        sharing.sync(fail)
    with pytest.raises(RuntimeError, match=r"`sleep` is out of order"):
        sharing.sleep()


class WeightSync:
    """Records whether each sync brought new weights, and how often the weights were probed."""

    def __init__(self):
        self.changed, self.probes, self.metrics = [], 0, {"sync/seconds": 1.0}

    def run(self, changed):
        self.changed.append(changed)

    def probe(self):
        self.probes += 1


def test_engines_get_the_published_weights_again_after_the_ranks_had_the_devices(sharing, monitor):
    weight_sync = WeightSync()
    handover = Handover(weight_sync, Ranks([]), monitor, sharing, sleeps=True)
    handover.publish()
    handover.to_engines()  # they have the devices
    handover.to_ranks()
    handover.to_ranks()
    handover.to_engines()
    assert (weight_sync.changed, weight_sync.probes) == ([True, False], 2)
    assert sharing.state == DeviceUse.serving
    assert handover.metrics.keys() >= {"sync/seconds", "memory/after_sync/engine_gib"}


@pytest.mark.parametrize("sleeps", [False, True])
def test_ranks_with_devices_of_their_own_sleep_if_asked(monitor, sleeps, monkeypatch):
    calls, phases, weight_sync = [], [], WeightSync()
    monkeypatch.setattr(monitor, "phases", lambda name: phases.append(name) or contextlib.nullcontext())
    ranks = Ranks(calls)
    handover = Handover(weight_sync, ranks, monitor, sleeps=sleeps)
    handover.publish()
    handover.to_engines()
    handover.to_ranks()
    assert calls == ["sleep"] * sleeps
    assert phases == ["sync", "probe"] + ["sleep"] * sleeps
    monkeypatch.setattr(ranks, "sleep", dict)  # they sleep already, and report nothing
    handover.to_engines()
    assert ("memory/rank_asleep_gib" in handover.metrics) == sleeps
    assert weight_sync.changed == [True]


class Source:
    """Checks that groups are sampled while the engines serve, and tells what happened."""

    def __init__(self, sharing, calls):
        self._sharing, self._calls = sharing, calls

    def take(self, step, revive):
        return self._sampled("take")

    def updating(self, changed=True):
        return contextlib.nullcontext()

    def close(self):
        pass

    def run(self, step):
        return self._sampled("evaluate")

    def _sampled(self, call):
        assert self._sharing.state == DeviceUse.serving
        self._calls.append(call)
        return {}


PUBLIC = ("start", "take", "weights_changed", "evaluate", "close")


@pytest.mark.parametrize("names", list(itertools.product(PUBLIC, repeat=3)))
def test_no_order_of_the_loops_calls_is_refused(sharing, monitor, names):
    """Each call finds the memory where it needs it. The ranks have it after a rollout."""
    weight_sync, calls = WeightSync(), []
    weight_sync.close = lambda: None
    source, handover = Source(sharing, calls), Handover(weight_sync, Ranks([]), monitor, sharing)
    rollouts = RolloutPipeline(source, handover, monitor, evaluation=source)
    rollouts.start()
    for name in names:
        getattr(rollouts, name)(*([1] if name in ("take", "evaluate") else []))
        if name != "close":
            assert sharing.state == (DeviceUse.training if name == "take" else DeviceUse.serving)
    assert calls == [name for name in names if name in ("take", "evaluate")]
    assert weight_sync.changed.count(True) == 1 + sum(name in ("start", "weights_changed") for name in names)

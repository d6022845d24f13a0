"""Device sharing of engines and ranks: the order in which each side releases and takes memory."""

import contextlib
import itertools

import pytest

from grpo_megatron.config.schema import Config
from grpo_megatron.monitoring.monitor import Monitor
from grpo_megatron.monitoring.status import StatusFile
from grpo_megatron.rollout.handover import Handover
from grpo_megatron.rollout.pipeline import RolloutPipeline
from grpo_megatron.rollout.sharing import DeviceSharing

ORDER = ["release", "wake", "resume_weights", "sync", "sleep", "resume_kv_cache"]


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
        monitor.open()
        yield monitor
        monitor.close()


@pytest.fixture
def sharing(monitor):
    """The device sharing right after the ranks have started.

    calls: calls of engines and ranks from now on.
    engines: the engines that share their devices.
    """
    calls = []
    engines = Engines(calls)
    sharing = DeviceSharing(engines, monitor)
    sharing.release()
    sharing.started(Ranks(calls))
    calls.clear()
    sharing.calls, sharing.engines = calls, engines
    return sharing


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


def test_ranks_keep_the_devices_if_the_sync_fails(sharing):
    def fail():
        raise ValueError("no way")

    with pytest.raises(ValueError, match="no way"):
        sharing.to_engines(fail)
    assert sharing.calls == ["make_room", "resume_weights"]
    assert sharing.ranks_have_devices
    sharing.to_engines(lambda: sharing.calls.append("sync"))
    assert sharing.calls[2:] == ["make_room", *ORDER[2:]]


def test_engines_release_their_memory_again_if_they_could_not_take_all_of_it(sharing, monkeypatch):
    def fail():
        raise ValueError("no way")

    monkeypatch.setattr(sharing.engines, "resume_kv_cache", fail)
    with pytest.raises(ValueError, match="no way"):
        sharing.to_engines(lambda: None)
    assert not sharing.ranks_have_devices
    sharing.calls.clear()
    sharing.to_ranks()
    assert sharing.calls == ["release", "wake"]


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
    assert not sharing.ranks_have_devices
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
        assert not self._sharing.ranks_have_devices
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
            assert sharing.ranks_have_devices == (name == "take")
    assert calls == [name for name in names if name in ("take", "evaluate")]
    assert weight_sync.changed.count(True) == 1 + sum(name in ("start", "weights_changed") for name in names)

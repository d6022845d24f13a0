"""Versions of a weight sync, its session with the engines, and the probe after it."""

import pytest

from grpo_megatron.weights.sync.interface import EnginesLost
from grpo_megatron.weights.sync.sync import WeightSync


class Engines:
    """A WeightTarget that records the calls."""

    def __init__(self):
        self.calls = []

    def begin_update(self, again=False):
        self.calls.append("begin again" if again else "begin")

    def end_update(self, version):
        self.calls.append(version)


class Transfer:
    """Stands in for Resharding. It records its calls among those of the engines."""

    def transfer(self, source, target, version):
        target.calls.append(f"transfer {version}")
        return {"sent_gb": 0.25}


def test_versions_rise_and_every_sync_is_a_session():
    engines = Engines()
    sync = WeightSync(None, engines, Transfer())
    sync.run()
    sync.run()
    assert engines.calls == ["begin", "transfer 1", 1, "begin", "transfer 2", 2]
    assert sync.metrics["sync/seconds"] > 0
    assert sync.metrics["sync/sent_gb"] == 0.25
    again = WeightSync(None, engines, Transfer())
    again.load_state_dict(sync.state_dict())
    assert again.version == 2


def test_a_sync_in_which_engines_are_lost_is_repeated_with_the_others():
    class Losing(Transfer):
        losses = 2

        def transfer(self, source, target, version):
            taken = super().transfer(source, target, version)
            self.losses -= 1
            if self.losses >= 0:
                raise EnginesLost
            return taken

    engines = Engines()
    WeightSync(None, engines, Losing()).run()
    assert engines.calls == ["begin", *["transfer 1", "begin again"] * 2, "transfer 1", 1]


class Probe:
    def __init__(self, calls):
        self._calls = calls

    def ask_trainer(self):
        self._calls.append("trainer")

    def ask_engines(self):
        self._calls.append("engines")
        return {"probe_mean": 0.5}


def test_the_same_weights_keep_their_version_and_a_probe_asks_the_trainer_first():
    engines = Engines()
    sync = WeightSync(None, engines, Transfer(), Probe(engines.calls), probe_every=2)
    sync.run()
    assert engines.calls == ["begin", "transfer 1", 1, "trainer"]
    sync.probe()
    sync.probe()  # once a sync
    assert engines.calls[4:] == ["engines"]
    assert sync.metrics["sync/probe_mean"] == 0.5
    sync.run(changed=False)
    sync.probe()
    assert engines.calls[5:] == ["begin", "transfer 1", 1]
    assert sync.version == 1
    sync.run()
    assert engines.calls[8:] == ["begin", "transfer 2", 2, "trainer"]


def test_weights_that_do_not_arrive_are_no_new_version_and_the_engines_stay_paused():
    class Failing:
        def transfer(self, source, target, version):
            raise RuntimeError("the digest differs")

    engines = Engines()
    sync = WeightSync(None, engines, Failing())
    with pytest.raises(RuntimeError, match="the digest differs"):
        sync.run()
    assert engines.calls == ["begin"]
    assert sync.version == 0

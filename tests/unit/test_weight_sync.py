"""Versions of a weight sync, and the detection of full tensors that do not arrive."""

from contextlib import contextmanager

import pytest

from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.sync.object_store import ObjectStore
from grpo_megatron.weights.sync.sync import WeightSync
from tests.models import tiny_model


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    arch = read_architecture(tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True))
    return list(weight_map(arch).values())


class Engines:
    """A WeightTarget that records the calls."""

    def __init__(self):
        self.calls = []

    def begin_update(self):
        self.calls.append("begin")

    def load_bucket(self, bucket):
        self.calls.append("load")
        return bucket

    def end_update(self, version):
        self.calls.append(version)


class Trainer:
    """A WeightSource whose buckets are lists of names."""

    def __init__(self, *buckets):
        self._buckets = buckets

    @contextmanager
    def weight_stream(self, max_bytes):
        yield iter(self._buckets)


def names(entries):
    return [hf for entry in entries if entry.exported for hf in entry.hf]


def test_versions_rise_and_every_sync_is_a_session(entries):
    engines, transport = Engines(), ObjectStore(entries, 1000)
    everything = names(entries)
    sync = WeightSync(Trainer(everything[:3], everything[:2:-1]), engines, transport)
    sync.run()
    sync.run()
    assert engines.calls == ["begin", "load", "load", 1, "begin", "load", "load", 2]
    assert sync.metrics["sync/seconds"] > 0
    again = WeightSync(Trainer(), engines, transport)
    again.load_state_dict(sync.state_dict())
    assert again.version == 2


class Probe:
    def __init__(self, calls):
        self._calls = calls

    def ask_trainer(self):
        self._calls.append("trainer")

    def ask_engines(self):
        self._calls.append("engines")
        return {"probe_mean": 0.5}


def test_the_same_weights_keep_their_version_and_a_probe_asks_the_trainer_first(entries):
    engines, everything = Engines(), names(entries)
    probe = Probe(engines.calls)
    sync = WeightSync(Trainer(everything), engines, ObjectStore(entries, 1000), probe, probe_every=2)
    sync.run()
    assert engines.calls == ["begin", "load", 1, "trainer"]
    sync.probe()
    sync.probe()  # once a sync
    assert engines.calls[4:] == ["engines"]
    assert sync.metrics["sync/probe_mean"] == 0.5
    sync.run(changed=False)
    sync.probe()
    assert engines.calls[5:] == ["begin", "load", 1]
    assert sync.version == 1
    sync.run()
    assert engines.calls[8:] == ["begin", "load", 2, "trainer"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda names: names[1:],
            r"embed_tokens.weight \(part of the engine's model.embed_tokens.weight\) was delivered 0 times",
        ),
        (
            lambda names: [*names, "model.layers.1.self_attn.k_proj.weight"],
            r"k_proj.weight \(part of the engine's .*qkv_proj.weight\) was delivered 2 times",
        ),
        (lambda names: [*names, "model.layers.9.extra"], r"model.layers.9.extra is not in the weight map"),
    ],
)
def test_full_tensors_that_do_not_arrive_as_planned_are_no_new_version(entries, change, message):
    engines = Engines()
    sync = WeightSync(Trainer(change(names(entries))), engines, ObjectStore(entries, 1000))
    with pytest.raises(RuntimeError, match=message):
        sync.run()
    assert engines.calls == ["begin", "load"]
    assert sync.version == 0

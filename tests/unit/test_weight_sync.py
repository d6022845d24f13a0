"""The plan of a weight sync, and what is noticed about a transport that does not follow it."""

import pytest

from grpo_megatron.model.families import read_architecture, weight_map
from grpo_megatron.weights.sync.plan import Plan
from grpo_megatron.weights.sync.sync import WeightSync
from tests.models import tiny_model


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    arch = read_architecture(tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True))
    return list(weight_map(arch).values())


class Engines:
    """A WeightTarget that notes the calls."""

    def __init__(self):
        self.calls = []

    def begin_update(self):
        self.calls.append("begin")

    def load_bucket(self, bucket):
        self.calls.append("load")
        return bucket

    def end_update(self, version):
        self.calls.append(version)


class Way:
    def __init__(self, change):
        self._change = change

    def transfer(self, source, target):
        return self._change(target.load_bucket(list(source)))


def names(entries):
    return [hf for entry in entries if entry.exported for hf in entry.hf]


def test_versions_rise_and_every_sync_is_a_session(entries):
    engines = Engines()
    sync = WeightSync(names(entries), engines, Way(lambda delivered: delivered[::-1]), Plan(entries))
    sync.run()
    sync.run()
    assert engines.calls == ["begin", "load", 1, "begin", "load", 2]
    again = WeightSync([], engines, Way(list), Plan(entries))
    again.load_state_dict(sync.state_dict())
    assert again.version == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda names: names[1:], r"embed_tokens.weight, which fills model.embed_tokens.weight, came 0 times"),
        (
            lambda names: [*names, "model.layers.1.self_attn.k_proj.weight"],
            r"k_proj.weight, which fills .*qkv_proj.weight, came 2 times",
        ),
        (lambda names: [*names, "model.layers.9.extra"], r"model.layers.9.extra is not in the weight map"),
    ],
)
def test_what_does_not_arrive_as_planned_is_no_new_version(entries, change, message):
    engines = Engines()
    sync = WeightSync(names(entries), engines, Way(change), Plan(entries))
    with pytest.raises(RuntimeError, match=message):
        sync.run()
    assert engines.calls == ["begin", "load"]
    assert sync.version == 0

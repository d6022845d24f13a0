"""Seconds of phases, and how well devices were used."""

import time
from types import SimpleNamespace

import pytest

from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.commands.assemble import _throughput
from grpo_megatron.config.load import read_config
from grpo_megatron.monitoring.phases import Phases
from grpo_megatron.monitoring.samples import TrainedOn
from grpo_megatron.monitoring.throughput import Throughput
from tests.unit.scored_groups import batch_of, group


def test_a_phase_within_another_counts_once():
    """Engines release their memory in the middle of an evaluation that ranks score on the same devices."""
    begun = []
    phases, start = Phases(begun.append), time.perf_counter()
    with phases("evaluate"):
        time.sleep(0.02)
        with phases("release"):
            time.sleep(0.1)
        with phases("wake"):
            time.sleep(0.1)
    whole, seconds = time.perf_counter() - start, phases.total
    assert sum(seconds.values()) <= whole
    assert min(seconds["release"], seconds["wake"]) >= 0.1
    assert 0.02 <= seconds["evaluate"] <= whole - 0.2
    assert phases.take() == seconds
    assert begun == ["evaluate", "release", "evaluate", "wake", "evaluate"]


def test_utilisation_counts_forward_and_backward_of_every_epoch():
    batch = batch_of([group(0, (0.0, 1.0))])  # two sequences of 5 tokens
    throughput = Throughput(CostModel(per_token=10.0, per_pair=2.0), ranks=2, engine_devices=4, peak=1000.0)
    trained_on = TrainedOn(batch.lengths, epochs=2)
    scalars = throughput.scalars(
        trained_on, seconds=10.0, phases={"train": 2.0, "generate": 5.0, "sync": 1.0}
    )
    flops = 3 * 2 * 2 * (10 * 5 + 2 * 15)
    assert scalars["throughput/mfu_train"] == pytest.approx(flops / (2.0 * 2 * 1000))
    assert scalars["throughput/mfu_step"] == pytest.approx(flops / (10.0 * 6 * 1000))
    assert scalars["idle/trainer"] == pytest.approx(0.7)
    assert scalars["idle/engines"] == pytest.approx(0.4)
    scoring = throughput.scalars(
        trained_on, seconds=10.0, phases={"train": 2.0, "generate": 5.0, "score": 3.0}
    )
    assert (scoring["idle/trainer"], scoring["idle/engines"]) == pytest.approx(
        (0.5, 0.5)
    )  # a reward model is on the ranks
    shared = Throughput(CostModel(), ranks=4, engine_devices=4, shared=True)
    assert shared.devices == 4
    assert Throughput(CostModel(), ranks=2, engine_devices=0).scalars(trained_on, 1.0, {}).keys() >= {
        "idle/trainer"
    }


def test_a_reward_model_that_is_trained_has_no_vocabulary_head_to_count():
    model = "configs/models/qwen3-0.6b"
    config = read_config(None, [f"model.path={model}"])
    cluster = SimpleNamespace(rank_slots=[0], engine_slots=[])
    contexts = {
        name: SimpleNamespace(config=config, command=name, cluster=cluster, takes_turns=False)
        for name in ("sft", "reward-model")
    }
    tokens = {name: _throughput(context).cost.per_token for name, context in contexts.items()}
    assert tokens["sft"] - tokens["reward-model"] == 2 * 1024 * (151936 - 1)

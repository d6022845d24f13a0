"""The comparison of log-probs after a weight sync, with a trainer and engines that return given values."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.schedule import CostModel
from grpo_megatron.commands.train import _probes
from grpo_megatron.config.engine import EngineConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.trainer.weight_probe import WeightProbe
from tests.configs import actor_config

SEQUENCES = [np.arange(5), np.arange(3)]


def probe_of(scores: dict[int, float]) -> WeightProbe:
    """Return a probe after `ask_trainer`. scores: {engine: all log-probs that it returns}.

    All log-probs of the trainer are -1, or -1.01 with rounding.
    """

    def logprobs(plan, make, temperature, rounding):
        value = -1.0 if rounding is None else -1.01
        return [np.full((len(sequence), 1), value) for sequence in SEQUENCES]

    def score_on_all(sequences):
        return {
            engine: [np.full(len(sequence) - 1, score) for sequence in sequences]
            for engine, score in scores.items()
        }

    config = actor_config("unused", ParallelSizes())
    config = replace(config, rollout=RolloutConfig(engine=EngineConfig(dtype="float32")))
    trainer = SimpleNamespace(cost_model=CostModel(), probe=logprobs)
    probe = WeightProbe(trainer, SimpleNamespace(score_on_all=score_on_all), SEQUENCES, config)
    probe.ask_trainer()
    return probe


@pytest.mark.parametrize("wrong", [-2.0, float("nan")])
def test_an_error_names_the_engine_by_its_index(wrong):
    """Engine 1 is lost. The place of engine 2 among the others used to be named."""
    with pytest.raises(RuntimeError, match="engine 2 gives the probe prompts log-probs that differ"):
        probe_of({0: -1.02, 2: wrong, 3: -1.0}).ask_engines()


def test_the_result_is_that_of_the_worst_engine():
    found = probe_of({0: -1.02, 2: -1.05}).ask_engines()
    assert found == pytest.approx({"probe_mean": 0.05, "probe_limit": 0.2})


def test_without_engines_nothing_is_compared():
    assert probe_of({}).ask_engines() == {}


def test_a_prompt_of_one_token_is_asked_twice_and_few_prompts_again():
    """The array of ids used to be multiplied by 2, so that the mean over no log-prob was NaN."""
    run = SimpleNamespace(trainer=SimpleNamespace(sizes=ParallelSizes(dp=8)))
    prompts = [Prompt(uid, np.array(ids, np.int32), "", "") for uid, ids in enumerate(([5], [6, 7, 8]))]
    sequences = _probes(run, SimpleNamespace(first=lambda count: prompts[:count]))
    assert [sequence.tolist() for sequence in sequences] == [[5, 5], [6, 7, 8]] * 4

"""Beam search against transformers' own, and its groups. tests/integration has a real engine."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.load import read_config
from grpo_megatron.config.rollout import BeamConfig, EarlyStopping
from grpo_megatron.rollout.beam import BeamSearch
from grpo_megatron.rollout.episodes import SingleTurn
from grpo_megatron.rollout.groups import Caller, StaleWeights
from grpo_megatron.sglang.request import Completion
from tests.models import tiny_model, transformers_beams
from tests.rollouts import FakeEngines, manager_of

PROMPT = [1, 17, 33, 4]
LIMIT = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("model"), "qwen2", seed=1, num_hidden_layers=2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def answers(model, sequences, top, version=0):
    """Return the engine's answers about the next token of each sequence."""
    found = torch.log_softmax(model(torch.tensor(sequences)).logits[:, -1], -1).topk(top)
    return [
        Completion(
            (0, 0),
            ids[:1],
            logprobs[:1],
            "length",
            (WeightSpan(version, 0, 1),),
            None,
            ids[None],
            logprobs[None],
        )
        for ids, logprobs in zip(found.indices.int().numpy(), found.values.numpy(), strict=True)
    ]


def searched(model, width, ends, limit, config) -> BeamSearch:
    search = BeamSearch(width, ends, limit, config)
    while not search.done:
        search.advance(answers(model, [PROMPT + list(beam.ids) for beam in search.live], search.candidates))
    return search


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("early_stopping", list(EarlyStopping))
@pytest.mark.parametrize("length_penalty", [1.0, -0.5, 2.0])
@pytest.mark.parametrize(("width", "ends"), [(8, (15,)), (4, (40, 43)), (3, (16, 23, 24, 47))])
def test_it_finds_what_transformers_finds(model, width, ends, length_penalty, early_stopping):
    config = BeamConfig(length_penalty, early_stopping)
    search = searched(model, width, ends, LIMIT, config)
    sequences, scores = transformers_beams(model, PROMPT, width, ends, LIMIT, config)
    assert len(search.finished) == width
    assert [list(beam.ids) for _, beam in search.finished] == sequences
    assert [score for score, _ in search.finished] == pytest.approx(scores, rel=1e-5)
    for completion, (score, beam) in zip(search.completions(5), search.finished, strict=True):
        assert completion.logprobs.sum() / len(beam.ids) ** length_penalty == pytest.approx(score, rel=1e-5)
        ended = completion.response_ids[-1] in ends
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.response_ids) == LIMIT


def test_the_cases_differ(model):
    """Otherwise the test above would see only one rule."""
    found = {
        tuple(
            beam.ids
            for _, beam in searched(model, 4, (40, 43), LIMIT, BeamConfig(penalty, stopping)).finished
        )
        for penalty in (1.0, -0.5, 2.0)
        for stopping in EarlyStopping
    }
    assert len(found) >= 4
    assert {len(ids) == LIMIT for group in found for ids in group} == {True, False}


class Engine(FakeEngines):
    """An engine that answers with a model. The weight version changes after `old` answers.

    most: largest number of requests at one time.
    """

    weight_version = 3

    def __init__(self, model, old=0, slow=None):
        """Create the engine.

        slow: uid of a prompt that gets no answer for a minute.
        """
        super().__init__()
        self.model, self.old, self.slow, self.waiting, self.most = model, old, slow, 0, 0
        self.end_ids = frozenset({43})

    async def generate(self, request, listener=None):
        assert request.sampling["max_new_tokens"] == 1
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        try:
            await asyncio.sleep(60 if request.prompt_ids[len(PROMPT)] - 30 == self.slow else 0)
        finally:
            self.waiting -= 1
        self.old -= 1
        version = self.weight_version if self.old < 0 else 2
        return answers(self.model, [request.prompt_ids], request.top, version)[0]


class Rewards:
    async def score(self, prompt, sample):
        return sample.scored(float(len(sample.arrays.response_ids)), {})

    async def score_group(self, prompt, samples):
        return samples


def asked(number):
    return [Prompt(uid, np.array([*PROMPT, 30 + uid], np.int32), "", "", {}) for uid in range(number)]


def prepared(engine, *changes):
    """Return the manager, and the section of the configuration by which it samples."""
    config = read_config(
        None, ["model.path=m", "data.train=d", "rollout.strategy=beam", "rollout.n=3", *changes]
    )
    manager = manager_of(engine, SingleTurn(Rewards()))
    return manager, config.rollout


def sampled(engine, *changes):
    manager, rollout = prepared(engine, *changes)
    return manager.generate(asked(4), rollout)


def test_a_group_is_what_one_search_finds(model):
    engine = Engine(model)
    groups = sampled(engine, "rollout.max_response_length=7", "rollout.stop_token_ids=[40]")
    assert engine.most == 4 * 3  # steps of all groups overlap
    for uid, group in enumerate(groups):
        sequences, scores = transformers_beams(model, [*PROMPT, 30 + uid], 3, (43, 40), 7, BeamConfig())
        assert [sample.arrays.response_ids.tolist() for sample in group.samples] == sequences
        means = [sample.arrays.rollout_logprobs.mean() for sample in group.samples]
        assert means == pytest.approx(scores, rel=1e-5)
        for sample in group.samples:
            length = len(sample.arrays.response_ids)
            assert sample.reward == length
            assert sample.weight_spans == (WeightSpan(3, 0, length),)
    assert len({sample.trajectory_id for group in groups for sample in group.samples}) == 12


def test_a_round_of_beams_can_be_aborted(model):
    engine = Engine(model, slow=1)
    manager, rollout = prepared(engine, "rollout.max_response_length=5")

    async def sampled():
        async with manager.round(Caller.train, rollout) as round:
            groups = list(map(round.start, asked(3), manager.take_ids(3)))
            return [await groups[0], await groups[2]]

    assert [len(group.samples) for group in asyncio.run(sampled())] == [3, 3]
    assert (engine.waiting, engine.ended) == (0, [("train", 1)])


def test_beams_of_old_weights_are_noticed(model):
    with pytest.raises(StaleWeights, match=r"weight version \[2\], but the trainer has version 3"):
        sampled(Engine(model, old=1), "rollout.max_response_length=4")


def test_spans_say_which_weights_each_token_is_from(model):
    search = BeamSearch(2, (2,), 5, BeamConfig())
    for version in (7, 7, 8, 8, 8):
        if not search.done:
            search.advance(
                answers(model, [PROMPT + list(beam.ids) for beam in search.live], search.candidates, version)
            )
    whole = next(found for found in search.completions(0) if len(found.response_ids) == 5)
    assert whole.weight_spans == (WeightSpan(7, 0, 2), WeightSpan(8, 2, 5))

"""Reward models in every layout: scores equal transformers', and training equals one rank's."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from grpo_megatron.algorithm.preferences import PreferenceLoss
from grpo_megatron.batch.examples import Example, ExampleBatch
from grpo_megatron.batch.pairs import Pair, PairBatch
from grpo_megatron.batch.token_stream import TokenStream
from grpo_megatron.config.command import Command
from grpo_megatron.config.reward import MODEL, RewardConfig, RewardModelConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.schema import OptimizerConfig, Recompute
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import tiny_model
from tests.parallel import reward_models
from tests.parallel.invariance import FAULTS, Case, check, two_steps
from tests.parallel.test_invariance import EXPERT_LAYOUTS, LAYOUTS

OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01)
LOSS = PreferenceLoss()


def make_pairs(seed: int) -> PairBatch:
    """Return eight pairs with margins, whose sequences have 2 to 97 tokens."""
    rng = np.random.default_rng(seed)

    def example(length: int) -> Example:
        response = max(1, int(length * rng.uniform(0.3, 0.95)))
        ids = rng.integers(3, 61, length).astype(np.int32)
        return Example(ids[: length - response], ids[length - response :])

    lengths = [(97, 60), (2, 3), (41, 41), (5, 18), (66, 9), (30, 2), (12, 31), (7, 7)]
    pairs = [Pair(example(a), example(b), rng.uniform(0, 2)) for a, b in lengths]
    return PairBatch.of_pairs(pairs, 1 / len(pairs))


class Suite:
    """A model whose decoder gets a new head, its batches, and the results of one rank."""

    def __init__(self, ranks, folder: str):
        self.ranks, self.folder = ranks, folder
        self.arch = read_architecture(folder, reward_model=True)
        self.batches = [make_pairs(seed) for seed in (0, 1)]
        self._expected = None

    def case(self, sizes: ParallelSizes, options=None, **rest) -> Case:
        config = actor_config(self.folder, sizes, OPTIMIZER, **(options or {}))
        return Case(config, LOSS, self.batches, max_tokens=200, command=Command.reward_model, **rest)

    @property
    def expected(self):
        if self._expected is None:
            self._expected = self.ranks.run(two_steps, ParallelSizes(), self.case(ParallelSizes()))[0]
        return self._expected

    def check(self, sizes: ParallelSizes, options=None, **rest) -> None:
        case = self.case(sizes, options, **rest)
        check(self.arch, case, self.ranks.run(two_steps, sizes, case), self.expected)

    def scores(
        self, sizes: ParallelSizes, folder: str | None = None, fault: str | None = None, **options
    ) -> np.ndarray:
        config = replace(self.case(sizes).config, **options)
        parts = self.ranks.run(reward_models.scores, sizes, config, self.batches[0], folder, fault)
        return sum(part for part in parts if part is not None)


@pytest.fixture(scope="module")
def tied(ranks, tmp_path_factory):
    """A model with tied embeddings, whose score head must not be tied."""
    return Suite(ranks, tiny_model(tmp_path_factory.mktemp("tied"), "qwen2", tied=True))


@pytest.fixture(scope="module")
def experts(ranks, tmp_path_factory):
    return Suite(ranks, tiny_model(tmp_path_factory.mktemp("experts"), "qwen3_moe"))


# The others are in their combinations too.
@pytest.mark.slow_when(lambda layout: layout != "pp2vpp2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_in_a_layout(tied, layout):
    tied.check(ParallelSizes(**LAYOUTS[layout]))


FACTORS = {
    "one pair per micro-batch": {"packing": False},
    "constant-length packs": {"options": {"pack_tokens": 220}},
    "full recompute": {"options": {"recompute": Recompute.full}},
    "distributed optimizer with overlap": {"options": {"distributed_optimizer": True, "overlap": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "dp2"])
def test_training_with_another_factor(tied, layout, factor):
    tied.check(ParallelSizes(**LAYOUTS[layout]), **FACTORS[factor])


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_training_of_a_model_with_experts(experts, layout):
    experts.check(ParallelSizes(**EXPERT_LAYOUTS[layout]))


def test_the_comparison_compares_something(tied):
    """Gradients exist everywhere, and metrics for every pair."""
    assert all(float(flat.abs().max()) > 0 for _, flat in tied.expected.gradients.values())
    assert tied.expected.loss[0]["reward_model/accuracy"].count == 8


def test_scores_of_one_cp_rank_are_noticed(tied):
    assert "sequence sums of one CP rank" in FAULTS
    right = tied.scores(ParallelSizes(cp=2))
    wrong = tied.scores(ParallelSizes(cp=2), fault="sequence sums of one CP rank")
    assert np.abs(right - wrong).max() > 0.1


@torch.no_grad()
def transformers_scores(folder: str, stream: TokenStream) -> np.ndarray:
    """Return transformers' scores, float32 [S], with all sequences padded in one batch, as people compute
    them.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    longest, pad = int(stream.lengths.max()), model.config.pad_token_id
    tokens = torch.full((stream.num_sequences, longest), pad)
    for row, (start, end) in enumerate(zip(stream.cu_seqlens[:-1], stream.cu_seqlens[1:], strict=True)):
        tokens[row, : end - start] = torch.from_numpy(stream.tokens[start:end])
    return model(tokens, attention_mask=(tokens != pad).long()).logits[:, 0].numpy()


EXPORTS = {
    "qwen2": "tp2sp",
    "llama3": "pp2",
    "qwen3_moe": "ep2tp2",
    "qwen3": "tp2pp2",
    "mistral": "cp2",
    "mixtral": "ep2",
    "deepseek_v3": "tp2sp",
    "gpt_oss": "ep2",
}


@pytest.mark.slow_when(lambda family: family != "qwen2")
@pytest.mark.parametrize("family", EXPORTS)
def test_an_export_scores_alike_in_transformers_and_when_it_is_loaded_again(ranks, tmp_path, family):
    changes = {"sliding_window": None} if family == "mistral" else {}  # which is shorter than these sequences
    suite = Suite(ranks, tiny_model(tmp_path / "model", family, tied=family == "qwen2", **changes))
    sizes = ParallelSizes(**(LAYOUTS | EXPERT_LAYOUTS)[EXPORTS[family]])
    ours = suite.scores(sizes, folder=str(tmp_path / "hf"))
    np.testing.assert_allclose(ours, transformers_scores(str(tmp_path / "hf"), suite.batches[0]), atol=1e-5)
    # A reward model keeps its head: another seed, from which a new one would be made, changes nothing.
    again = Suite(ranks, str(tmp_path / "hf")).scores(ParallelSizes(), run=RunConfig(seed=1))
    np.testing.assert_allclose(ours, again, atol=1e-5)
    assert np.abs(suite.scores(ParallelSizes(), run=RunConfig(seed=1)) - ours).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp1", "tp2sp", "pp2vpp2", "cp2"])
def test_a_frozen_one_scores_beside_a_policy_of_another_architecture(ranks, tied, tmp_path, layout):
    tied.scores(ParallelSizes(), folder=str(tmp_path / "reward"))
    policy = tiny_model(tmp_path / "policy", "qwen3", hidden_size=32)
    sizes, pairs = ParallelSizes(**LAYOUTS.get(layout, {})), tied.batches[0]
    weight = np.append(pairs.tokens[1:] != 0, False).astype(np.float32) / pairs.num_tokens
    batch = ExampleBatch(cu_seqlens=pairs.cu_seqlens, tokens=pairs.tokens, weight=weight)
    model = RewardModelConfig(path=str(tmp_path / "reward"))
    config = actor_config(policy, sizes, OPTIMIZER, reward=RewardConfig(function=MODEL, model=model))
    [found] = [
        r for r in ranks.run(reward_models.scores_beside_a_policy, sizes, config, batch) if r is not None
    ]
    expected = transformers_scores(str(tmp_path / "reward"), batch)[found["order"]]
    np.testing.assert_allclose(found["scores"], expected, atol=1e-5)
    np.testing.assert_array_equal(found["later"], found["scores"])
    np.testing.assert_array_equal(found["logprobs"], found["logprobs again"])
    assert np.abs(found["trained"] - found["logprobs"]).max() > 0

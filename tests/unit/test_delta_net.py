"""Models with gated delta networks on one rank, in this process, against transformers and each other."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_megatron.config.command import Command
from grpo_megatron.config.schema import Precision, Recompute
from grpo_megatron.megatron import process_groups
from grpo_megatron.megatron.layers.delta_rule import Chunks
from grpo_megatron.megatron.state import checkpoint
from grpo_megatron.model.families import read_architecture
from grpo_megatron.model.parallel_sizes import ParallelSizes
from tests.configs import actor_config
from tests.models import HYBRIDS, random_batch, tiny_model, transformers_logprobs
from tests.parallel import actors
from tests.parallel.invariance import Case, check, two_steps
from tests.parallel.test_invariance import OPTIMIZER, TOKEN, make_batch
from tests.parallel.test_weights import assert_identical, read_all


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    """Make this process the only rank of a layout."""
    process_groups.initialize(
        ParallelSizes(), 0, f"file://{tmp_path_factory.mktemp('ranks') / 'store'}", seed=0
    )
    yield
    process_groups.destroy()


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request, tmp_path_factory):
    """Folder of a tiny checkpoint."""
    return tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def batch():
    """Sequences of 2 to 150 tokens: of one chunk, of several, and of less than the convolution's width."""
    return make_batch(0)


@pytest.fixture(scope="module")
def expected(model, batch):
    return transformers_logprobs(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), batch
    )


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_logprobs_equal_transformers(model, batch, expected, packing):
    difference = np.abs(actors.logprobs(actor_config(model), batch, packing) - expected).max()
    print(f"{difference:.1e}")
    assert difference <= 1e-5


def test_a_state_that_goes_on_at_a_boundary_is_noticed(model, batch, expected):
    def one_sequence(lengths, device, size=64):
        return real(np.array([lengths.sum()]), device, size)

    real = Chunks.of
    with patch.object(Chunks, "of", one_sequence):
        packed = actors.logprobs(actor_config(model), batch, packing=True)
        alone = actors.logprobs(actor_config(model), batch, packing=False)
    assert np.abs(packed - expected).max() > 1e-3
    assert np.abs(alone - expected).max() <= 1e-5


def test_a_checkpoint_is_exported_as_it_was_read(model, tmp_path):
    actors.round_trip(actor_config(model), str(tmp_path / "out"), None)
    assert_identical(read_all(tmp_path / "out"), read_all(model))


FACTORS = {
    "one sequence per micro-batch": {"packing": False},
    "small micro-batches": {"max_tokens": 152},
    "constant-length packs": {"options": {"pack_tokens": 300}},
    "selective recompute": {
        "options": {"recompute": Recompute.selective, "recompute_modules": ("core_attn", "mlp")}
    },
    "full recompute": {"options": {"recompute": Recompute.full}},
}


@pytest.fixture(scope="module")
def stepped(model):
    return two_steps(case(model))


def case(model: str, options=None, **rest) -> Case:
    config = actor_config(model, ParallelSizes(), OPTIMIZER, **(options or {}))
    return Case(config, TOKEN, [make_batch(seed) for seed in (0, 1)], **rest)


@pytest.mark.parametrize("factor", FACTORS)
def test_two_steps_do_not_depend_on(model, stepped, factor):
    """Loss, every gradient and every parameter agree to 1e-5."""
    other = case(model, **FACTORS[factor])
    check(read_architecture(model), other, [two_steps(other)], stepped)


def test_every_parameter_has_a_gradient(stepped):
    without = [name for name, (_, flat) in stepped.gradients.items() if not float(flat.abs().max()) > 0]
    assert without == []


def test_bf16_follows_fp32(model, batch, expected):
    found = actors.logprobs(actor_config(model, precision=Precision.bf16), batch, packing=True)
    assert 1e-4 < np.abs(found - expected).mean() < 0.05


def test_checkpoints_are_restored(model, tmp_path):
    """Another set of weights is loaded over the saved ones' model, and becomes the saved ones again."""
    saved = actors.Actor(actor_config(model))
    folder = str(tmp_path / "checkpoint")
    checkpoint.save(folder, saved.model.chunks, None).finish()
    other = tiny_model(tmp_path / "other", saved.model.arch.family, seed=1)
    loaded = actors.Actor(actor_config(other))
    before = loaded.passes.logprobs([random_batch(count=2)])
    checkpoint.load(folder, loaded.model.chunks, None)
    after = loaded.passes.logprobs([random_batch(count=2)])
    assert np.array_equal(after, saved.passes.logprobs([random_batch(count=2)]))
    assert not np.array_equal(before, after)


def test_a_reward_model_has_these_layers_too(tmp_path):
    config = actor_config(tiny_model(tmp_path, "qwen3_next"))
    assert actors.Actor(config, Command.reward_model).model.arch.scalar_head

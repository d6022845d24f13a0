import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batch import schedule
from grpo_megatron.batch.schedule import flops
from grpo_megatron.errors import UserError


@given(st.lists(st.integers(1, 100), min_size=4, max_size=60), st.integers(100, 300), st.sampled_from([1, 2, 4]))
def test_every_sequence_once_within_the_limit(lengths, max_tokens, dp):
    lengths = lengths[: len(lengths) // dp * dp]  # so that one sequence each is always possible
    plan = schedule(lengths, max_tokens, dp)
    seen = [i for rank in plan.micro_batches for micro_batch in rank for i in micro_batch]
    assert sorted(seen) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    for rank in plan.micro_batches:
        for micro_batch in rank:
            assert micro_batch
            assert sum(lengths[i] for i in micro_batch) <= max_tokens
    assert plan == schedule(lengths, max_tokens, dp)


def test_without_packing_each_sequence_is_alone():
    plan = schedule([5, 6, 7, 8], 100, dp=2, packing=False)
    assert all(len(micro_batch) == 1 for rank in plan.micro_batches for micro_batch in rank)


def test_ranks_are_balanced_by_flops():
    lengths = np.random.default_rng(0).lognormal(5, 1, 400).astype(int).clip(1, 4000)
    plan = schedule(lengths, 8000, dp=4)
    work = [flops(lengths[plan.sequences(rank)], 1024).sum() for rank in range(4)]
    assert max(work) / np.mean(work) < 1.05


def test_few_micro_batches():
    lengths = np.random.default_rng(0).integers(50, 500, 200)
    plan = schedule(lengths, 2000)
    assert plan.num_micro_batches <= -(-lengths.sum() // 2000) + 1


def test_a_tight_fit_is_found():
    # Longest-first to the emptiest of 4 overflows: 74 + 27 > 100
    plan = schedule([27, 27, 27, 47, 47, 74, 74], 100, dp=4)
    assert plan.num_micro_batches == 1


def test_too_long_a_sequence_is_named():
    with pytest.raises(UserError, match="sequence 1 has 200 tokens"):
        schedule([10, 200], 100)


def test_fewer_sequences_than_ranks():
    with pytest.raises(UserError, match="cannot share"):
        schedule([10], 100, dp=2)

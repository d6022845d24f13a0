import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batch.packing import _split
from grpo_megatron.batch.schedule import CostModel, schedule
from grpo_megatron.errors import UserError
from grpo_megatron.model.families import read_architecture

LENGTHS = st.lists(st.integers(1, 100), min_size=24, max_size=120)


def flops(plan, lengths, cost=CostModel()) -> np.ndarray:
    """Return the FLOPs as [dp, micro-batches]."""
    each = cost.flops(lengths)
    return np.array([[each[list(chosen)].sum() for chosen in rank] for rank in plan.micro_batches])


def tokens(plan, lengths) -> np.ndarray:
    """Return the tokens as [dp, micro-batches]."""
    return np.array(
        [[np.asarray(lengths)[list(chosen)].sum() for chosen in rank] for rank in plan.micro_batches]
    )


def log_normal(count: int, sigma: float, longest: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(longest / 8) - sigma**2 / 2, sigma, count)
    return lengths.astype(int).clip(1, longest)


@given(
    lengths=LENGTHS,
    max_tokens=st.integers(104, 400),
    dp=st.sampled_from([1, 2, 4, 8]),
    multiple_of=st.sampled_from([1, 2, 3]),
    sequence_multiple=st.sampled_from([1, 4, 8]),
    packing=st.booleans(),
    lockstep=st.booleans(),
    per_pair=st.sampled_from([0.0, 1e-5, 1.0]),
)
def test_every_sequence_once_within_the_limit(
    lengths, dp, multiple_of, max_tokens, sequence_multiple, packing, lockstep, per_pair
):
    step = dp * multiple_of
    lengths = lengths[: len(lengths) // step * step]  # so that one sequence each is always possible
    options = {
        "cost": CostModel(1.0, per_pair),
        "packing": packing,
        "sequence_multiple": sequence_multiple,
        "multiple_of": multiple_of,
        "lockstep": lockstep,
    }
    plan = schedule(lengths, max_tokens, dp, **options)
    assert len(plan.micro_batches) == dp
    assert sorted(itertools.chain(*(plan.sequences(rank) for rank in range(dp)))) == list(range(len(lengths)))
    assert {len(rank) for rank in plan.micro_batches} == {plan.num_micro_batches}
    assert plan.num_micro_batches % multiple_of == 0
    for chosen in itertools.chain(*plan.micro_batches):
        assert chosen
        assert sum(-(-lengths[i] // sequence_multiple) * sequence_multiple for i in chosen) <= max_tokens
    if not packing:
        assert plan.num_micro_batches * dp == len(lengths)
    assert plan == schedule(np.array(lengths, dtype=np.int32), max_tokens, dp, **options)


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.3])
@pytest.mark.parametrize(
    "cost", [CostModel(), CostModel(0.0, 1.0), CostModel(1.0, 0.0)], ids=["7B", "attention", "linear"]
)
def test_ranks_do_equal_work_in_total_and_at_every_moment(sigma, cost):
    lengths = log_normal(8000, sigma, 32768)
    work = flops(schedule(lengths, 32768, dp=16, cost=cost), lengths, cost)
    assert work.sum(axis=1).max() / work.sum(axis=1).mean() - 1 < 1e-3
    # Attention alone: a sequence of 32768 tokens outweighs any other micro-batch.
    assert work.max(axis=0).sum() / work.mean(axis=0).sum() - 1 < (0.03 if cost.per_token else 0.2)


def test_cheap_micro_batches_come_first_and_last():
    lengths = log_normal(4000, 1.0, 32768)
    work = flops(schedule(lengths, 32768, dp=4), lengths).mean(axis=0)
    middle = work.argmax()
    assert 0.4 < middle / len(work) < 0.6
    assert (np.diff(work[: middle + 1]) >= 0).all()
    assert (np.diff(work[middle:]) <= 0).all()


@pytest.mark.parametrize(
    ("count", "dp", "seed"), list(itertools.product([32, 128, 512], [1, 2, 8], range(3)))
)
def test_small_batches_are_even(count, dp, seed):
    lengths = np.random.default_rng(seed).integers(100, 400, count)
    plan = schedule(lengths, 4000, dp)
    held = tokens(plan, lengths)
    assert plan.num_micro_batches == -(-lengths.sum() // (4000 * dp))
    assert held.max() / held.mean() < 1.05
    assert flops(plan, lengths).sum(axis=1).max() / flops(plan, lengths).sum(axis=1).mean() < (
        1.02 if count < 100 else 1.001
    )


@pytest.mark.parametrize(("seed", "max_tokens"), list(itertools.product(range(6), [8000, 16000])))
def test_small_batches_are_level_at_every_moment(seed, max_tokens):
    lengths = np.random.default_rng(seed).lognormal(7, 0.7, 96).astype(int).clip(1, 4000)
    cost = CostModel(1.0, 1e-3)
    work = flops(schedule(lengths, max_tokens, dp=8, cost=cost, lockstep=True), lengths, cost)
    assert work.shape[1] <= 3
    assert work.max(axis=0).sum() / work.mean(axis=0).sum() < 1.04  # 1.03 to 1.11 without exchanges


@pytest.mark.parametrize("seed", range(60))
def test_exchanges_keep_micro_batches_within_the_limit(seed):
    """A wrong count of a micro-batch's tokens after an exchange lets a later exchange overfill it."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 400, size=draw.integers(20, 80))
    plan = schedule(lengths, 1000, dp=4, cost=CostModel(per_token=1.0, per_pair=0.01))
    assert max(lengths[list(mb)].sum() for rank in plan.micro_batches for mb in rank) <= 1000


def test_exchanges_empty_no_micro_batch():
    # The rank with the long sequence has most to give away, and nothing that it can.
    assert all(itertools.chain(*schedule([100, 1, 1, 1, 1, 1], 100, dp=2, multiple_of=3).micro_batches))


def test_a_rank_with_an_overlong_sequence_gets_less_of_the_rest_unless_in_lockstep():
    lengths = [1000] + [100] * 30 + [50] * 20
    apart, together = (
        schedule(lengths, 1000, dp=2, multiple_of=4, lockstep=lockstep) for lockstep in (False, True)
    )
    assert apart.num_micro_batches == together.num_micro_batches == 4
    (work, steady) = (flops(plan, lengths) for plan in (apart, together))
    assert work.sum(axis=1).max() < 1.02 * work.sum(axis=1).mean()
    rest = np.sort(steady.max(axis=0) / steady.min(axis=0))
    assert rest[-1] > 1.2
    assert (rest[:-1] < 1.02).all()
    assert steady.max(axis=0).sum() < work.max(axis=0).sum()


@pytest.mark.parametrize(("sigma", "seed"), list(itertools.product([0.8, 1.0, 1.3], range(3))))
def test_few_micro_batches(sigma, seed):
    lengths = log_normal(6000, sigma, 8192, seed)
    assert schedule(lengths, 8192).num_micro_batches <= -(-lengths.sum() // 8192) + 1


def test_a_tight_fit_is_found():
    # Longest-first to the emptiest of 4 overflows: 74 + 27 > 100
    plan = schedule([27, 27, 27, 47, 47, 74, 74], 100, dp=4)
    assert plan.num_micro_batches == 1


def test_two_sequences_that_fill_a_micro_batch_replace_one_that_does_not():
    # First-fit-decreasing puts 35 to 50 and needs 3. Longest-first to the emptiest of 2 overflows: 80 + 25 >
    # 100.
    lengths = [50, 35, 35, 30, 25, 25]
    assert tokens(schedule(lengths, 100), lengths).tolist() == [[100, 100]]


def test_a_pair_is_not_taken_where_that_costs_a_micro_batch():
    lengths = [34, 41, 41, 33, 27, 34, 28, 37]
    assert schedule(lengths, 100).num_micro_batches == 3


@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_added_to_a_tight_fit_are_as_full_as_the_others(seed):
    # 959 micro-batches hold everything, but 16 ranks need 960.
    lengths = log_normal(8000, 0.8, 32768, seed)
    held = tokens(schedule(lengths, int(lengths.sum() / 958.7), dp=16), lengths)
    assert held.size == 960
    assert held.min() > 0.95 * held.mean()


def test_split():
    assert sorted(_split([[7], [6, 5, 4, 3, 2], [1, 0]], 5)) == [[1, 0], [4], [5, 3], [6, 2], [7]]
    assert sorted(_split([[3], [2, 1]], 9)) == [[1], [2], [3]]


def test_padding_counts():
    # Four sequences of 25 would fit in 100, but each is padded to 28.
    assert schedule([25] * 4, 100).num_micro_batches == 1
    assert schedule([25] * 4, 100, sequence_multiple=4).num_micro_batches == 2


def test_thousands_of_sequences_in_a_micro_batch():
    plan = schedule(np.ones(40_000, dtype=int), 10_000, dp=4)
    assert (tokens(plan, np.ones(40_000)) == 10_000).all()
    lengths = np.repeat([1, 9_999], [40_000, 4])
    assert tokens(schedule(lengths, 10_000, dp=4), lengths).max() <= 10_000


def test_too_long_a_sequence_is_named():
    with pytest.raises(
        UserError, match="sequence 1 has 200 tokens, but a micro-batch holds at most 100; raise"
    ):
        schedule([10, 200], 100)
    with pytest.raises(
        UserError, match=r"sequence 0 has 99 tokens \(104 with the padding of context parallelism\)"
    ):
        schedule([99, 20], 100, sequence_multiple=8)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([10], {"dp": 2}, "1 sequences cannot be divided among 2 .* at least 2 are needed"),
        (
            [10] * 7,
            {"dp": 2, "multiple_of": 4},
            "a multiple of 4 for the virtual pipeline; at least 8 are needed",
        ),
        (
            [10] * 3,
            {"dp": 2, "packing": False},
            "one per micro-batch, .* make the number of sequences a multiple of 2, or use train.packing",
        ),
        (
            [90] * 5,
            {"dp": 2},
            "raise train.max_tokens_per_micro_batch, or make the number of sequences a multiple of 2",
        ),
        ([], {}, "no sequences"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_advice(lengths, options, message):
    with pytest.raises(UserError, match=message):
        schedule(lengths, 100, **options)


def test_empty_sequences_are_a_defect():
    with pytest.raises(ValueError, match="sequence 1 has 0 tokens"):
        schedule([5, 0], 100)


def test_cost_is_quadratic_in_length():
    # 3 tokens see 1 + 2 + 3 keys.
    assert CostModel(per_token=10.0, per_pair=2.0).flops([1, 3]).tolist() == [12.0, 42.0]


def test_a_sliding_window_hides_pairs():
    cost = CostModel(per_token=10.0, per_pair=2.0, windows=((3, 1.0), (100, 0.5)))
    # In the layers with a window of 3, 5 tokens see 1 + 2 + 3 + 3 + 3 keys; elsewhere 15.
    assert cost.flops([1, 5]).tolist() == [13.5, 50 + 30 + 12 + 7.5]
    assert cost.flops_of_next_token(5) == 10 + 10 + 3 + 2.5
    lengths = np.arange(1, 200)
    seen = sum(np.minimum(np.arange(1, 200), window) * per_pair for window, per_pair in cost.windows)
    assert np.allclose(cost.flops(lengths), 10 * lengths + lengths * (lengths + 1) + np.cumsum(seen))


CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
}


def test_cost_of_a_dense_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    # Weights of a layer: q and o 8·8 each, k and v 8·4 each, the MLP 3·8·20; the head 8·50.
    weights = 3 * (2 * 64 + 2 * 32 + 480) + 400
    assert read_architecture(str(tmp_path)).cost_model == CostModel(
        per_token=2.0 * weights, per_pair=4.0 * 3 * 8
    )


def test_cost_of_a_model_with_experts(tmp_path):
    experts = {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "mlp_only_layers": [0],
        "head_dim": 2,
    }
    (tmp_path / "config.json").write_text(
        json.dumps(CONFIG | experts | {"architectures": ["Qwen3MoeForCausalLM"]})
    )
    # The first layer has a dense MLP; in the others a router 8·16 chooses 2 experts of 3·8·6 each.
    weights = 3 * (2 * 64 + 2 * 32) + 480 + 2 * (128 + 2 * 144) + 400
    assert read_architecture(str(tmp_path)).cost_model.per_token == 2.0 * weights

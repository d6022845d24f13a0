"""Five sums for each sequence are enough for the advantages and weights of all its tokens.

The other side of each comparison is computed token by token, as the papers have it, in float64.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.advantages import AdvantageInputs, advantages
from grpo_megatron.batch.sequence_weights import LOSS_AGG_MODES, sequence_weights
from grpo_megatron.batch.sums import SequenceSums, suffix_sums
from grpo_megatron.config.algorithm import AlgorithmConfig
from tests.unit.credits import Tokens

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")


def random_tokens(seed: int, split: bool) -> tuple[Tokens, np.ndarray]:
    """Return a random ragged step, and bool [T] of what a mismatch correction keeps.

    split: let some trajectories have several sequences.
    """
    rng = np.random.default_rng(seed)
    trajectory = np.sort(rng.integers(0, 6, 9)) if split else np.arange(9)
    trajectory = rng.permutation(9)[trajectory]
    lengths = rng.integers(2, 30, 9)
    total = int(lengths.sum())
    mask, kept = rng.random(total) < rng.choice([0.0, 0.5, 1.0]), rng.random(total) < 0.8
    reward, group = rng.normal(size=9)[trajectory], rng.integers(0, 3, 9)[trajectory]
    kl = rng.exponential(rng.choice([1e-6, 1e-2, 3.0]), total) * (rng.random(total) < 0.9)
    return Tokens(reward, group, lengths, trajectory, mask, kl), kept


def by_token(tokens: Tokens, options: AlgorithmConfig, coef: float) -> np.ndarray:
    """Return the advantages float64 [T], computed from the rewards and the KL of every token."""
    table, mask, sequence = tokens.table, tokens.mask, tokens.sequence
    chosen = np.flatnonzero(mask)
    trajectory = table.trajectory_id[sequence]
    ids = np.unique(trajectory[chosen])
    first = {i: int(np.flatnonzero(table.trajectory_id == i)[0]) for i in ids}
    earned = -coef * tokens.kl
    score = {i: table.reward[first[i]] + earned[chosen][trajectory[chosen] == i].sum() for i in ids}
    members = {i: [j for j in ids if table.group_id[first[j]] == table.group_id[first[i]]] for i in ids}
    own = {}
    signal = sum(len({score[j] for j in members[i]}) > 1 for i in ids)
    for i in ids:
        scores = np.array([score[j] for j in members[i]])
        centred = score[i] - scores.mean() if len(set(scores)) > 1 else 0.0
        if options.adv_estimator == "grpo" and options.norm_adv_by_std_in_grpo and len(scores) > 1:
            centred /= scores.std(ddof=1) + 1e-6
        if options.adv_estimator == "rloo" and len(scores) > 1:
            centred *= len(scores) / (len(scores) - 1)
        own[i] = centred * (len(ids) / signal if options.adv_estimator == "gpg" and signal else 1.0)
    values = np.zeros(len(mask))
    for t in chosen:
        i = trajectory[t]
        values[t] = own[i]
        if options.adv_estimator == "reinforce_plus_plus":
            values[t] = (
                table.reward[first[i]] + earned[[u for u in chosen if trajectory[u] == i and u >= t]].sum()
            )
    found = values[chosen]
    if options.adv_whiten or options.adv_estimator.startswith("reinforce"):
        constant = len(set(found)) < 2
        found = found * 0 if constant else (found - found.mean()) / np.sqrt(found.var(ddof=1) + 1e-8)
    values[chosen] = (
        found if options.adv_clip is None else np.clip(found, -options.adv_clip, options.adv_clip)
    )
    return values


@pytest.mark.slow_but(5)
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), split=st.booleans(), coef=st.sampled_from([0.0, 0.05, 2.0]))
def test_advantages_from_sums_are_those_of_every_token(estimator, whiten, clip, seed, split, coef):
    options = AlgorithmConfig(adv_estimator=estimator, adv_whiten=whiten, adv_clip=clip)
    tokens, _ = random_tokens(seed, split)
    credit = advantages(tokens.inputs(coef), options)
    suffix = suffix_sums(tokens.cu_seqlens, tokens.kl)
    found = credit.of_tokens(tokens.sequence, tokens.mask, suffix, dtype=np.float64)
    np.testing.assert_allclose(found, by_token(tokens, options, coef), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@given(seed=st.integers(0, 10**6), split=st.booleans())
def test_weights_from_sums_are_those_of_every_token(mode, renormalize, seed, split):
    tokens, kept = random_tokens(seed, split)
    counted = tokens.mask & kept if renormalize else tokens.mask
    sums = SequenceSums.of(tokens.cu_seqlens, tokens.mask, kept, tokens.kl)
    found = sequence_weights(tokens.table, sums.kept if renormalize else sums.trained, mode, 40)
    trajectory = tokens.table.trajectory_id[tokens.sequence]
    group = tokens.table.group_id[tokens.sequence]
    trajectories, groups = set(trajectory[counted]), set(group[counted])
    expected = np.zeros(len(counted))
    for t in np.flatnonzero(counted):
        own = (trajectory[counted] == trajectory[t]).sum()
        expected[t] = {
            "token-mean": 1 / counted.sum(),
            "seq-mean-token-sum": 1 / len(trajectories),
            "seq-mean-token-mean": 1 / (len(trajectories) * own),
            "seq-mean-token-sum-norm": 1 / (len(trajectories) * 40),
            "group-sum": 1 / (len(groups) * own),
        }[mode]
    np.testing.assert_allclose(np.where(counted, found[tokens.sequence], 0), expected, rtol=1e-9)


def test_the_sums_by_hand():
    cu_seqlens = np.array([0, 4, 6])
    mask = np.array([True, False, True, True, False, False])
    kept = np.array([True, False, False, True, True, True])
    kl = np.array([1.0, 99.0, 2.0, 3.0, 99.0, 99.0])
    sums = SequenceSums.of(cu_seqlens, mask, kept, kl)
    # s is 6 and 5 and 3
    columns = [column.tolist() for column in vars(sums).values()]
    assert columns == [[3, 0], [2, 0], [6, 0], [14, 0], [36 + 25 + 9, 0], [[], []]]
    assert [column.tolist() for column in vars(SequenceSums.of(cu_seqlens, mask, kept)).values()] == [
        [3, 0],
        [2, 0],
        [0, 0],
        [0, 0],
        [0, 0],
        [[], []],
    ]
    assert suffix_sums(cu_seqlens, kl).tolist() == [105, 104, 5, 3, 198, 99]


def test_whitening_keeps_the_digits_of_large_values():
    """Rewards near 1e8 that differ by 1, with a small KL."""
    tokens = Tokens([1e8, 1e8 + 1, 1e8 + 3], [0, 0, 0], [2, 1, 4], kl=np.full(7, 1e-3))
    options = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    credit = advantages(tokens.inputs(1.0), options)
    found = credit.of_tokens(tokens.sequence, tokens.mask, suffix_sums(tokens.cu_seqlens, tokens.kl))
    np.testing.assert_allclose(found, by_token(tokens, options, 1.0), rtol=1e-6)


def test_equal_returns_are_exactly_zero_only_if_every_token_has_them():
    options = AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    one_token_each = Tokens([1.5, 2.0], [0, 0], [1, 1], kl=[0.5, 1.0])
    assert one_token_each.advantages(options).tolist() == [0.0, 0.0]
    last_token_only = Tokens([1.5, 2.0], [0, 0], [2, 1], kl=[0.0, 0.5, 1.0])
    assert last_token_only.advantages(options).tolist() == [0.0] * 3
    first_token = Tokens([1.5, 1.5], [0, 0], [2, 2], kl=[0.5, 0.0, 0.5, 0.0])
    assert first_token.advantages(options).all()


@pytest.mark.parametrize("name", ["mask", "token_reward", "sequence_id"])
def test_an_estimator_for_tokens_is_told_what_it_gets(name):
    inputs = Tokens([1.0], [0], [2]).inputs()
    with pytest.raises(AttributeError, match=f"no {name}: an advantage estimator sees trajectories"):
        getattr(inputs, name)
    assert replace(inputs, kl_coef=0.5).kl_coef == 0.5
    with pytest.raises(AttributeError, match="no attribute 'rewards'"):
        _ = inputs.rewards
    assert isinstance(inputs, AdvantageInputs)

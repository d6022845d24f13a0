import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.schema import AlgorithmConfig
from tests.unit.credits import Tokens

ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")
WITHIN_GROUPS = ("grpo", "rloo", "gpg")


def options(name="grpo", **changes) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, **changes)


def inputs(rewards, groups, lengths=None, token_reward=None, trained=None, trajectories=None) -> Tokens:
    """Return sequences with these numbers of tokens, all trained unless `trained` (one bool per sequence)
    says otherwise.
    """
    size = len(rewards)
    lengths = [1] * size if lengths is None else lengths
    trained = [True] * size if trained is None else trained
    trajectories = np.arange(100, 100 + size) if trajectories is None else trajectories
    kl = None if token_reward is None else -np.array(token_reward)
    return Tokens(rewards, groups, lengths, trajectories, np.repeat(trained, lengths), kl)


def advantages(given: Tokens, options: AlgorithmConfig) -> np.ndarray:
    return given.advantages(options)


def per_sample(name, rewards, groups, **changes) -> list[float]:
    return advantages(inputs(rewards, groups), options(name, **changes)).tolist()


# --- by hand


def test_grpo():
    # group 7: mean 0.25, deviations squared sum to 0.75, over n-1 = 0.25, std 0.5
    assert per_sample("grpo", [1.0, 0.0, 0.0, 0.0], [7] * 4) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], rel=1e-5
    )
    without = per_sample("grpo", [1.0, 0.0, 0.0, 0.0], [7] * 4, norm_adv_by_std_in_grpo=False)
    assert without == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_rloo():
    # 3 - (0 + 1) / 2, 0 - (3 + 1) / 2, 1 - (3 + 0) / 2
    assert per_sample("rloo", [3.0, 0.0, 1.0], [0, 0, 0]) == pytest.approx([2.5, -2.0, -0.5])
    # In a group of two, the mean of the others is the other one's score.
    assert per_sample("rloo", [3.0, 1.0, 5.0, 5.5], [0, 0, 1, 1]) == pytest.approx([2.0, -2.0, -0.5, 0.5])


def test_gpg():
    # 5 trajectories, 2 of them in a group with a signal: alpha 2.5
    assert per_sample("gpg", [1.0, 0.0, 4.0, 4.0, 4.0], [0, 0, 1, 1, 1]) == pytest.approx(
        [1.25, -1.25, 0, 0, 0]
    )


def test_reinforce_plus_plus():
    # tokens' returns: sequence 0: 1 - 0.1 - 0.3, 1 - 0.3; sequence 1: 0 + 0.2
    given = inputs([1.0, 0.0], [0, 0], lengths=[2, 1], token_reward=[-0.1, -0.3, 0.2])
    returns = [0.6, 0.7, 0.2]
    mean = 0.5
    deviation = math.sqrt((0.01 + 0.04 + 0.09) / 2)
    expected = [(value - mean) / deviation for value in returns]
    assert advantages(given, options("reinforce_plus_plus")).tolist() == pytest.approx(expected, rel=1e-6)


def test_reinforce_plus_plus_baseline():
    # centred: 0.5 on two tokens, -0.5 on one; mean 1/6, var (2 (1/3)² + (2/3)²) / 2 = 1/3
    given = inputs([1.0, 0.0], [0, 0], lengths=[2, 1])
    values = advantages(given, options("reinforce_plus_plus_baseline")).tolist()
    assert values == pytest.approx([(1 / 3) * math.sqrt(3)] * 2 + [(-2 / 3) * math.sqrt(3)], rel=1e-6)


def test_the_kl_of_the_tokens_is_part_of_the_score():
    given = inputs([1.0, 0.0], [0, 0], lengths=[2, 1], token_reward=[-0.25, -0.25, 0.1])
    values = advantages(given, options("grpo", norm_adv_by_std_in_grpo=False))
    assert values.tolist() == pytest.approx([0.2, 0.2, -0.2])  # scores 0.5 and 0.1


def test_whitening_and_clipping():
    given = inputs([1.0, 0.0], [0, 0], lengths=[3, 1])
    dr_grpo = {"norm_adv_by_std_in_grpo": False, "adv_whiten": True}
    # 0.5 three times and -0.5: mean 0.25, var (3 / 16 + 9 / 16) / 3 = 0.25
    assert advantages(given, options(**dr_grpo)).tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5], rel=1e-6)
    assert advantages(given, options(**dr_grpo, adv_clip=1.2)).tolist() == pytest.approx(
        [0.5, 0.5, 0.5, -1.2], rel=1e-6
    )


def test_clipping_is_on_both_sides_and_the_result_is_float32():
    values = advantages(
        inputs([3.0, -3.0, 0.0], [0, 0, 0]), options(norm_adv_by_std_in_grpo=False, adv_clip=2.0)
    )
    assert values.tolist() == [2.0, -2.0, 0.0]
    assert values.dtype == np.float32


@pytest.mark.parametrize("make", [list, np.array, lambda values: np.array(values, np.float32)])
def test_a_users_estimator_may_return_whole_numbers_or_float32(make, monkeypatch):
    """The mean of large values in float32 has lost the digits in which they differ."""
    from grpo_megatron.algorithm.advantages import advantage_estimator

    values = [1_000_001, 1_000_002, 1_000_004]
    monkeypatch.setitem(advantage_estimator._known, "whole", lambda inputs, options: make(values))
    found = advantages(inputs([1.0, 0.0, 0.0], [0, 0, 0]), options("whole", adv_whiten=True))
    np.testing.assert_allclose(found, (np.array([1, 2, 4]) - 7 / 3) / math.sqrt(7 / 3), rtol=1e-6)


# --- what must hold for all of them


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-8, 12345.678])
@pytest.mark.parametrize("changes", [{}, {"norm_adv_by_std_in_grpo": False}, {"adv_whiten": True}])
def test_constant_rewards_give_exactly_zero(name, value, changes):
    given = inputs([value] * 7, [0] * 4 + [1] * 3, lengths=[3, 1, 4, 1, 5, 9, 2])
    assert advantages(given, options(name, **changes)).tolist() == [0.0] * 25


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_a_constant_group_among_others_is_exactly_zero(name):
    values = per_sample(name, [0.1] * 7 + [1.0, 0.0], [0] * 7 + [1, 1])
    assert values[:7] == [0.0] * 7
    assert values[7] > 0 > values[8]


@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_a_group_of_one_is_zero(name):
    values = per_sample(name, [3.0, 1.0, 0.0], [0, 1, 1])
    assert values[0] == 0.0
    assert values[1] > 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_fully_masked_sequences_count_nowhere(name):
    """They count as if they were not there. Even their reward may be unknown."""
    rewards, groups, lengths = [1.0, 0.0, 0.5, 0.0], [0, 0, 1, 1], [2, 3, 1, 2]
    without = advantages(inputs(rewards, groups, lengths), options(name))
    given = inputs(
        [*rewards, math.nan, 1e9], [*groups, 0, 1], [*lengths, 2, 3], trained=[True] * 4 + [False] * 2
    )
    values = advantages(given, options(name))
    assert values[:8].tolist() == without.tolist()
    assert values[8:].tolist() == [0.0] * 5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_nothing_trained_at_all(name):
    assert advantages(inputs([1.0, 2.0], [0, 0], trained=[False, False]), options(name)).tolist() == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_trajectory_in_two_sequences_counts_once(name):
    whole = advantages(
        inputs([1.0, 0.0, 0.0], [0, 0, 0], [4, 2, 3], token_reward=np.arange(9) / 10), options(name)
    )
    split = inputs([1.0, 1.0, 0.0, 0.0], [0] * 4, [1, 3, 2, 3], np.arange(9) / 10, trajectories=[5, 5, 6, 7])
    np.testing.assert_allclose(advantages(split, options(name)), whole, rtol=1e-6)


def test_sequences_of_a_trajectory_need_one_reward():
    with pytest.raises(ValueError, match="same reward"):
        advantages(inputs([1.0, 0.5], [0, 0], trajectories=[5, 5]), options())


def test_a_missing_reward_is_refused():
    with pytest.raises(ValueError, match="finite numbers, got nan"):
        advantages(inputs([1.0, math.nan], [0, 0]), options())


@pytest.mark.parametrize("result", [np.zeros(2), np.array([0.0, math.inf, 0.0])])
def test_a_plugin_that_returns_nonsense_is_refused(result, monkeypatch):
    from grpo_megatron.algorithm.advantages import advantage_estimator

    monkeypatch.setitem(advantage_estimator._known, "nonsense", lambda inputs, options: result)
    with pytest.raises(ValueError, match="nonsense returned"):
        advantages(inputs([1.0, 0.0, 0.0], [0, 0, 0]), options("nonsense"))


# --- against one sample at a time

rewards = st.floats(-10, 10).map(lambda value: round(value, 3))


@st.composite
def batches(draw) -> SimpleNamespace:
    """Generate ragged groups in any order, as rows of tokens' rewards and masks."""
    size = draw(st.integers(1, 12))
    rows = [
        draw(st.lists(st.tuples(st.booleans(), st.floats(-1, 1)), min_size=1, max_size=6))
        for _ in range(size)
    ]
    return SimpleNamespace(
        reward=draw(st.lists(rewards, min_size=size, max_size=size)),
        group=draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)),
        masks=[[trained for trained, _ in row] for row in rows],
        token_reward=[[value for _, value in row] for row in rows] if draw(st.booleans()) else None,
    )


def naive(name: str, batch: SimpleNamespace, divide: bool) -> list[list[float]]:
    """Return rows of advantages, written down from the papers with lists."""
    present = [i for i, mask in enumerate(batch.masks) if any(mask)]
    own = batch.token_reward or [[0.0] * len(mask) for mask in batch.masks]
    earned = [[r if m else 0.0 for r, m in zip(own[i], batch.masks[i], strict=True)] for i in range(len(own))]
    score = [batch.reward[i] + sum(earned[i]) for i in range(len(own))]
    members = {i: [j for j in present if batch.group[j] == batch.group[i]] for i in present}
    same = {i: len({score[j] for j in members[i]}) == 1 for i in present}
    rows = [[0.0] * len(mask) for mask in batch.masks]
    for i in present:
        mean = sum(score[j] for j in members[i]) / len(members[i])
        if name == "reinforce_plus_plus":
            rows[i] = [batch.reward[i] + sum(earned[i][t:]) for t in range(len(rows[i]))]
            continue
        if same[i]:
            continue
        value = score[i] - mean
        if name == "grpo" and divide:
            squares = sum((score[j] - mean) ** 2 for j in members[i])
            value /= math.sqrt(squares / (len(members[i]) - 1)) + 1e-6
        if name == "rloo":
            value = score[i] - sum(score[j] for j in members[i] if j != i) / (len(members[i]) - 1)
        if name == "gpg":
            value *= len(present) / sum(not same[j] for j in present)
        rows[i] = [value] * len(rows[i])
    if name.startswith("reinforce"):
        values = [rows[i][t] for i in present for t, trained in enumerate(batch.masks[i]) if trained]
        mean = sum(values) / max(len(values), 1)
        constant = len(set(values)) < 2
        deviation = (
            1.0 if constant else math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) + 1e-8)
        )
        rows = [[0.0 if constant else (value - mean) / deviation for value in row] for row in rows]
    return [[v if m else 0.0 for v, m in zip(rows[i], batch.masks[i], strict=True)] for i in range(len(rows))]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("name", ESTIMATORS)
@given(batch=batches(), divide=st.booleans())
def test_like_one_sample_at_a_time(name, batch, divide):
    lengths = [len(mask) for mask in batch.masks]
    given = Tokens(
        batch.reward,
        np.array(batch.group) * 7 - 3,
        lengths,
        np.arange(len(lengths))[::-1],
        np.concatenate(batch.masks),
        None if batch.token_reward is None else -np.concatenate(batch.token_reward),
    )
    expected = np.concatenate(naive(name, batch, divide))
    # Sums in different order may make equal what is not, or the other way round: no such examples.
    nearly_zero = np.abs(expected)[expected != 0].min(initial=1) < 1e-7
    if not nearly_zero:
        values = advantages(given, options(name, norm_adv_by_std_in_grpo=divide))
        np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


# --- properties

many = st.lists(rewards, min_size=2, max_size=20)


@given(many)
@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_advantages_of_a_group_sum_to_zero(name, values):
    groups = [i % 2 for i in range(len(values))]
    found = per_sample(name, values, groups)
    for group in (0, 1):
        assert abs(sum(a for a, g in zip(found, groups, strict=True) if g == group)) < 1e-4


@given(many, st.integers(-50, 50))
@pytest.mark.parametrize("name", WITHIN_GROUPS)
def test_shifting_the_rewards_of_a_group_changes_nothing(name, values, shift):
    groups = [i % 2 for i in range(len(values))]
    shifted = [value + shift * group for value, group in zip(values, groups, strict=True)]
    np.testing.assert_allclose(per_sample(name, shifted, groups), per_sample(name, values, groups), atol=1e-4)


@given(many, st.floats(0.5, 20))
def test_scaling_changes_nothing_with_std_on(values, scale):
    groups = [0] * len(values)
    scaled = per_sample("grpo", [value * scale for value in values], groups)
    # 1e-6 in the denominator is what scaling can show in; rewards are at least 1e-3 apart.
    np.testing.assert_allclose(scaled, per_sample("grpo", values, groups), atol=1e-2)


@given(many, st.floats(0.5, 20))
@pytest.mark.parametrize("name", ["rloo", "gpg"])
def test_others_scale_with_the_rewards(name, values, scale):
    groups = [0] * len(values)
    scaled = per_sample(name, [value * scale for value in values], groups)
    np.testing.assert_allclose(
        scaled, np.array(per_sample(name, values, groups)) * scale, rtol=1e-5, atol=1e-4
    )

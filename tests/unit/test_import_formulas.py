"""Formulas of imported settings: what the other system's code computes, ours computes too."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.config.load import read_config
from grpo_megatron.importers import SYSTEMS, import_settings, read_settings, to_yaml
from tests.unit.broken_rules import algorithm_violations

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"


def verl(*arguments: str):
    base = (
        "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 "
        "actor_rollout_ref.model.path=/m data.train_files=/d.parquet"
    )
    return import_settings(
        SYSTEMS["verl"], read_settings(f"python3 -m verl.trainer.main_ppo {base} {' '.join(arguments)}")
    )


def as_config(result, folder):
    """Return the configuration that the result makes, which must break no rule of the algorithm."""
    path = folder / "imported.yaml"
    path.write_text(to_yaml(result))
    config = read_config(str(path), [])
    assert algorithm_violations(config) == []
    return config


def correction(**values) -> list[str]:
    return [f"{CORRECTION}.{name}={value}" for name, value in values.items()]


def reason(result, key: str) -> str:
    (line,) = [
        line
        for line in result.not_carried + result.changes_training
        if line.startswith((f"{key}=", f"{key} "))
    ]
    return line


# --- the policy loss


def test_gspo_has_its_own_mean():
    assert (
        verl(f"{ACTOR}.policy_loss.loss_mode=gspo").values["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    )
    result = verl(f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean")
    assert result.values["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    result = verl(
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=token-mean",
        f"{ACTOR}.use_kl_loss=true",
    )
    assert result.values["algorithm.loss_agg_mode"] == "seq-mean-token-mean"
    assert "for KL and entropy" in reason(result, f"{ACTOR}.loss_agg_mode")


def test_the_bypass_mode_has_its_own_loss(tmp_path):
    loss = f"{ACTOR}.policy_loss.loss_mode=gspo"
    clipped = as_config(verl(loss, *correction(bypass_mode="true")), tmp_path).algorithm
    assert (clipped.surrogate, clipped.ratio_level, clipped.loss_agg_mode) == ("clip", "token", "token-mean")
    result = verl(loss, *correction(bypass_mode="true", loss_type="reinforce", rollout_is="sequence"))
    config = as_config(result, tmp_path)
    assert (config.algorithm.surrogate, config.train.old_logprobs.name) == ("reinforce", "rollout")
    assert (config.mismatch.correction.name, config.mismatch.ratio_high) == ("seq_tis", 2)


@pytest.mark.parametrize(("theirs", "ours"), [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")])
def test_the_vectorized_estimators_are_the_same(theirs, ours):
    assert verl(f"algorithm.adv_estimator={theirs}").values["algorithm.adv_estimator"] == ours


def test_the_scale_of_seq_mean_token_sum_norm():
    norm = f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"
    key = f"{ACTOR}.loss_scale_factor"
    assert "a different scale" in reason(verl(norm, f"{key}=100", "data.max_response_length=64"), key)
    for same in (verl(norm, f"{key}=64", "data.max_response_length=64"), verl(f"{key}=100")):
        assert any(line.startswith(f"{key}=") for line in same.absorbed)


# --- rollout_is and rollout_rs


def k1(delta: list[float]) -> list[float]:
    """Return verl's k1, the engine's log-prob minus the trainer's."""
    return [-d for d in delta]


def k2(delta: list[float]) -> list[float]:
    return [d * d / 2 for d in delta]


def k3(delta: list[float]) -> list[float]:
    return [math.exp(d) - 1 - d for d in delta]


def verl_keeps(option: str, low: float, high: float, delta: list[float]) -> list[bool]:
    """Return which tokens of a sequence verl keeps.

    low, high: bounds of the criterion itself, so logarithms for k1.
    delta: the tokens' log-ratios.
    """
    level, _, measure = option.rpartition("_")
    values = {"k1": k1, "k2": k2, "k3": k3}[measure](delta)
    if level == "token":
        return [low <= value <= high for value in values]
    over = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}[level]
    return [low <= over(values) <= high] * len(values)


OPTIONS = [
    f"{level}_{measure}" for level in ("token", "seq_sum", "seq_mean") for measure in ("k1", "k2", "k3")
]
OPTIONS += ["seq_max_k2", "seq_max_k3"]


@pytest.fixture(scope="module", params=OPTIONS)
def imported(request, tmp_path_factory):
    """(option of verl, bounds of its criterion, our correction).

    The bounds are not each other's reciprocal.
    """
    of_ratio = request.param.endswith("k1")
    threshold, bounds = (
        ("0.6_1.25", (math.log(0.6), math.log(1.25))) if of_ratio else ("0.1", (-math.inf, 0.1))
    )
    result = verl(*correction(rollout_rs=request.param, rollout_rs_threshold=threshold))
    config = as_config(result, tmp_path_factory.mktemp("imported"))
    assert config.mismatch.correction.name == "none"
    assert (config.mismatch.renormalize, config.algorithm.mask_applies_to.name) == (True, "all")
    return request.param, bounds, Correction.from_config(config.mismatch)


numbers = st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=50)
@given(delta=numbers)
def test_rollout_rs_keeps_the_same_tokens_and_weighs_none(imported, delta):
    option, bounds, ours = imported
    flat = torch.tensor(list(itertools.chain.from_iterable(delta)), dtype=torch.float64)
    sequence = torch.tensor([i for i, row in enumerate(delta) for _ in row])

    def sequence_sum(values):
        return values.new_zeros(len(delta)).index_add(0, sequence, values)[sequence]

    factor, kept = ours(torch.zeros_like(flat), flat, torch.ones(len(flat), dtype=torch.bool), sequence_sum)
    expected = list(itertools.chain.from_iterable(verl_keeps(option, *bounds, row) for row in delta))
    assert kept.tolist() == expected
    assert factor.tolist() == [float(k) for k in expected]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # one number is the upper bound, and the lower its reciprocal
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
            {"rejection": "token_ratio", "rejection_low": 0.5},
        ),
        (
            {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_4.0"},
            {"rejection_low": 0.25, "rejection_high": 2},
        ),
        # versions of 2025
        ({"rollout_rs": "token", "rollout_rs_threshold": 4}, {"rejection_low": 0.25, "rejection_high": 4}),
        (
            {"rollout_rs": "sequence", "rollout_is_threshold": 4},
            {"rejection": "seq_ratio", "rejection_high": 4},
        ),
        (
            {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1, "rollout_rs_threshold_lower": 0.8},
            {"rejection": "seq_geometric_ratio", "rejection_low": 0.8, "rejection_high": 1.1},
        ),
        # weights, alone and with a mask
        ({"rollout_is": "token", "rollout_is_threshold": 5}, {"correction": "tis", "ratio_high": 5}),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
            {"correction": "icepop", "ratio_low": 0.5, "ratio_high": 5},
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"},
            {"correction": "mis", "ratio_low": 0.5, "ratio_high": 2},
        ),
        (
            {"rollout_is": "token", "rollout_rs": "seq_max_k3", "rollout_rs_threshold": 0.01},
            {"correction": "tis", "ratio_high": 2, "rejection": "seq_max_k3", "rejection_high": 0.01},
        ),
    ],
)
def test_corrections_of_verl(values, expected, tmp_path):
    result = verl(*correction(**values))
    as_config(result, tmp_path)
    assert {name: result.values.get(f"mismatch.{name}") for name in expected} == expected
    assert result.values.get("mismatch.renormalize") == ("rollout_rs" in values or None)


def test_in_bypass_mode_only_the_policy_term_loses_tokens(tmp_path):
    values = {"bypass_mode": "true", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
    config = as_config(verl(*correction(**values)), tmp_path)
    assert (config.mismatch.rejection.name, config.mismatch.renormalize) == ("seq_mean_k3", False)
    assert config.algorithm.mask_applies_to.name == "policy"


@pytest.mark.parametrize(
    ("values", "key", "says"),
    [
        (
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "2.0,0.1"},
            "rollout_rs",
            "one criterion",
        ),
        ({"rollout_rs": "token_k1"}, "rollout_rs", "requires"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.0},
            "rollout_rs",
            "this criterion does not exist",
        ),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "rollout_rs", "only an upper bound"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "much"}, "rollout_rs", "not a number"),
        (
            {"rollout_rs": "token_k1", "rollout_rs_threshold": "-1_2.0"},
            "rollout_rs",
            "must be greater than 0",
        ),
        ({"rollout_is": "geometric"}, "rollout_is", "this weight does not exist"),
        ({"rollout_is": "token", "bypass_mode": "true"}, "rollout_is", "ppo_clip"),
        (
            {
                "rollout_is": "token",
                "rollout_is_threshold": "0.5_5.0",
                "rollout_rs": "seq_mean_k3",
                "rollout_rs_threshold": 0.1,
            },
            "rollout_is",
            "renormalize",
        ),
        ({"rollout_is_batch_normalize": "true"}, "rollout_is_batch_normalize", "not divided"),
    ],
)
def test_corrections_we_do_not_have_are_refused_with_the_reason(values, key, says):
    assert says in reason(verl(*correction(**values)), f"{CORRECTION}.{key}")

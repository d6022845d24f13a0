"""Values of RLinf's YAML files, imported, and what is refused with the reason."""

import pytest

from grpo_megatron.importers import RLINF
from tests.unit.imported_configs import RLINF_FILE, imported, left, line_about, loaded, rlinf


def test_an_rlinf_file_gives_our_values(tmp_path):
    config = loaded(imported(RLINF, RLINF_FILE), tmp_path)
    algorithm = config.algorithm
    assert (config.run.name, config.run.total_steps) == ("grpo-16x512", 300)
    assert (config.rollout.n, config.data.train_batch_size, config.train.ppo_mini_batch_size) == (
        16,
        512,
        128,
    )
    assert (config.data.max_prompt_length, config.rollout.max_response_length) == (1024, 7168)
    assert config.train.max_tokens_per_micro_batch == 2 * 8192
    assert (algorithm.adv_estimator, algorithm.surrogate, algorithm.ratio_level) == ("grpo", "clip", "token")
    assert (algorithm.loss_agg_mode, algorithm.adv_whiten) == ("token-mean", True)
    assert (algorithm.use_kl_loss, algorithm.kl_loss_coef, algorithm.kl_loss_type) == (
        True,
        0.001,
        "low_var_kl",
    )
    assert (algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c) == (0.2, 0.28, None)
    assert (algorithm.entropy_coeff, algorithm.early_stop_imp_ratio) == (0.002, 5.0)
    # token-mean is global here, so the scale that makes theirs global must not act a second time
    assert algorithm.use_valid_token_scale is False
    assert (config.mismatch.correction.name, config.mismatch.ratio_high) == ("tis", 2.0)
    assert (config.rollout.temperature, config.rollout.top_k, config.train.old_logprobs.name) == (
        0.9,
        -1,
        "recompute",
    )
    assert (config.data.train, config.data.eval) == ("/data/boba.jsonl", ["/data/a.jsonl", "/data/b.jsonl"])
    assert (config.data.answer_key, config.data.overlong_prompts.name) == ("solutions", "skip")
    assert (config.eval.every, config.checkpoint.every) == (10, 0)
    assert (config.megatron.tensor_parallel, config.megatron.sequence_parallel, config.megatron.sleep) == (
        2,
        True,
        True,
    )
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.weight_decay, optimizer.clip_grad) == (
        2e-5,
        1e-5,
        0.05,
        0.8,
    )
    assert optimizer.lr_warmup_steps == 5


def test_what_an_rlinf_file_has_beyond_ours_is_said():
    result = imported(RLINF, RLINF_FILE)
    assert result.unknown == ["my_own_section.switch=True"]
    assert "no fp16" in line_about(left(result), "actor.model.precision")
    assert "RLinf ignores this" in line_about(left(result), "runner.max_tokens_per_mbs")
    assert "data_parallel" in line_about(left(result), "cluster.num_nodes")
    assert "config.json" in line_about(left(result), "actor.model.normalization")
    assert "mini-batches per step -> prompts per mini-batch" in line_about(
        result.changed, "algorithm.n_minibatches"
    )
    assert "prompt and response -> tokens of the response" in line_about(result.changed, "runner.seq_length")
    assert "micro-batch" in line_about(result.changed, "algorithm.early_stop_imp_ratio")
    assert "as always here" in line_about(result.absorbed, "algorithm.use_valid_token_scale")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"algorithm__kl_beta": 0.0}, {"algorithm.use_kl_loss": False}),
        ({"algorithm__calculate_entropy": False}, {"algorithm.entropy_coeff": 0.0}),
        (
            {"algorithm__adv_type": "reinpp"},
            {"algorithm.adv_estimator": "reinforce_plus_plus", "algorithm.adv_whiten": None},
        ),
        (
            {"algorithm__adv_type": "reinpp", "algorithm__use_reinpp_baseline": True},
            {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
        ),
        (
            {"algorithm__reinpp_kl_beta": 0.01},
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.kl_coef": 0.01,
                "algorithm.kl_penalty": "low_var_kl",
            },
        ),
        ({"algorithm__loss_type": "gspo"}, {"algorithm.ratio_level": "sequence"}),
        ({"algorithm__clip_ratio_high": None}, {"algorithm.clip_ratio_high": 0.2}),
        ({"actor__global_batch_size": 1024}, {"train.ppo_mini_batch_size": 64}),
        ({"runner__enable_dynamic_batch_size": True}, {"train.max_tokens_per_micro_batch": 28672}),
        (
            {"algorithm__recompute_logprobs": False, "algorithm__importance_sampling_fix": False},
            {"train.old_logprobs": "rollout"},
        ),
    ],
)
def test_rlinf_values(changes, expected, tmp_path):
    result = rlinf(**changes)
    for key, value in expected.items():
        assert result.values.get(key) == value, key
    loaded(result, tmp_path)


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"algorithm__adv_type": "gae"}, "algorithm.adv_type", "no critic"),
        ({"algorithm__loss_type": "actor_critic"}, "algorithm.loss_type", "no critic"),
        (
            {"algorithm__loss_agg_func": "seq-mean-token-sum"},
            "algorithm.use_valid_token_scale",
            "only with token-mean",
        ),
        ({"algorithm__n_minibatches": 7}, "algorithm.n_minibatches", "not divisible"),
        ({"actor__global_batch_size": 100}, "actor.global_batch_size", "whole groups"),
    ],
)
def test_what_rlinf_has_and_we_do_not_is_refused_with_the_reason(changes, key, reason):
    assert reason in line_about(left(rlinf(**changes)), key)

"""Mapping of RLinf's keys to those of grpo_megatron: algorithm and reward."""

from typing import Any

from grpo_megatron.importers.converters import absorbed, choice, clip_ratios, fixed, truth, unless_null
from grpo_megatron.importers.mapping import CannotCarry, Source, becomes, dropped, same, trains

ESTIMATORS = {
    "grpo": "grpo",
    "math_grpo": "grpo",
    "reinpp": "reinforce_plus_plus",
}
CLIPPED = {"algorithm.surrogate": "clip", "algorithm.ratio_level": "token"}
LOSSES = dict.fromkeys(("actor", "grpo", "ppo", "math_ppo_actor"), CLIPPED) | {
    "gspo": {"algorithm.surrogate": "clip", "algorithm.ratio_level": "sequence"},
}
AGGREGATION = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")}
MODEL = "actor.model"
_ADAPTER = "adapters are not carried over; set megatron.lora.* by hand, or all weights are trained"


def _estimator(value: Any, source: Source) -> str:
    if value == "reinpp" and truth(source["algorithm.use_reinpp_baseline"]):
        return "reinforce_plus_plus_baseline"
    return choice(ESTIMATORS, "no such estimator here (no critic, no simulated environments)")(value, source)


def _whiten(value: Any, source: Source) -> dict[str, Any]:
    # REINFORCE++ always whitens the advantages, in both systems.
    return {} if source["algorithm.adv_type"] == "reinpp" else {"algorithm.adv_whiten": truth(value)}


def _kl_in_loss(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value}
        if value
        else {"algorithm.use_kl_loss": False}
    )


def _kl_in_reward(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value} if value else {}


def _kl_type(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.kl_loss_type": value} | (
        {"algorithm.kl_penalty": value} if source["algorithm.reinpp_kl_beta"] else {}
    )


def _entropy(value: Any, source: Source) -> float:
    return value if truth(source["algorithm.calculate_entropy"]) else 0.0


def _token_scale(value: Any, source: Source) -> dict[str, Any]:
    if truth(value) and source["algorithm.loss_agg_func"] != "token-mean":
        raise CannotCarry(
            "this weights micro-batches by their tokens, which equals a mean over the whole step only with "
            "token-mean"
        )
    return {}


def _of_the_critic(value: Any, source: Source) -> dict[str, Any]:
    if source["algorithm.adv_type"] in ESTIMATORS:
        return {}
    raise CannotCarry("there is no critic here")


def _mini_batch(value: Any, source: Source) -> int:
    prompts = source.number("data.rollout_batch_size")
    if prompts % int(value):
        raise CannotCarry(f"data.rollout_batch_size={prompts} is not divisible by this number")
    return prompts // int(value)


def _correction(value: Any, source: Source) -> dict[str, Any]:
    if not truth(value):
        return {}
    return {
        "mismatch.correction": "tis",
        "mismatch.ratio_high": source.number("algorithm.importance_sampling_clip"),
    }


def _micro_batch(value: Any, source: Source) -> dict[str, Any]:
    if truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("RLinf ignores this with runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": int(value) * source.number("runner.seq_length")}


def _scale(value: Any, source: Source) -> dict[str, Any]:
    if value not in (None, 1) and source["algorithm.adv_type"] not in ("grpo", "math_grpo"):
        raise CannotCarry(
            "a scale changes the training unless advantages are divided by the group's standard deviation"
        )
    return {}


def _reward(value: Any, source: Source) -> str:
    why = "set reward.function=module:function; its arguments are prompt, response, answer, record"
    return choice({"math": "math"}, why)(value, source)


_DENOMINATOR = "here always a mean over the whole optimizer step"

ALGORITHM = trains(
    becomes("algorithm.adv_type", "algorithm.adv_estimator", _estimator, "reinpp: reinforce_plus_plus"),
    absorbed("algorithm.use_reinpp_baseline", "read with adv_type", default=False),
    becomes(
        "algorithm.loss_type",
        ("algorithm.surrogate", "algorithm.ratio_level"),
        choice(LOSSES, "no such policy loss here (no critic)"),
        "actor, grpo, ppo: clip, ratio of the token; gspo: clip, ratio of the sequence",
    ),
    becomes(
        "algorithm.loss_agg_func",
        "algorithm.loss_agg_mode",
        choice(AGGREGATION),
        _DENOMINATOR,
        default="token-mean",
    ),
    same("algorithm.group_size", "rollout.n"),
    becomes(
        "algorithm.kl_beta",
        ("algorithm.use_kl_loss", "algorithm.kl_loss_coef"),
        _kl_in_loss,
        "0: use_kl_loss=false; in RLinf too, it is added to the loss",
        default=0.0,
    ),
    becomes(
        "algorithm.reinpp_kl_beta",
        ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"),
        _kl_in_reward,
        default=0.0,
    ),
    becomes(
        "algorithm.kl_penalty_type",
        ("algorithm.kl_loss_type", "algorithm.kl_penalty"),
        _kl_type,
        "the same names; RLinf limits k3 to 10, here the log-ratio is limited to 20",
    ),
    same("algorithm.kl_penalty", "algorithm.kl_loss_type", "the older name of kl_penalty_type"),
    becomes(
        "algorithm.ratio_clip_eps",
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        clip_ratios,
        default=0.2,
    ),
    becomes(
        "algorithm.clip_ratio_low",
        "algorithm.clip_ratio_low",
        unless_null,
        "with null, ratio_clip_eps decides",
    ),
    becomes(
        "algorithm.clip_ratio_high",
        "algorithm.clip_ratio_high",
        unless_null,
        "with null, ratio_clip_eps decides",
    ),
    same("algorithm.clip_ratio_c", "algorithm.clip_ratio_c", default=3.0),
    absorbed(
        "algorithm.calculate_entropy",
        "the entropy is always measured here; read with entropy_bonus",
        default=False,
    ),
    becomes(
        "algorithm.entropy_bonus",
        "algorithm.entropy_coeff",
        _entropy,
        "no effect in RLinf without calculate_entropy",
        default=0.0,
    ),
    becomes(
        "algorithm.normalize_advantages",
        "algorithm.adv_whiten",
        _whiten,
        "after the normalisation in the group, in both; reinpp always whitens",
        default=False,
    ),
    same(
        "algorithm.early_stop_imp_ratio",
        "algorithm.early_stop_imp_ratio",
        "drops the whole optimizer step here, a micro-batch's loss in RLinf",
        default=5.0,
    ),
    becomes(
        "algorithm.use_valid_token_scale",
        ("algorithm.loss_agg_mode",),
        _token_scale,
        "true: the mean over the whole step, as always here; our key of this name means something else",
        default=False,
    ),
    becomes(
        "algorithm.importance_sampling_fix",
        ("mismatch.correction", "mismatch.ratio_high"),
        _correction,
        "true: tis; in RLinf's first versions, importance_sampling_clip was a lower limit of the ratio",
        default=False,
    ),
    absorbed("algorithm.importance_sampling_clip", "read with importance_sampling_fix"),
    becomes(
        "algorithm.recompute_logprobs",
        "train.old_logprobs",
        lambda value, source: "recompute" if truth(value) else "rollout",
        "false: the engine's log-probs are the old policy's",
    ),
    becomes(
        "algorithm.n_minibatches",
        "train.ppo_mini_batch_size",
        _mini_batch,
        unit="mini-batches per step -> prompts per mini-batch",
    ),
    fixed("algorithm.shuffle_rollout", (False,), "the order within a step is that of the batch here"),
)

MEMORY = (
    becomes(
        "algorithm.training_batch_size_per_gpu",
        "train.max_tokens_per_micro_batch",
        _micro_batch,
        "packed, not padded",
        unit="sequences per GPU -> tokens",
    ),
    dropped(
        "*micro_batch_size*",
        "all passes of a step use one partition into micro-batches: train.max_tokens_per_micro_batch",
    ),
    dropped(
        "algorithm.*batch_size_per_gpu",
        "the engine forms its own batches: rollout.max_concurrency, rollout.engine.max_running_requests",
    ),
    dropped("algorithm.return_logprobs", "the engine's log-probs are always recorded here"),
)

PENALTIES = trains(
    dropped("algorithm.len_reward_penalty", "another form of length penalty: see reward.overlong_buffer"),
    dropped(
        "algorithm.safe_length",
        "see reward.overlong_buffer.length: that many tokens before rollout.max_response_length",
    ),
    dropped("algorithm.*_length", "see reward.overlong_buffer"),
    dropped(
        "algorithm.max_resample",
        "set rollout.dynamic_sampling by hand: it replaces the groups that algorithm.filters drop",
    ),
    fixed(
        "algorithm.max_num_gen_batches",
        (1, None),
        "set rollout.dynamic_sampling by hand: it replaces the groups that algorithm.filters drop",
        "rollout.dynamic_sampling.max_batches",
    ),
    *(
        fixed(f"algorithm.{name}", (False, None), "there is no critic here")
        for name in ("use_critic", "use_value_loss")
    ),
    *(
        becomes(f"algorithm.{name}", (), _of_the_critic, "read only with a critic")
        for name in ("gamma", "gae_lambda", "value_cliprange", "critic_warmup_steps")
    ),
    fixed("algorithm.clip_log_ratio_min", (-20, None), "the log-ratio is limited to 20 here"),
    fixed("algorithm.clip_log_ratio_max", (20, None), "the log-ratio is limited to 20 here"),
    dropped("algorithm.*", "no such part of the algorithm here"),
    dropped(
        "agentloop.*",
        "set rollout.environment=tools, an environment of your own, or rollout.agent, and rollout.max_turns",
    ),
    dropped(
        "tools.*",
        "set rollout.environment=tools, and name functions (module:function) and MCP servers (mcp:SERVER) in "
        "rollout.tools",
    ),
    fixed("reward.use_reward_model", (False,), "a reward function may call a model", "reward.function"),
    becomes(
        "reward.reward_type",
        "reward.function",
        _reward,
        "math: math, with rewards 1 and 0; for others, set reward.function=module:function",
    ),
    becomes(
        "reward.reward_scale",
        (),
        _scale,
        "changes nothing with adv_type grpo, which divides by the standard deviation",
    ),
    becomes(
        "data.apply_chat_template",
        "data.chat_template",
        lambda value, source: "tokenizer" if truth(value) else "none",
        "false: none",
    ),
    dropped("data.image_keys", "only text is trained here"),
    fixed(
        f"{MODEL}.is_lora",
        (False, None),
        _ADAPTER,
        "megatron.lora.rank",
        note="only false; else set megatron.lora.* by hand",
    ),
    fixed(
        "actor.model.lora_rank",
        (0, None),
        _ADAPTER,
        "megatron.lora.rank",
        note="only 0; else set megatron.lora.* by hand",
    ),
)

"""verl's keys (`python3 -m verl.trainer.main_ppo key=value ...`) and ours."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Source,
    System,
    becomes,
    choice,
    dropped,
    elsewhere,
    flag,
    only,
    same,
    truth,
    unless_null,
)
from grpo_megatron.importers.verl_correction import CORRECTION, ROLLOUT_CORRECTION, bypasses
from grpo_megatron.importers.verl_trainer import ACTOR, ROLLOUT, TRAINER

ESTIMATORS = {name: name for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")} | {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
LOSS_MODES = {
    "vanilla": {"algorithm.surrogate": "clip", "algorithm.ratio_level": "token"},
    "gspo": {
        "algorithm.surrogate": "clip",
        "algorithm.ratio_level": "sequence",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"algorithm.surrogate": "cispo", "algorithm.ratio_level": "token"},
    "gpg": {"algorithm.surrogate": "reinforce", "algorithm.ratio_level": "token"},
}
AGGREGATION = {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")}


def _clip(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.clip_ratio_low": value, "algorithm.clip_ratio_high": value}


def _longest(source: Source) -> int:
    return source.number("data.max_prompt_length") + source.number("data.max_response_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"means nothing to verl without {ACTOR}.use_dynamic_bsz")
    # With CP, theirs may be shorter than a sequence, which is then spread over the ranks.
    return {"train.max_tokens_per_micro_batch": max(int(value), _longest(source))}


def _micro_batch(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    if truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"means nothing to verl with {ACTOR}.use_dynamic_bsz")
    return {"train.max_tokens_per_micro_batch": int(value) * _longest(source)}


def _truncation(value: Any, source: Source) -> str:
    if truth(source["data.filter_overlong_prompts"]):
        return "skip"
    return choice({"error": "error", "left": "truncate_left"}, "prompts are only shortened from the left here")(value, source)


def _filter(value: Any, source: Source) -> dict[str, Any]:
    return {"data.overlong_prompts": "skip"} if truth(value) else {}


def _validation(value: Any, source: Source) -> dict[str, Any]:
    if truth(value):
        return {"eval.temperature": source.number(f"{ROLLOUT}.val_kwargs.temperature"), "eval.greedy": False}
    return {"eval.temperature": 0.0, "eval.n": 1, "eval.greedy": False}


def _overlong_length(value: Any, source: Source) -> int:
    return int(value) if truth(source["reward_model.overlong_buffer.enable"]) else 0


def _loss_mode(source: Source) -> str:
    """What decides the policy loss in verl: in bypass mode it overwrites loss_mode with that mode's own loss_type."""
    if not bypasses(source):
        return str(source[f"{ACTOR}.policy_loss.loss_mode"])
    return {"ppo_clip": "vanilla", "reinforce": "gpg"}.get(source[f"{CORRECTION}.loss_type"], "unknown")


def _loss(value: Any, source: Source) -> dict[str, Any]:
    return choice(LOSS_MODES, "no such policy loss here")(_loss_mode(source), source)


def _aggregation(value: Any, source: Source) -> Any:
    ours = choice(AGGREGATION)(value, source)
    if _loss_mode(source) != "gspo" or ours == "seq-mean-token-mean":
        return ours
    if truth(source[f"{ACTOR}.use_kl_loss"]) or source.number(f"{ACTOR}.entropy_coeff"):
        raise CannotCarry("verl's gspo takes seq-mean-token-mean and this one for KL and entropy; here one serves all three")
    return {}


def _scale_factor(value: Any, source: Source) -> dict[str, Any]:
    if value is None or source[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return {}
    if source.number(f"{ACTOR}.loss_scale_factor") != source.number("data.max_response_length"):
        raise CannotCarry(
            "seq-mean-token-sum-norm divides by rollout.max_response_length here; the whole gradient has another scale"
        )
    return {}


_PER_GPU = (
    "this limit on padded rectangles becomes a limit on packed tokens; what a micro-batch holds does not change the loss here"
)
_NO_FILES = "records need a text field data.answer_key; verl has the answer nested in reward_model.ground_truth"

ALGORITHM = (
    becomes(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        choice(ESTIMATORS, "no such estimator here (no critic)"),
        "grpo_vectorized: grpo, rloo_vectorized: rloo; gpg has another alpha; a group of one has the advantage 0 here",
        default="gae",
    ),
    becomes("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", flag, default=True),
    becomes("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", flag, default=False),
    same("algorithm.kl_penalty", "algorithm.kl_penalty", default="kl"),
    same("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type", default="fixed"),
    same("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef", default=0.001),
    same("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl", default=0.1),
    same("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.horizon", default=10000),
    becomes("algorithm.gamma", (), only((1, 1.0), "advantages here are not discounted"), "only 1"),
    becomes("algorithm.lam", (), only((1, 1.0), "there is no critic here"), "only 1"),
    dropped(
        "algorithm.filter_groups.*", "groups are filtered by algorithm.filters; new prompts are not drawn for those that go"
    ),
    *ROLLOUT_CORRECTION,
)

LOSS = (
    becomes(
        f"{ACTOR}.clip_ratio",
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        _clip,
        "the files verl ships set clip_ratio_low and clip_ratio_high to 0.2 themselves, and those win: set alone, clip_ratio may "
        "have had no effect there",
    ),
    same(f"{ACTOR}.clip_ratio_low", "algorithm.clip_ratio_low", default=0.2),
    same(f"{ACTOR}.clip_ratio_high", "algorithm.clip_ratio_high", default=0.2),
    becomes(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.clip_ratio_c",
        lambda value, source: value if _loss_mode(source) == "vanilla" else None,
        "verl always applies dual clip; here null, the default, is off",
        default=3.0,
    ),
    becomes(
        f"{ACTOR}.policy_loss.loss_mode",
        ("algorithm.surrogate", "algorithm.ratio_level", "algorithm.loss_agg_mode"),
        _loss,
        "vanilla: clip of the token's ratio; gspo: clip of the sequence's, with seq-mean-token-mean whatever loss_agg_mode says; "
        "cispo; gpg: reinforce; bypass_mode puts its own loss_type in its place",
        default="vanilla",
    ),
    becomes(
        f"{ACTOR}.loss_agg_mode",
        "algorithm.loss_agg_mode",
        _aggregation,
        "the mean is over the whole optimizer step here, never over a micro-batch or a rank; gspo does not read it; before "
        "February 2026 verl's seq-mean-token-sum-norm was not divided by the number of trajectories",
        default="token-mean",
    ),
    becomes(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_loss", flag, default=False),
    same(f"{ACTOR}.kl_loss_coef", "algorithm.kl_loss_coef", default=0.001),
    same(
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl_loss_type",
        "the same names; full is computed here (the exact KL over the vocabulary)",
        default="low_var_kl",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coeff", default=0),
    dropped(f"{ACTOR}.policy_loss.*", "belongs to losses that are not here (clip-cov, kl-cov)"),
    becomes(
        f"{ACTOR}.loss_scale_factor",
        (),
        _scale_factor,
        "seq-mean-token-sum-norm divides by rollout.max_response_length here; not set, verl divides by the width of the padded "
        "response tensor",
    ),
)

BATCH = (
    same("data.train_batch_size", "data.train_batch_size", default=1024),
    same(
        f"{ACTOR}.ppo_mini_batch_size",
        "train.ppo_mini_batch_size",
        "prompts in both (verl multiplies by rollout.n itself); must divide data.train_batch_size here",
        default=256,
    ),
    same(f"{ACTOR}.ppo_epochs", "train.ppo_epochs", default=1),
    same(f"{ROLLOUT}.n", "rollout.n", default=1),
    becomes(f"{ACTOR}.use_dynamic_bsz", (), elsewhere, "micro-batches are always packed by tokens here", default=False),
    becomes(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "train.max_tokens_per_micro_batch",
        _micro_batch,
        _PER_GPU,
        unit="sequences per GPU -> tokens",
    ),
    becomes(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "train.max_tokens_per_micro_batch",
        _dynamic_tokens,
        "per CP rank in both; at least the longest sequence here",
    ),
    dropped(f"{ACTOR}.ppo_micro_batch_size", "deprecated there; use the one per GPU"),
    dropped(
        "*micro_batch_size*",
        "one partition into micro-batches serves every pass over a step (train.max_tokens_per_micro_batch)",
    ),
    dropped(
        "*max_token_len*", "one partition into micro-batches serves every pass over a step (train.max_tokens_per_micro_batch)"
    ),
    dropped("*log_prob_use_dynamic_bsz", "micro-batches are always packed by tokens here"),
    becomes(f"{ACTOR}.shuffle", (), only((False,), "the order within a step is that of the batch here"), "only false"),
)

DATA = (
    same("data.train_files", "data.train", _NO_FILES),
    same("data.val_files", "data.eval", _NO_FILES),
    same("data.prompt_key", "data.prompt_key", default="prompt"),
    same("data.max_prompt_length", "data.max_prompt_length", default=512),
    same("data.max_response_length", "rollout.max_response_length", default=512),
    becomes("data.truncation", "data.overlong_prompts", _truncation, "left: truncate_left", default="error"),
    becomes("data.filter_overlong_prompts", "data.overlong_prompts", _filter, "true: skip", default=False),
    becomes("data.shuffle", "data.shuffle", flag, default=True),
    becomes("data.seed", "run.seed", unless_null("run.seed")),
    dropped("data.reward_fn_key", "one reward function for all records here"),
    dropped("data.*", "no counterpart in how prompts are read"),
    dropped("reward_model.reward_manager", "set reward.function (and answer_from, response_from) by hand"),
    dropped(
        "custom_reward_function.*", "set reward.function=module:function; its arguments are prompt, response, answer, record"
    ),
    becomes(
        "reward_model.overlong_buffer.enable",
        (),
        elsewhere,
        "read with overlong_buffer.len",
        default=False,
    ),
    becomes("reward_model.overlong_buffer.len", "reward.overlong_buffer.length", _overlong_length),
    same("reward_model.overlong_buffer.penalty_factor", "reward.overlong_buffer.penalty"),
    dropped("reward_model.*", "no reward model is configured here; a reward function may call one"),
)

ENGINE = (
    same("actor_rollout_ref.model.path", "model.path"),
    same(f"{ROLLOUT}.temperature", "rollout.temperature", default=1.0),
    same(f"{ROLLOUT}.top_p", "rollout.top_p", "only 1: see rollout.top_k", default=1.0),
    becomes(
        f"{ROLLOUT}.top_k",
        "rollout.top_k",
        lambda value, source: value if 0 < value < 500_000 else -1,
        "only -1: log-probs would be of another distribution",
        default=-1,
    ),
    same(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.engine.tensor_parallel", default=2),
    same(f"{ROLLOUT}.gpu_memory_utilization", "rollout.engine.mem_fraction", default=0.5),
    same(f"{ROLLOUT}.max_num_seqs", "rollout.engine.max_running_requests", default=1024),
    same(f"{ROLLOUT}.dtype", "rollout.engine.dtype", default="bfloat16"),
    becomes(
        f"{ROLLOUT}.load_format",
        "rollout.engine.load_format",
        lambda value, source: "dummy" if str(value).startswith("dummy") else "auto",
        "dummy, dummy_megatron, …: dummy; all others: auto",
    ),
    becomes(f"{ROLLOUT}.name", (), only(("sglang",), "the engine is always SGLang here"), "only sglang"),
    same(f"{ROLLOUT}.val_kwargs.n", "eval.n", default=1),
    same(f"{ROLLOUT}.val_kwargs.top_p", "eval.top_p", default=1.0),
    becomes(f"{ROLLOUT}.val_kwargs.temperature", "eval.temperature", elsewhere, "read with do_sample", default=0),
    becomes(
        f"{ROLLOUT}.val_kwargs.do_sample",
        ("eval.temperature", "eval.n", "eval.greedy"),
        _validation,
        "false: greedy, one sample",
        default=False,
    ),
    dropped(f"{ROLLOUT}.*", "has no counterpart: how the engine is run is decided here"),
    dropped("actor_rollout_ref.hybrid_engine", "always true in verl's GRPO; here cluster.placement"),
)

VERL = System("verl", ALGORITHM + LOSS + BATCH + DATA + ENGINE + TRAINER)

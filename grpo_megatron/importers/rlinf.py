"""RLinf's keys (the YAML of its reasoning tasks) and ours."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Source,
    System,
    becomes,
    choice,
    dropped,
    elsewhere,
    every,
    flag,
    only,
    same,
    total_steps,
    truth,
    unless_null,
)

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


def _estimator(value: Any, source: Source) -> str:
    if value == "reinpp" and truth(source["algorithm.use_reinpp_baseline"]):
        return "reinforce_plus_plus_baseline"
    return choice(ESTIMATORS, "no such estimator here (no critic, no simulated environments)")(value, source)


def _whiten(value: Any, source: Source) -> dict[str, Any]:
    # REINFORCE++ whitens by itself, there as here.
    return {} if source["algorithm.adv_type"] == "reinpp" else {"algorithm.adv_whiten": truth(value)}


def _clip(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.clip_ratio_low": value, "algorithm.clip_ratio_high": value}


def _kl_in_loss(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value} if value else {"algorithm.use_kl_loss": False}


def _kl_in_reward(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value} if value else {}


def _kl_type(value: Any, source: Source) -> dict[str, Any]:
    return {"algorithm.kl_loss_type": value} | ({"algorithm.kl_penalty": value} if source["algorithm.reinpp_kl_beta"] else {})


def _entropy(value: Any, source: Source) -> float:
    return value if truth(source["algorithm.calculate_entropy"]) else 0.0


def _token_scale(value: Any, source: Source) -> dict[str, Any]:
    if truth(value) and source["algorithm.loss_agg_func"] != "token-mean":
        raise CannotCarry("a weight of micro-batches by their tokens; only with token-mean is that a mean over the whole step")
    return {}


def _mini_batch(value: Any, source: Source) -> int:
    prompts = source.number("data.rollout_batch_size")
    if prompts % int(value):
        raise CannotCarry(f"data.rollout_batch_size={prompts} is not divisible by it")
    return prompts // int(value)


def _global_batch(value: Any, source: Source) -> int:
    group = source.number("algorithm.group_size")
    if int(value) % group:
        raise CannotCarry(f"is no multiple of algorithm.group_size={group}, and a mini-batch holds whole groups here")
    return int(value) // group


def _correction(value: Any, source: Source) -> dict[str, Any]:
    if not truth(value):
        return {}
    return {"mismatch.correction": "tis", "mismatch.ratio_high": source.number("algorithm.importance_sampling_clip")}


def _response_length(value: Any, source: Source) -> int:
    return source.number("runner.seq_length") - source.number("data.max_prompt_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("means nothing to RLinf without runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": max(int(value), int(source.number("runner.seq_length")))}


def _micro_batch(value: Any, source: Source) -> dict[str, Any]:
    if truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("means nothing to RLinf with runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": int(value) * source.number("runner.seq_length")}


def _greedy(value: Any, source: Source) -> dict[str, Any]:
    if truth(value):
        raise CannotCarry("training samples are never greedy here")
    return {}


def _sampled(value: Any, source: Source) -> dict[str, Any]:
    return _greedy(not truth(value), source)


def _paths(value: Any, source: Source) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _precision(value: Any, source: Source) -> str:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "32": "fp32"}
    return choice(names, "there is no fp16 training here; bf16 is the default")(value, source)


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MODEL}.tensor_model_parallel_size") > 1


_DENOMINATOR = "the mean is over the whole optimizer step here, never over a micro-batch or a rank"

ALGORITHM = (
    becomes("algorithm.adv_type", "algorithm.adv_estimator", _estimator, "reinpp: reinforce_plus_plus"),
    becomes("algorithm.use_reinpp_baseline", (), elsewhere, "read with adv_type", default=False),
    becomes(
        "algorithm.loss_type",
        ("algorithm.surrogate", "algorithm.ratio_level"),
        choice(LOSSES, "no such policy loss here (no critic)"),
        "actor, grpo, ppo: clip of the token's ratio; gspo: of the sequence's",
    ),
    becomes("algorithm.loss_agg_func", "algorithm.loss_agg_mode", choice(AGGREGATION), _DENOMINATOR, default="token-mean"),
    same("algorithm.group_size", "rollout.n"),
    becomes(
        "algorithm.kl_beta",
        ("algorithm.use_kl_loss", "algorithm.kl_loss_coef"),
        _kl_in_loss,
        "0 is use_kl_loss=false; its documentation speaks of the reward, its actors add it to the loss",
        default=0.0,
    ),
    becomes(
        "algorithm.reinpp_kl_beta", ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"), _kl_in_reward, default=0.0
    ),
    becomes(
        "algorithm.kl_penalty_type",
        ("algorithm.kl_loss_type", "algorithm.kl_penalty"),
        _kl_type,
        "the same names; k3 is limited to 10 there, here only the log-ratio to 20; the FSDP actor swaps policy and reference in the "
        "loss, so that k1 has the other sign and k3 is another function: see above",
    ),
    same("algorithm.kl_penalty", "algorithm.kl_loss_type", "the older name of kl_penalty_type"),
    becomes("algorithm.ratio_clip_eps", ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"), _clip, default=0.2),
    becomes(
        "algorithm.clip_ratio_low", "algorithm.clip_ratio_low", unless_null("algorithm.clip_ratio_low"), "null: ratio_clip_eps"
    ),
    becomes(
        "algorithm.clip_ratio_high",
        "algorithm.clip_ratio_high",
        unless_null("algorithm.clip_ratio_high"),
        "null: ratio_clip_eps",
    ),
    same("algorithm.clip_ratio_c", "algorithm.clip_ratio_c", default=3.0),
    becomes(
        "algorithm.calculate_entropy",
        (),
        elsewhere,
        "the entropy is always measured here; read with entropy_bonus",
        default=False,
    ),
    becomes(
        "algorithm.entropy_bonus",
        "algorithm.entropy_coeff",
        _entropy,
        "without calculate_entropy it has no effect there",
        default=0.0,
    ),
    becomes(
        "algorithm.normalize_advantages",
        "algorithm.adv_whiten",
        _whiten,
        "beside the group's own normalisation, in both; reinpp whitens anyway",
        default=False,
    ),
    same(
        "algorithm.early_stop_imp_ratio",
        "algorithm.early_stop_imp_ratio",
        "drops the whole optimizer step here, there the loss of a micro-batch",
        default=5.0,
    ),
    becomes(
        "algorithm.use_valid_token_scale",
        ("algorithm.loss_agg_mode",),
        _token_scale,
        "its documentation speaks of advantages divided by the token count, its actors turn the mean of each micro-batch into the mean "
        "over the step, which token-mean always is here; algorithm.use_valid_token_scale is the former, literally, and stays false",
        default=False,
    ),
    becomes(
        "algorithm.importance_sampling_fix",
        ("mismatch.correction", "mismatch.ratio_high"),
        _correction,
        "tis; the importance_sampling_clip of its first versions was a lower limit of the ratio",
        default=False,
    ),
    becomes("algorithm.importance_sampling_clip", (), elsewhere, "read with importance_sampling_fix"),
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
    becomes("algorithm.shuffle_rollout", (), only((False,), "the order within a step is that of the batch here"), "only false"),
    same("algorithm.sampling_params.temperature", "rollout.temperature", default=1.0),
    same("algorithm.sampling_params.top_p", "rollout.top_p", "only 1: see rollout.top_k"),
    becomes(
        "algorithm.sampling_params.top_k",
        "rollout.top_k",
        lambda value, source: value if 0 < value < 500_000 else -1,
        "a number above any vocabulary is -1 (off)",
    ),
    becomes(
        "algorithm.sampling_params.max_new_tokens",
        "rollout.max_response_length",
        lambda value, source: value,
        "seq_length - max_prompt_length if not set",
    ),
    becomes("algorithm.sampling_params.use_greedy", (), _greedy, "only false"),
    becomes("algorithm.sampling_params.do_sample", (), _sampled, "only true"),
    becomes("algorithm.sampling_params.repetition_penalty", (), only((1, 1.0), "would be another distribution"), "only 1"),
    dropped("algorithm.sampling_params.min_new_tokens", "no lower limit of a response here"),
    becomes(
        "algorithm.training_batch_size_per_gpu",
        "train.max_tokens_per_micro_batch",
        _micro_batch,
        "a limit on padded sequences becomes one on packed tokens",
        unit="sequences per GPU -> tokens",
    ),
    dropped(
        "*micro_batch_size*",
        "one partition into micro-batches serves every pass over a step (train.max_tokens_per_micro_batch)",
    ),
    dropped(
        "algorithm.*batch_size_per_gpu",
        "the engine forms its own batches: rollout.max_concurrency, rollout.engine.max_running_requests",
    ),
    dropped("algorithm.len_reward_penalty", "another form of length penalty: see reward.overlong_buffer"),
    dropped("algorithm.safe_length", "see reward.overlong_buffer.length: that many tokens before rollout.max_response_length"),
    dropped("algorithm.*_length", "see reward.overlong_buffer"),
    dropped("algorithm.max_resample", "new prompts are not drawn for filtered groups"),
)

RUN = (
    becomes(
        "runner.seq_length",
        "rollout.max_response_length",
        _response_length,
        unit="tokens of prompt and response -> tokens of the response",
    ),
    becomes("runner.enable_dynamic_batch_size", (), elsewhere, "micro-batches are always packed by tokens here", default=False),
    becomes("runner.max_tokens_per_mbs", "train.max_tokens_per_micro_batch", _dynamic_tokens),
    becomes("runner.max_steps", "run.total_steps", total_steps, "-1 there: by max_epochs"),
    dropped("runner.max_epochs", "a run is measured in steps: set run.total_steps to epochs * prompts / data.train_batch_size"),
    becomes("runner.val_check_interval", "eval.every", every("eval.every"), "-1 (never) is 0 here"),
    becomes("runner.save_interval", "checkpoint.every", every("checkpoint.every"), "-1 (never) is 0 here"),
    same("runner.experiment_name", "run.name"),
    becomes("runner.task_type", (), only(("reasoning", "math"), "only reasoning tasks are imported"), "only reasoning"),
    dropped("runner.resume_dir", "their checkpoints are not ours: start from the model's HF form (model.path)"),
    dropped("runner.*", "not mapped; where a run writes is run.root, run.name"),
    same("data.rollout_batch_size", "data.train_batch_size", "prompts in both"),
    same("data.max_prompt_length", "data.max_prompt_length"),
    becomes(
        "data.filter_prompt_by_length",
        "data.overlong_prompts",
        lambda value, source: "skip" if truth(value) else "error",
        default=False,
    ),
    same("data.prompt_key", "data.prompt_key"),
    same("data.answer_key", "data.answer_key"),
    becomes("data.shuffle", "data.shuffle", flag),
    same("data.seed", "run.seed"),
    becomes("data.train_data_paths", "data.train", _paths),
    becomes("data.val_data_paths", "data.eval", _paths),
    dropped("data.apply_chat_template", "the chat template is always applied here"),
    dropped("data.*", "no counterpart in how prompts are read"),
    same("rollout.model_dir", "model.path"),
    same("rollout.model.model_path", "model.path"),
    same("rollout.gpu_memory_utilization", "rollout.engine.mem_fraction"),
    same("rollout.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    same("rollout.max_running_requests", "rollout.engine.max_running_requests"),
    becomes("rollout.rollout_backend", (), only(("sglang",), "the engine is always SGLang here"), "only sglang"),
    becomes(
        "rollout.recompute_logprobs", "train.old_logprobs", lambda value, source: "recompute" if truth(value) else "rollout"
    ),
    dropped("rollout.*", "how the engine is run is decided here"),
    dropped("reward.reward_type", "set reward.function (and answer_from, response_from) by hand"),
    dropped("reward.reward_scale", "scaling rewards changes nothing with algorithm.norm_adv_by_std_in_grpo"),
    dropped("reward.*", "set reward.function by hand"),
    dropped(
        "cluster.*", "set megatron.data_parallel and rollout.engine.num_engines for the GPUs you have, and cluster.placement"
    ),
    dropped("critic.*", "GRPO has no critic"),
    dropped("inference.*", "the trainer's own ranks compute log-probs"),
    dropped("hydra.*", "no counterpart"),
    dropped("defaults", "names base configurations that were not read; import those files too, if they are your own"),
)

ACTOR = (
    becomes(
        "actor.global_batch_size",
        "train.ppo_mini_batch_size",
        _global_batch,
        unit="samples per optimizer step -> prompts (divided by group_size)",
    ),
    same(f"{MODEL}.tensor_model_parallel_size", "megatron.tensor_parallel"),
    same(f"{MODEL}.pipeline_model_parallel_size", "megatron.pipeline_parallel"),
    same(f"{MODEL}.context_parallel_size", "megatron.context_parallel"),
    same(f"{MODEL}.expert_model_parallel_size", "megatron.expert_parallel"),
    becomes(f"{MODEL}.sequence_parallel", "megatron.sequence_parallel", _sequence_parallel, "needs TP > 1"),
    becomes(f"{MODEL}.precision", "megatron.precision", _precision),
    becomes(
        f"{MODEL}.recompute_granularity",
        "megatron.recompute",
        choice({"None": "none", "full": "full", "selective": "selective"}),
    ),
    dropped(f"{MODEL}.*", "read from the model's config.json, or decided here"),
    becomes("actor.offload_weight", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    becomes("actor.offload_optimizer", "optimizer.offload", flag),
    becomes("actor.offload_grad", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    same("actor.optim.lr", "optimizer.lr"),
    same("actor.optim.adam_beta1", "optimizer.beta1"),
    same("actor.optim.adam_beta2", "optimizer.beta2"),
    same("actor.optim.adam_eps", "optimizer.eps"),
    same("actor.optim.weight_decay", "optimizer.weight_decay"),
    same("actor.optim.clip_grad", "optimizer.clip_grad"),
    becomes("actor.optim.use_distributed_optimizer", "megatron.distributed_optimizer", flag),
    becomes("actor.optim.overlap_grad_reduce", "megatron.overlap", flag, "with the gathering of parameters"),
    dropped("actor.optim.*", "no counterpart in the optimizer section"),
    becomes("actor.lr_sched.lr_warmup_iters", "optimizer.lr_warmup_steps", lambda value, source: int(value)),
    becomes(
        "actor.lr_sched.lr_decay_style",
        "optimizer.lr_schedule",
        choice({"constant": "constant", "cosine": "cosine", "linear": "linear"}),
    ),
    dropped(
        "actor.lr_sched.*", "set optimizer.lr_min, lr_decay_steps and lr_warmup_steps by hand if the schedule is not constant"
    ),
    dropped("actor.tokenizer.*", "the tokenizer is that of model.path"),
    same("actor.seed", "run.seed"),
    dropped("actor.*", "no counterpart"),
)

RLINF = System("RLinf", ALGORITHM + RUN + ACTOR)

"""Mapping of RLinf's keys to ours: run, data, rollout and trainer.

RLinf's settings are the YAML of one of its reasoning tasks.
"""

import re
from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Convert,
    Finding,
    Source,
    System,
    becomes,
    choice,
    dropped,
    elsewhere,
    epochs,
    every,
    flag,
    only,
    room_for,
    run_name,
    same,
    total_steps,
    trains,
    truth,
    unless_null,
)
from grpo_megatron.importers.rlinf_algorithm import ALGORITHM, MEMORY, MODEL, PENALTIES
from grpo_megatron.importers.sources import Settings

_NO_FP16 = "there is no fp16 training here; bf16 is the default"


def _paths(value: Any, source: Source) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _precision(value: Any, source: Source) -> str:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "32": "fp32"}
    return choice(names, _NO_FP16)(value, source)


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MODEL}.tensor_model_parallel_size") > 1


def _template(value: Any, source: Source) -> str:
    return "tokenizer" if truth(value) else "none"


def _template_arguments(value: Any, source: Source) -> dict[str, Any]:
    return {"data.chat_template_args": source.below("data.apply_chat_template_kwargs")}


def _model_of_the_actor(value: Any, source: Source) -> dict[str, Any]:
    """Return the model's folder. Raises CannotCarry if the rollout names another one."""
    named = source["rollout.model.model_path"] or source["rollout.model_dir"]
    if named not in (None, value):
        raise CannotCarry(f"the rollout has another one ({named}), and one model serves both here")
    return {"model.path": value} if value is not None else {}


def _engine_experts(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"rollout.engine.expert_parallel": source.count("rollout.tensor_parallel_size")}
        if truth(value)
        else {}
    )


def _checkpointing(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"megatron.recompute": "full"}
        if truth(value) and f"{MODEL}.recompute_granularity" not in source
        else {}
    )


def _wsd(ours: str) -> Convert:
    """Return a converter for a key that has an effect only with the WSD schedule."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        return {ours: value} if value is not None and source["actor.lr_sched.lr_decay_style"] == "WSD" else {}

    return convert


def _resume(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    raise CannotCarry("their checkpoints are not ours: start from the model's HF form (model.path)")


def _global_batch(value: Any, source: Source) -> int:
    group = source.number("algorithm.group_size")
    if int(value) % group:
        raise CannotCarry(
            f"is no multiple of algorithm.group_size={group}, and a mini-batch holds whole groups here"
        )
    return int(value) // group


def _response_length(value: Any, source: Source) -> int:
    return source.number("runner.seq_length") - source.number("data.max_prompt_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("means nothing to RLinf without runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": max(int(value), int(source.number("runner.seq_length")))}


def _unless_constant(ours: str) -> Convert:
    """Return a converter for a key that has no effect with a constant schedule."""

    def convert(value: Any, source: Source) -> dict[str, Any]:
        constant = source["actor.lr_sched.lr_decay_style"] in (None, "constant")
        return {} if constant or value is None else {ours: value}

    return convert


def _warmup_fraction(value: Any, source: Source) -> dict[str, Any]:
    if value in (None, 0):
        return {}
    raise CannotCarry("a share of a schedule's length: give optimizer.lr_warmup_steps")


RUN = (
    becomes(
        "runner.seq_length",
        "rollout.max_response_length",
        _response_length,
        unit="tokens of prompt and response -> tokens of the response",
    ),
    becomes(
        "runner.enable_dynamic_batch_size",
        "train.max_tokens_per_micro_batch",
        room_for(lambda source: source.number("runner.seq_length")),
        "micro-batches are always packed by tokens here, at least as many as the longest sequence has",
        default=False,
    ),
    becomes("runner.max_tokens_per_mbs", "train.max_tokens_per_micro_batch", _dynamic_tokens),
    *trains(
        becomes("runner.max_steps", "run.total_steps", total_steps, "-1 there: by max_epochs"),
        becomes(
            "runner.max_epochs", "run.total_steps", epochs("runner.max_steps"), "read unless max_steps is set"
        ),
        becomes("runner.resume_dir", "run.resume", _resume, "only null"),
    ),
    becomes("runner.val_check_interval", "eval.every", every("eval.every"), "-1 (never) is 0 here"),
    becomes("runner.save_interval", "checkpoint.every", every("checkpoint.every"), "-1 (never) is 0 here"),
    becomes("runner.experiment_name", "run.name", run_name, "a slash becomes a dash"),
    becomes("runner.task_type", (), elsewhere, "only reasoning tasks are imported"),
    becomes(
        "runner.logger.project_name",
        "monitor.wandb_project",
        run_name,
        "read only with monitor.listeners=[wandb]",
    ),
    dropped(
        "runner.logger.*",
        "metrics go to TensorBoard and metrics.jsonl, and with monitor.listeners=[wandb] to Weights & Biases",
    ),
    dropped("runner.output_dir", "where a run writes is run.root, run.name"),
    dropped("runner.*", "no counterpart in how a run is done"),
    *trains(
        same("data.rollout_batch_size", "data.train_batch_size", "prompts in both"),
        same("data.max_prompt_length", "data.max_prompt_length"),
    ),
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
    *trains(
        same("data.system_prompt", "data.system_prompt"),
        becomes("data.use_chat_template", "data.chat_template", _template, "false: none"),
        becomes("data.apply_chat_template_kwargs.*", "data.chat_template_args", _template_arguments),
        becomes(
            "rollout.custom_chat_template",
            "data.chat_template",
            only((None,), "write it to a file and give data.chat_template=FILE"),
            "only null",
        ),
    ),
    dropped("data.*", "no counterpart in how prompts are read"),
    *trains(same("rollout.model_dir", "model.path"), same("rollout.model.model_path", "model.path")),
    same("rollout.gpu_memory_utilization", "rollout.engine.mem_fraction"),
    same("rollout.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    same("rollout.max_running_requests", "rollout.engine.max_running_requests"),
    becomes(
        "rollout.rollout_backend",
        (),
        only(("sglang",), "the engine is always SGLang here"),
        "any engine there is SGLang here",
    ),
    becomes(
        "rollout.recompute_logprobs",
        "train.old_logprobs",
        lambda value, source: "recompute" if truth(value) else "rollout",
    ),
    becomes(
        "rollout.model.precision",
        "rollout.engine.dtype",
        choice({"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "32": "float32"}, _NO_FP16),
    ),
    same("rollout.vllm.enable_prefix_caching", "rollout.engine.prefix_cache"),
    becomes(
        "rollout.pipeline_parallel_size",
        (),
        only((1, None), "an engine has no pipeline stages here"),
        "only 1",
    ),
    becomes(
        "rollout.sglang.enable_ep_moe",
        "rollout.engine.expert_parallel",
        _engine_experts,
        "true: as many parts as TP ranks",
    ),
    dropped("rollout.seed", "one seed for all: run.seed"),
    dropped("rollout.return_logprobs", "the engine's log-probs are always recorded here"),
    dropped("rollout.validate_weight*", "see weight_sync.probe_every"),
    dropped("rollout.*", "no counterpart among the options of the engine"),
    dropped("reward.*", "belongs to RLinf's own rewards: see reward.function and reward.args"),
    dropped(
        "cluster.*",
        "set megatron.data_parallel and rollout.engine.num_engines for the GPUs "
        "you have, and cluster.placement",
    ),
    dropped("critic.*", "GRPO has no critic"),
    dropped("inference.*", "the trainer's own ranks compute log-probs"),
    dropped("hydra.*", "no counterpart"),
    becomes("defaults", (), elsewhere, "names base configurations that are not read"),
)

ACTOR = (
    *trains(
        becomes(
            "actor.global_batch_size",
            "train.ppo_mini_batch_size",
            _global_batch,
            unit="samples per optimizer step -> prompts (divided by group_size)",
        ),
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
    same(f"{MODEL}.recompute_modules", "megatron.recompute_modules"),
    same(f"{MODEL}.expert_tensor_parallel_size", "megatron.expert_tensor_parallel"),
    becomes(
        f"{MODEL}.virtual_pipeline_model_parallel_size",
        "megatron.virtual_pipeline",
        unless_null("megatron.virtual_pipeline"),
    ),
    *trains(
        same(f"{MODEL}.moe_aux_loss_coeff", "moe.aux_loss_coeff"),
        same(f"{MODEL}.moe_z_loss_coeff", "moe.z_loss_coeff"),
        becomes(
            f"{MODEL}.model_path",
            "model.path",
            _model_of_the_actor,
            "only that of the rollout, if both are set",
        ),
    ),
    dropped(f"{MODEL}.*", "no counterpart: the layers are Megatron's as the model's config.json has them"),
    becomes("actor.fsdp_config.gradient_checkpointing", "megatron.recompute", _checkpointing, "true: full"),
    *trains(
        becomes(
            "actor.fsdp_config.mixed_precision.param_dtype",
            "megatron.precision",
            only(("bf16", "bfloat16", None), _NO_FP16),
            "only bf16",
        ),
    ),
    dropped("actor.fsdp_config.*", "the trainer is Megatron: see the megatron section"),
    becomes(
        "actor.megatron.distributed_timeout_minutes",
        "megatron.collective_timeout",
        lambda value, source: 60 * value,
        unit="minutes -> seconds",
    ),
    dropped("actor.megatron.*", "no counterpart in how Megatron is run"),
    becomes("actor.enable_offload", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    dropped("actor.enable_dp_load_balance", "samples are always shared among ranks by their tokens here"),
    dropped("actor.training_backend", "the trainer is Megatron"),
    becomes("actor.offload_weight", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    becomes("actor.offload_optimizer", "optimizer.offload", flag),
    becomes("actor.offload_grad", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    *trains(
        same("actor.optim.lr", "optimizer.lr"),
        same("actor.optim.adam_beta1", "optimizer.beta1"),
        same("actor.optim.adam_beta2", "optimizer.beta2"),
        same("actor.optim.adam_eps", "optimizer.eps"),
        same("actor.optim.weight_decay", "optimizer.weight_decay"),
        same("actor.optim.clip_grad", "optimizer.clip_grad"),
    ),
    becomes("actor.optim.use_distributed_optimizer", "megatron.distributed_optimizer", flag),
    becomes("actor.optim.overlap_grad_reduce", "megatron.overlap", flag, "with the gathering of parameters"),
    becomes("actor.optim.overlap_param_gather", "megatron.overlap", flag, "with the reduction of gradients"),
    becomes("actor.optim.optimizer_cpu_offload", "optimizer.offload", flag),
    dropped("actor.optim.overlap_*", "see megatron.overlap"),
    dropped("actor.optim.optimizer_enable_pin", "see optimizer.offload"),
    dropped("actor.optim.use_precision_aware_optimizer", "moments and main weights are float32 here"),
    dropped("actor.optim.*loss_scale*", "belongs to fp16; bf16 needs no loss scale"),
    becomes("actor.optim.bf16", (), elsewhere, "read with actor.model.precision"),
    *trains(
        becomes("actor.optim.fp16", "megatron.precision", only((False, None), _NO_FP16), "only false"),
        becomes(
            "actor.optim.optimizer",
            (),
            only(("adam", "adamw", None), "the optimizer is AdamW here"),
            "only adam",
        ),
        becomes("actor.optim.min_lr", "optimizer.lr_min", _unless_constant("optimizer.lr_min")),
        dropped("actor.optim.*", "no counterpart in the optimizer section"),
        becomes("actor.lr_sched.lr_warmup_init", (), only((0, None), "a warm-up begins at 0 here"), "only 0"),
        becomes(
            "actor.lr_sched.lr_wsd_decay_iters",
            "optimizer.wsd_decay_steps",
            _wsd("optimizer.wsd_decay_steps"),
        ),
        becomes(
            "actor.lr_sched.lr_wsd_decay_style",
            "optimizer.wsd_decay_style",
            _wsd("optimizer.wsd_decay_style"),
        ),
        same("actor.lr_sched.lr_warmup_iters", "optimizer.lr_warmup_steps"),
        becomes("actor.lr_sched.lr_warmup_fraction", "optimizer.lr_warmup_steps", _warmup_fraction, "only 0"),
        becomes(
            "actor.lr_sched.lr_decay_style",
            "optimizer.lr_schedule",
            choice({"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd"}),
        ),
        becomes(
            "actor.lr_sched.lr_decay_iters",
            "optimizer.lr_decay_steps",
            _unless_constant("optimizer.lr_decay_steps"),
        ),
        becomes("actor.lr_sched.min_lr", "optimizer.lr_min", _unless_constant("optimizer.lr_min")),
    ),
    dropped("actor.lr_sched.max_lr", "the peak is optimizer.lr"),
    *trains(
        becomes(
            "actor.lr_sched.weight_decay_incr_style",
            (),
            only(("constant", None), "weight decay is constant here"),
            "only constant",
        ),
    ),
    dropped("actor.lr_sched.*", "no counterpart in the schedule of the rate"),
    dropped("actor.tokenizer.*", "the tokenizer is that of model.path"),
    same("actor.seed", "run.seed"),
    dropped("actor.*", "no counterpart"),
)


def _refusal(source: Source, settings: Settings) -> str | None:
    task = settings.values.get("runner.task_type")
    if task in (None, "reasoning", "math"):
        return None
    return (
        f"runner.task_type={task}: only RLinf's reasoning tasks are imported, runs that train a "
        "language model on text with RL"
    )


def _findings(source: Source, settings: Settings) -> list[Finding]:
    """Return the differences in what is trained that follow from several keys."""
    found = []
    for key in ("rollout.model.model_type", f"{MODEL}.model_type"):
        value = settings.values.get(key)
        if isinstance(value, str) and re.search(r"(?i)(?<![a-z])(vl|vla|vlm|omni)(?![a-z])", value):
            found.append(Finding(f"{key}={value}: a model for images; only text is trained here"))
    bases = settings.values.get("defaults")
    for base in bases if isinstance(bases, list) else []:
        name = str(base)
        if isinstance(base, dict):
            name = ", ".join(f"{part}={value}" for part, value in base.items())
        # The base file of a training engine changes how things are computed, not what is trained. `_self_` is
        # the file itself.
        if not re.match(r"override hydra/|_self_|.*(hybrid_engines|training_backend)/", name):
            found.append(
                Finding(
                    f"defaults: {name}: a base configuration that was not read; put its settings into the "
                    "file"
                )
            )
    if "reward.reward_type" not in settings.values:
        found.append(Finding("reward: none is named; give reward.function", ("reward.function",)))
    if not {"runner.max_epochs", "runner.max_steps"} & settings.values.keys():
        found.append(
            Finding("run.total_steps: how long the run is, is not said; give it", ("run.total_steps",))
        )
    return found


RLINF = System("RLinf", ALGORITHM + MEMORY + PENALTIES + RUN + ACTOR, _findings, _refusal)

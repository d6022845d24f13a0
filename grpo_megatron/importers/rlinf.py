"""RLinf's keys (the YAML of its reasoning tasks) and ours."""

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
)
from grpo_megatron.importers.rlinf_algorithm import ALGORITHM, MEMORY, MODEL, PENALTIES
from grpo_megatron.importers.sources import Settings


def _paths(value: Any, source: Source) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _precision(value: Any, source: Source) -> str:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "32": "fp32"}
    return choice(names, "there is no fp16 training here; bf16 is the default")(value, source)


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MODEL}.tensor_model_parallel_size") > 1


def _resume(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    raise CannotCarry("their checkpoints are not ours: start from the model's HF form (model.path)")


def _global_batch(value: Any, source: Source) -> int:
    group = source.number("algorithm.group_size")
    if int(value) % group:
        raise CannotCarry(f"is no multiple of algorithm.group_size={group}, and a mini-batch holds whole groups here")
    return int(value) // group


def _response_length(value: Any, source: Source) -> int:
    return source.number("runner.seq_length") - source.number("data.max_prompt_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source["runner.enable_dynamic_batch_size"]):
        raise CannotCarry("means nothing to RLinf without runner.enable_dynamic_batch_size")
    return {"train.max_tokens_per_micro_batch": max(int(value), int(source.number("runner.seq_length")))}


def _unless_constant(ours: str) -> Convert:
    """For what only a schedule that is not constant has."""

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
        becomes("runner.max_epochs", "run.total_steps", epochs("runner.max_steps"), "read unless max_steps is set"),
        becomes("runner.resume_dir", "run.resume", _resume, "only null"),
    ),
    becomes("runner.val_check_interval", "eval.every", every("eval.every"), "-1 (never) is 0 here"),
    becomes("runner.save_interval", "checkpoint.every", every("checkpoint.every"), "-1 (never) is 0 here"),
    becomes("runner.experiment_name", "run.name", run_name, "a slash becomes a dash"),
    becomes("runner.task_type", (), elsewhere, "only reasoning tasks are imported"),
    dropped("runner.*", "not mapped; where a run writes is run.root, run.name"),
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
    dropped("data.*", "no counterpart in how prompts are read"),
    *trains(same("rollout.model_dir", "model.path"), same("rollout.model.model_path", "model.path")),
    same("rollout.gpu_memory_utilization", "rollout.engine.mem_fraction"),
    same("rollout.tensor_parallel_size", "rollout.engine.tensor_parallel"),
    same("rollout.max_running_requests", "rollout.engine.max_running_requests"),
    becomes(
        "rollout.rollout_backend", (), only(("sglang",), "the engine is always SGLang here"), "any engine there is SGLang here"
    ),
    becomes(
        "rollout.recompute_logprobs", "train.old_logprobs", lambda value, source: "recompute" if truth(value) else "rollout"
    ),
    dropped("rollout.*", "how the engine is run is decided here"),
    dropped("reward.*", "belongs to how rewards are computed: see reward.workers"),
    dropped(
        "cluster.*", "set megatron.data_parallel and rollout.engine.num_engines for the GPUs you have, and cluster.placement"
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
    dropped(f"{MODEL}.*", "read from the model's config.json, or decided here"),
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
    dropped("actor.optim.*", "no counterpart in the optimizer section"),
    *trains(
        same("actor.lr_sched.lr_warmup_iters", "optimizer.lr_warmup_steps"),
        becomes("actor.lr_sched.lr_warmup_fraction", "optimizer.lr_warmup_steps", _warmup_fraction, "only 0"),
        becomes(
            "actor.lr_sched.lr_decay_style",
            "optimizer.lr_schedule",
            choice({"constant": "constant", "cosine": "cosine", "linear": "linear"}),
        ),
        becomes("actor.lr_sched.lr_decay_iters", "optimizer.lr_decay_steps", _unless_constant("optimizer.lr_decay_steps")),
        becomes("actor.lr_sched.min_lr", "optimizer.lr_min", _unless_constant("optimizer.lr_min")),
    ),
    dropped("actor.lr_sched.*", "the peak is optimizer.lr, the warm-up begins at 0"),
    dropped("actor.tokenizer.*", "the tokenizer is that of model.path"),
    same("actor.seed", "run.seed"),
    dropped("actor.*", "no counterpart"),
)


def _refusal(source: Source, settings: Settings) -> str | None:
    task = settings.values.get("runner.task_type")
    if task in (None, "reasoning", "math"):
        return None
    return (
        f"runner.task_type={task}: only RLinf's reasoning tasks are imported, runs that train a language model on text with RL"
    )


def _findings(source: Source, settings: Settings) -> list[Finding]:
    """What changes what is trained, across keys."""
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
        # Those of a training engine say how, not what; a file names itself as _self_.
        if not re.match(r"override hydra/|_self_|.*(hybrid_engines|training_backend)/", name):
            found.append(Finding(f"defaults: {name}: a base configuration that was not read; put its settings into the file"))
    if "reward.reward_type" not in settings.values:
        found.append(Finding("reward: none is named; give reward.function", ("reward.function",)))
    if not {"runner.max_epochs", "runner.max_steps"} & settings.values.keys():
        found.append(Finding("run.total_steps: how long the run is, is not said; give it", ("run.total_steps",)))
    return found


RLINF = System("RLinf", ALGORITHM + MEMORY + PENALTIES + RUN + ACTOR, _findings, _refusal)

"""verl's keys of the cluster, the Megatron layout and the optimizer, and ours."""

from typing import Any

from grpo_megatron.importers.mapping import (
    CannotCarry,
    Source,
    becomes,
    choice,
    dropped,
    elsewhere,
    epochs,
    every,
    flag,
    only,
    run_name,
    same,
    total_steps,
    trains,
    truth,
    unless_null,
)

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
OVERRIDE = f"{MEGATRON}.override_transformer_config"
SCHEDULES = {name: name for name in ("constant", "cosine", "linear")} | {"WSD": "wsd", "wsd": "wsd"}


def _gpus(value: Any, source: Source) -> dict[str, Any]:
    gpus = source.count("trainer.nnodes") * source.count("trainer.n_gpus_per_node")
    sizes = [source.count(f"{MEGATRON}.{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")]
    share = sizes[0] * sizes[1] * sizes[2]
    engine = source.count(f"{ROLLOUT}.tensor_model_parallel_size")
    if gpus % share or gpus % engine:
        raise CannotCarry(f"{gpus} GPUs are no multiple of TP * PP * CP = {share} and of the engine's TP = {engine}")
    return {
        "megatron.data_parallel": gpus // share,
        "rollout.engine.num_engines": gpus // engine,
        "cluster.placement": "colocated",
    }


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MEGATRON}.tensor_model_parallel_size") > 1


def _warmup_steps(value: Any, source: Source) -> dict[str, Any]:
    return {"optimizer.lr_warmup_steps": value} if value is not None and value > 0 else {}


def _warmup_ratio(value: Any, source: Source) -> dict[str, Any]:
    if not value or (source[f"{ACTOR}.optim.lr_warmup_steps"] or 0) > 0:
        return {}
    steps = source["trainer.total_training_steps"] or source[f"{ACTOR}.optim.total_training_steps"]
    if not isinstance(steps, int) or steps <= 0:
        raise CannotCarry("the number of steps is not known here: set optimizer.lr_warmup_steps to this share of it")
    return {"optimizer.lr_warmup_steps": int(value * steps)}


def _betas(value: Any, source: Source) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise CannotCarry("expected two numbers")
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


def _recompute(value: Any, source: Source) -> str:
    return choice({"None": "none", "full": "full", "selective": "selective"})(value, source)


def _checkpointing(value: Any, source: Source) -> dict[str, Any]:
    # verl's own switch for its FSDP actor; with Megatron the granularity decides.
    granularity = f"{OVERRIDE}.recompute_granularity"
    return {"megatron.recompute": "full"} if truth(value) and granularity not in source else {}


def _resume(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    raise CannotCarry("their checkpoints are not ours: convert the model, or start from its HF form (model.path)")


# Keys of the actor that change how it computes, not what.
_HOW = (
    "strategy",
    "use_torch_compile",
    "checkpoint.*",
    "profiler.*",
    "profile.*",
    "entropy_checkpointing",
    "entropy_from_logits_with_chunking",
    "use_prefix_grouper",
    "use_fused_kernels",
    "use_remove_padding",
)
_ADAPTER = "adapters are not carried over: give megatron.lora.* by hand, or the run is full fine-tuning of every weight"
_BY_HAND = "other than 0: give it and megatron.lora.alpha and targets by hand"

TRAINER = (
    becomes(
        "trainer.nnodes",
        ("megatron.data_parallel", "rollout.engine.num_engines", "cluster.placement"),
        _gpus,
        "the number of GPUs is derived there from nodes; here DP and engines are named",
        default=1,
        unit="nodes -> data-parallel replicas and engines",
    ),
    becomes(
        "trainer.n_gpus_per_node",
        ("megatron.data_parallel", "rollout.engine.num_engines", "cluster.placement"),
        _gpus,
        default=8,
        unit="GPUs per node -> data-parallel replicas and engines",
    ),
    *trains(
        becomes("trainer.total_training_steps", "run.total_steps", total_steps),
        becomes(
            "trainer.total_epochs",
            "run.total_steps",
            epochs("trainer.total_training_steps"),
            "with total_training_steps, verl stops at whichever comes first; here the steps decide",
            default=30,
        ),
        becomes("trainer.resume_from_path", "run.resume", _resume),
        becomes(f"{MODEL}.lora_rank", "megatron.lora.rank", only((0, None), _ADAPTER), _BY_HAND),
        becomes(f"{MODEL}.lora.rank", "megatron.lora.rank", only((0, None), _ADAPTER), _BY_HAND),
        becomes(f"{MODEL}.lora_adapter_path", (), only((None,), f"no run begins with an adapter; {_ADAPTER}"), "only null"),
        becomes(f"{MODEL}.mtp.enable_train", (), only((False,), "no loss on several tokens ahead"), "only false"),
        dropped(f"{MODEL}.override_config.*", "the model is what its config.json says: change it there"),
        becomes(f"{MODEL}.external_lib", (), only((None,), "the model is what its config.json says"), "only null"),
        becomes(
            f"{MODEL}.custom_chat_template", (), only((None,), "the template is the tokenizer's: change it there"), "only null"
        ),
        becomes(f"{MODEL}.tokenizer_path", (), only((None,), "the tokenizer is that of model.path"), "only null"),
        becomes(f"{ACTOR}.freeze_vision_tower", (), only((False,), "only text is trained here"), "only false"),
        same(
            f"{OVERRIDE}.moe_aux_loss_coeff",
            "moe.aux_loss_coeff",
            "verl switches load balancing off for some models; the coefficient has no effect there then",
        ),
        same(f"{OVERRIDE}.moe_z_loss_coeff", "moe.z_loss_coeff"),
        becomes("actor_rollout_ref.ref.model.path", "ref.path", unless_null("ref.path")),
    ),
    dropped(f"{MODEL}.lora*", "belongs to an adapter; see lora_rank"),
    dropped(f"{MODEL}.target_modules", "belongs to an adapter; see lora_rank"),
    dropped(f"{MODEL}.exclude_modules", "belongs to an adapter; see lora_rank"),
    becomes("trainer.experiment_name", "run.name", run_name, "a slash becomes a dash"),
    becomes("trainer.save_freq", "checkpoint.every", every("checkpoint.every"), "-1 (never) is 0 here", default=-1),
    becomes("trainer.test_freq", "eval.every", every("eval.every"), "-1 (never) is 0 here", default=-1),
    becomes("trainer.critic_warmup", (), only((0,), "there is no critic here"), "only 0"),
    dropped("trainer.resume_mode", "run.resume is auto, none, or the checkpoint to continue from"),
    dropped("trainer.logger", "metrics go to TensorBoard and metrics.jsonl"),
    dropped("trainer.*", "not mapped; where a run writes is run.root, run.name"),
    same(f"{MEGATRON}.tensor_model_parallel_size", "megatron.tensor_parallel", default=1),
    same(f"{MEGATRON}.pipeline_model_parallel_size", "megatron.pipeline_parallel", default=1),
    becomes(
        f"{MEGATRON}.virtual_pipeline_model_parallel_size",
        "megatron.virtual_pipeline",
        unless_null("megatron.virtual_pipeline"),
    ),
    same(f"{MEGATRON}.context_parallel_size", "megatron.context_parallel", default=1),
    same(f"{MEGATRON}.expert_model_parallel_size", "megatron.expert_parallel", default=1),
    becomes(
        f"{MEGATRON}.expert_tensor_parallel_size",
        "megatron.expert_tensor_parallel",
        unless_null("megatron.expert_tensor_parallel"),
    ),
    becomes(f"{MEGATRON}.sequence_parallel", "megatron.sequence_parallel", _sequence_parallel, "needs TP > 1", default=True),
    becomes(f"{MEGATRON}.use_distributed_optimizer", "megatron.distributed_optimizer", flag, default=True),
    becomes(f"{MEGATRON}.param_offload", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    becomes(f"{MEGATRON}.optimizer_offload", "optimizer.offload", flag),
    becomes("actor_rollout_ref.ref.megatron.param_offload", "ref.offload", flag),
    becomes(f"{OVERRIDE}.recompute_granularity", "megatron.recompute", _recompute),
    same(f"{OVERRIDE}.recompute_modules", "megatron.recompute_modules"),
    becomes("actor_rollout_ref.model.enable_gradient_checkpointing", "megatron.recompute", _checkpointing, "true: full"),
    becomes(f"{MEGATRON}.dtype", "megatron.precision", choice({"bfloat16": "bf16", "float32": "fp32"}), default="bfloat16"),
    dropped(f"{MEGATRON}.grad_offload", "follows from param_offload: megatron.sleep takes gradients along"),
    dropped(f"{MEGATRON}.*", "decided here, or read from the model's config.json"),
    becomes(f"{ACTOR}.fsdp_config.param_offload", "megatron.sleep", flag, "weights, gradients and optimizer together"),
    becomes(f"{ACTOR}.fsdp_config.optimizer_offload", "optimizer.offload", flag),
    becomes("actor_rollout_ref.ref.fsdp_config.param_offload", "ref.offload", flag),
    dropped(f"{ACTOR}.fsdp_config.*", "the trainer is Megatron: see the megatron section"),
    dropped(
        f"{ACTOR}.ulysses_sequence_parallel_size",
        "the trainer is Megatron: long sequences are split by megatron.context_parallel",
    ),
    *trains(
        same(f"{ACTOR}.optim.lr", "optimizer.lr", default=1e-6),
        becomes(f"{ACTOR}.optim.lr_warmup_steps", "optimizer.lr_warmup_steps", _warmup_steps, default=-1),
        becomes(
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            "optimizer.lr_warmup_steps",
            _warmup_ratio,
            unit="share of all steps -> optimizer steps",
            default=0.0,
        ),
        becomes(f"{ACTOR}.optim.lr_decay_style", "optimizer.lr_schedule", choice(SCHEDULES), default="constant"),
        becomes(f"{ACTOR}.optim.lr_scheduler_type", "optimizer.lr_schedule", choice(SCHEDULES)),
        becomes(f"{ACTOR}.optim.warmup_style", "optimizer.lr_schedule", choice(SCHEDULES)),
        becomes(f"{ACTOR}.optim.lr_decay_steps", "optimizer.lr_decay_steps", unless_null("optimizer.lr_decay_steps")),
        same(f"{ACTOR}.optim.min_lr", "optimizer.lr_min", default=0.0),
        same(f"{ACTOR}.optim.weight_decay", "optimizer.weight_decay", default=0.01),
        becomes(f"{ACTOR}.optim.betas", ("optimizer.beta1", "optimizer.beta2"), _betas, default=[0.9, 0.999]),
        same(f"{ACTOR}.optim.clip_grad", "optimizer.clip_grad", default=1.0),
        same(f"{ACTOR}.grad_clip", "optimizer.clip_grad"),
    ),
    becomes(f"{ACTOR}.optim.total_training_steps", (), elsewhere, "read with lr_warmup_steps_ratio", default=-1),
    becomes(
        f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
        "optimizer.offload",
        flag,
    ),
    dropped(f"{ACTOR}.optim.override_optimizer_config.*", "decided here"),
    *trains(dropped(f"{ACTOR}.optim.*", "no counterpart in the optimizer section")),
    *(dropped(f"{ACTOR}.{name}", "how the trainer runs is decided here") for name in _HOW),
    *trains(dropped(f"{ACTOR}.*", "no counterpart, and it may decide what is trained")),
    dropped("actor_rollout_ref.*", "no counterpart"),
    dropped("critic.*", "GRPO has no critic"),
    dropped("global_profiler.*", "no counterpart"),
    dropped("ray_kwargs.*", "cluster.ray_address names the Ray cluster"),
    dropped("ray_init.*", "cluster.ray_address names the Ray cluster"),
)

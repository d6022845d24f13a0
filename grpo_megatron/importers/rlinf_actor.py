"""Mapping of RLinf's keys to those of grpo_megatron: the trainer's model, layout and optimizer."""

from typing import Any

from grpo_megatron.importers.converters import absorbed, choice, fixed, flag, only_where, truth, unless_null
from grpo_megatron.importers.mapping import CannotCarry, Source, becomes, dropped, same, trains
from grpo_megatron.importers.rlinf_algorithm import MODEL

NO_FP16 = "there is no fp16 training here; bf16 is the default"


def _sequence_parallel(value: Any, source: Source) -> bool:
    return truth(value) and source.number(f"{MODEL}.tensor_model_parallel_size") > 1


def _model_of_the_actor(value: Any, source: Source) -> dict[str, Any]:
    """Convert the folder of RLinf's actor model to {"model.path": folder}, and null to {}: no key is set.

    Raises CannotCarry if RLinf's rollout engine has another model, because grpo_megatron uses one model for
    actor and engine.
    """
    named = source["rollout.model.model_path"] or source["rollout.model_dir"]
    if named not in (None, value):
        raise CannotCarry(f"the rollout uses a different model ({named}), but here both use the same one")
    return {"model.path": value} if value is not None else {}


def _checkpointing(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"megatron.recompute": "full"}
        if truth(value) and f"{MODEL}.recompute_granularity" not in source
        else {}
    )


def _is_wsd(source: Source) -> bool:
    return source["actor.lr_sched.lr_decay_style"] == "WSD"


def _global_batch(value: Any, source: Source) -> int:
    group = source.number("algorithm.group_size")
    if int(value) % group:
        raise CannotCarry(
            f"this is not a multiple of algorithm.group_size={group}, but a mini-batch here contains whole "
            "groups"
        )
    return int(value) // group


def _rate_decays(source: Source) -> bool:
    return source["actor.lr_sched.lr_decay_style"] not in (None, "constant")


def _warmup_fraction(value: Any, source: Source) -> dict[str, Any]:
    if value in (None, 0):
        return {}
    raise CannotCarry("this is a share of the schedule's length; set optimizer.lr_warmup_steps")


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
    becomes(
        f"{MODEL}.precision",
        "megatron.precision",
        choice({"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "32": "fp32"}, NO_FP16),
    ),
    becomes(
        f"{MODEL}.recompute_granularity",
        "megatron.recompute",
        choice({"None": "none", "full": "full", "selective": "selective"}),
    ),
    same(f"{MODEL}.recompute_modules", "megatron.recompute_modules"),
    same(f"{MODEL}.expert_tensor_parallel_size", "megatron.expert_tensor_parallel"),
    becomes(f"{MODEL}.virtual_pipeline_model_parallel_size", "megatron.virtual_pipeline", unless_null),
    *trains(
        same(f"{MODEL}.moe_aux_loss_coeff", "moe.aux_loss_coeff"),
        same(f"{MODEL}.moe_z_loss_coeff", "moe.z_loss_coeff"),
        becomes(
            f"{MODEL}.model_path",
            "model.path",
            _model_of_the_actor,
            "only the model of the rollout, if both are set",
        ),
    ),
    dropped(f"{MODEL}.*", "no counterpart: the layers are Megatron's as the model's config.json has them"),
    becomes("actor.fsdp_config.gradient_checkpointing", "megatron.recompute", _checkpointing, "true: full"),
    *trains(
        fixed(
            "actor.fsdp_config.mixed_precision.param_dtype",
            ("bf16", "bfloat16", None),
            NO_FP16,
            "megatron.precision",
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
    becomes(
        "actor.enable_offload",
        "megatron.sleep",
        flag,
        "together with the rest of the trainer",
    ),
    dropped("actor.enable_dp_load_balance", "samples are always shared among ranks by their tokens here"),
    dropped("actor.training_backend", "the trainer is Megatron"),
    becomes(
        "actor.offload_weight",
        "megatron.sleep",
        flag,
        "together with the rest of the trainer",
    ),
    becomes("actor.offload_optimizer", "optimizer.offload", flag),
    becomes("actor.offload_grad", "megatron.sleep", flag, "together with the rest of the trainer"),
    *trains(
        same("actor.optim.lr", "optimizer.lr"),
        same("actor.optim.adam_beta1", "optimizer.beta1"),
        same("actor.optim.adam_beta2", "optimizer.beta2"),
        same("actor.optim.adam_eps", "optimizer.eps"),
        same("actor.optim.weight_decay", "optimizer.weight_decay"),
        same("actor.optim.clip_grad", "optimizer.clip_grad"),
    ),
    becomes("actor.optim.use_distributed_optimizer", "megatron.distributed_optimizer", flag),
    becomes("actor.optim.overlap_grad_reduce", "megatron.overlap", flag, "one switch for both overlaps"),
    becomes("actor.optim.overlap_param_gather", "megatron.overlap", flag, "one switch for both overlaps"),
    becomes("actor.optim.optimizer_cpu_offload", "optimizer.offload", flag),
    dropped("actor.optim.overlap_*", "see megatron.overlap"),
    dropped("actor.optim.optimizer_enable_pin", "see optimizer.offload"),
    dropped("actor.optim.use_precision_aware_optimizer", "moments and main weights are float32 here"),
    dropped("actor.optim.*loss_scale*", "belongs to fp16; bf16 needs no loss scale"),
    absorbed("actor.optim.bf16", "read with actor.model.precision"),
    *trains(
        fixed("actor.optim.fp16", (False, None), NO_FP16, "megatron.precision"),
        fixed("actor.optim.optimizer", ("adam", "adamw", None), "the optimizer is AdamW here"),
        becomes("actor.optim.min_lr", "optimizer.lr_min", only_where(_rate_decays)),
        dropped("actor.optim.*", "no counterpart in the optimizer section"),
        fixed("actor.lr_sched.lr_warmup_init", (0, None), "a warm-up begins at 0 here"),
        becomes("actor.lr_sched.lr_wsd_decay_iters", "optimizer.wsd_decay_steps", only_where(_is_wsd)),
        becomes("actor.lr_sched.lr_wsd_decay_style", "optimizer.wsd_decay_style", only_where(_is_wsd)),
        same("actor.lr_sched.lr_warmup_iters", "optimizer.lr_warmup_steps"),
        becomes("actor.lr_sched.lr_warmup_fraction", "optimizer.lr_warmup_steps", _warmup_fraction, "only 0"),
        becomes(
            "actor.lr_sched.lr_decay_style",
            "optimizer.lr_schedule",
            choice({"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd"}),
        ),
        becomes("actor.lr_sched.lr_decay_iters", "optimizer.lr_decay_steps", only_where(_rate_decays)),
        becomes("actor.lr_sched.min_lr", "optimizer.lr_min", only_where(_rate_decays)),
    ),
    dropped("actor.lr_sched.max_lr", "the peak is optimizer.lr"),
    *trains(
        fixed("actor.lr_sched.weight_decay_incr_style", ("constant", None), "weight decay is constant here"),
    ),
    dropped("actor.lr_sched.*", "no counterpart in the schedule of the rate"),
    dropped("actor.tokenizer.*", "the tokenizer is that of model.path"),
    same("actor.seed", "run.seed"),
    dropped("actor.*", "no counterpart"),
)

"""Mapping of verl's keys to those of grpo_megatron: optimizer and learning-rate schedule."""

from typing import Any

from grpo_megatron.importers.converters import absorbed, choice, fixed, flag, only_where, unless_null
from grpo_megatron.importers.mapping import CannotCarry, Source, becomes, dropped, same, trains
from grpo_megatron.importers.verl_trainer import ACTOR

SCHEDULES = {name: name for name in ("constant", "cosine", "linear")} | {"WSD": "wsd", "wsd": "wsd"}


def _warmup_steps(value: Any, source: Source) -> dict[str, Any]:
    return {"optimizer.lr_warmup_steps": value} if value is not None and value > 0 else {}


def _warmup_ratio(value: Any, source: Source) -> dict[str, Any]:
    if not value or (source[f"{ACTOR}.optim.lr_warmup_steps"] or 0) > 0:
        return {}
    steps = source["trainer.total_training_steps"] or source[f"{ACTOR}.optim.total_training_steps"]
    if not isinstance(steps, int) or steps <= 0:
        raise CannotCarry(
            "the number of steps is not known here; set optimizer.lr_warmup_steps to this share of it"
        )
    return {"optimizer.lr_warmup_steps": int(value * steps)}


def _betas(value: Any, source: Source) -> dict[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise CannotCarry("this must be a list of two numbers")
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


def _schedule_unless_null(value: Any, source: Source) -> Any:
    return {} if value is None else choice(SCHEDULES)(value, source)


def _schedule(source: Source) -> str:
    set_by = (
        source[f"{ACTOR}.optim.{name}"] for name in ("warmup_style", "lr_scheduler_type", "lr_decay_style")
    )
    return SCHEDULES.get(str(next(filter(None, set_by), None)), "constant")


def _is_wsd(source: Source) -> bool:
    return _schedule(source) == "wsd"


def _unless_constant(value: Any, source: Source) -> dict[str, Any]:
    return {"optimizer.lr_min": value} if value and _schedule(source) != "constant" else {}


def _min_ratio(value: Any, source: Source) -> dict[str, Any]:
    """Convert verl's minimum learning rate, a fraction of the peak rate, to {"optimizer.lr_min": rate}.

    If the minimum is 0 or the schedule is constant, the result is {}: no key is set.
    """
    return _unless_constant(value * source.number(f"{ACTOR}.optim.lr"), source) if value else {}


OPTIMIZER = (
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
        becomes(
            f"{ACTOR}.optim.lr_decay_style", "optimizer.lr_schedule", choice(SCHEDULES), default="constant"
        ),
        *(
            becomes(f"{ACTOR}.optim.{name}", "optimizer.lr_schedule", _schedule_unless_null)
            for name in ("lr_scheduler_type", "warmup_style")
        ),
        becomes(f"{ACTOR}.optim.lr_decay_steps", "optimizer.lr_decay_steps", unless_null),
        same(f"{ACTOR}.optim.min_lr", "optimizer.lr_min", default=0.0),
        same(f"{ACTOR}.optim.weight_decay", "optimizer.weight_decay", default=0.01),
        becomes(f"{ACTOR}.optim.betas", ("optimizer.beta1", "optimizer.beta2"), _betas, default=[0.9, 0.999]),
        same(f"{ACTOR}.optim.clip_grad", "optimizer.clip_grad", default=1.0),
        same(f"{ACTOR}.grad_clip", "optimizer.clip_grad"),
    ),
    absorbed(f"{ACTOR}.optim.total_training_steps", "read with lr_warmup_steps_ratio", default=-1),
    becomes(
        f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
        "optimizer.offload",
        flag,
    ),
    *trains(
        same(f"{ACTOR}.optim.eps", "optimizer.eps"),
        same(f"{ACTOR}.optim.override_optimizer_config.eps", "optimizer.eps"),
        same(f"{ACTOR}.optim.override_optimizer_config.adam_eps", "optimizer.eps"),
        fixed(
            f"{ACTOR}.optim.override_optimizer_config.decoupled_weight_decay",
            (True, None),
            "weight decay is decoupled here",
        ),
        becomes(f"{ACTOR}.optim.lr_wsd_decay_steps", "optimizer.wsd_decay_steps", only_where(_is_wsd)),
        becomes(
            f"{ACTOR}.optim.lr_wsd_decay_style",
            "optimizer.wsd_decay_style",
            only_where(_is_wsd, {"minus_square_root": "minus_sqrt"}),
        ),
        becomes(f"{ACTOR}.optim.lr_min", "optimizer.lr_min", _unless_constant),
        *(
            becomes(
                f"{ACTOR}.optim.{name}", "optimizer.lr_min", _min_ratio, unit="share of the peak rate -> rate"
            )
            for name in ("min_lr_ratio", "min_lr_factor")
        ),
        *(
            fixed(f"{ACTOR}.optim.{name}", values, why)
            for name, values, why in (
                ("name", ("adam", "adamw", "Adam", "AdamW", None), "the optimizer is AdamW here"),
                ("optimizer", ("adam", "adamw", "Adam", "AdamW", None), "the optimizer is AdamW here"),
                ("optimizer_impl", ("torch.optim", None), "the optimizer is AdamW here"),
                ("lr_warmup_init", (0, None), "a warm-up begins at 0 here"),
                ("lr_start", (0, None), "a warm-up begins at 0 here"),
                ("lr_decay_ratio", (1, None), "set optimizer.lr_decay_steps"),
                ("num_cycles", (0.5, None), "a cosine schedule has half a period here"),
                ("weight_decay_incr_style", ("constant", None), "weight decay is constant here"),
                (
                    "use_checkpoint_opt_param_scheduler",
                    (False, None),
                    "the schedule is the configuration's here",
                ),
                ("main_grads_dtype", ("fp32", None), "gradients are accumulated in float32 here"),
                ("exp_avg_dtype", ("fp32", None), "moments are float32 here"),
                ("exp_avg_sq_dtype", ("fp32", None), "moments are float32 here"),
            )
        ),
    ),
    dropped(
        f"{ACTOR}.optim.zero_indexed_step",
        "here step k of a warm-up of n steps has k/n of the rate, and the first step is 1",
    ),
    dropped(f"{ACTOR}.optim.use_precision_aware_optimizer", "moments and main weights are float32 here"),
    dropped(f"{ACTOR}.optim.use_layer_wise_*", "belongs to an optimizer that does not exist here (muon)"),
    dropped(f"{ACTOR}.optim.muon_*", "belongs to an optimizer that does not exist here (muon)"),
    dropped(
        f"{ACTOR}.optim.override_optimizer_config.*offload*", "see optimizer.offload, which moves all of it"
    ),
    dropped(
        f"{ACTOR}.optim.override_optimizer_config.use_precision_aware_optimizer",
        "moments and main weights are float32 here",
    ),
    dropped(
        f"{ACTOR}.optim.override_optimizer_config.overlap_*",
        "no counterpart: copies of offloaded states are not configured",
    ),
    *trains(dropped(f"{ACTOR}.optim.*", "no counterpart in the optimizer section")),
)

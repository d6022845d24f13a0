"""Megatron's DDP, optimizer and learning-rate scheduler, built from our configuration."""

import math

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.module import Float16Module

from grpo_megatron.config.schema import Config, LrSchedule, OptimizerConfig
from grpo_megatron.megatron.results import AdamOptions, StepOutcome

# Megatron's names of the schedules.
_DECAY_STYLES = {
    LrSchedule.constant: "constant",
    LrSchedule.cosine: "cosine",
    LrSchedule.linear: "linear",
    LrSchedule.wsd: "WSD",
}


def lr_scheduler(optimizer, config: OptimizerConfig, decay_steps: int) -> OptimizerParamScheduler:
    """Return Megatron's scheduler, which sets the learning rate of each optimizer step.

    Steps are counted from 1. On return, the rate of step 1 is set already.

    optimizer: Megatron's optimizer, in whose param_groups the scheduler sets the rates.
    decay_steps: number of optimizer steps of the whole schedule, warm-up included.

    Step k of a warm-up of n steps has the rate lr * k / n. A later step k has the rate lr_min + (lr - lr_min)
    * c. With D = decay_steps and r = (k - n) / (D - n), the factor c depends on optimizer.lr_schedule:

    - constant: 1.
    - cosine: (1 + cos(pi r)) / 2 (arXiv:1608.03983 eq. 5, one period).
    - linear: 1 - r.
    - wsd: 1 up to step D - wsd_decay_steps, then falling to 0 at step D with the shape that wsd_decay_style
      names (arXiv:2404.06395 section 4.2).

    After step D, c is 0, except with `constant`.
    """
    decays = config.lr_schedule != LrSchedule.constant
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr_min,
        lr_warmup_steps=config.lr_warmup_steps,
        # Megatron requires the decay to end after the warm-up. If decay_steps is not larger than the warm-up,
        # the rate falls to lr_min in the step after the peak.
        lr_decay_steps=max(decay_steps if decays else 0, config.lr_warmup_steps + 1),
        lr_decay_style=_DECAY_STYLES[config.lr_schedule],
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=config.wsd_decay_steps if config.lr_schedule == LrSchedule.wsd else None,
        lr_wsd_decay_style=config.wsd_decay_style.value,
    )
    # Without this, Megatron's first step would run at rate 0.
    scheduler.step(1)
    return scheduler


def continue_schedule(scheduler: OptimizerParamScheduler, config: OptimizerConfig, state: dict) -> None:
    """Resume a saved learning-rate schedule at its step, with the current optimizer settings.

    Learning rates, warm-up, decay, betas, eps and weight decay are those in `config`, even if the saved run
    had others. On return, the scheduler's parameter groups have these settings and the rate of the next step.

    config: the current optimizer settings.
    state: the scheduler's state_dict from the checkpoint. Only its number of steps has an effect.
    """
    for group in scheduler.optimizer.param_groups:
        group.update(
            max_lr=config.lr, min_lr=config.lr_min, betas=(config.beta1, config.beta2), eps=config.eps
        )
        group.update(start_wd=config.weight_decay, end_wd=config.weight_decay)
    # load_state_dict adds the saved number of steps to the scheduler's own, so start from 0.
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def _is_token_embedding(parameter, name: str) -> bool:
    """Return True if `parameter` is the token embedding, or a tied copy of it on the last pipeline stage.

    Weight decay must treat the embedding and its copy alike, or their values would drift apart.

    name: the parameter's name in Megatron.
    """
    return name.endswith("embedding.word_embeddings.weight") or getattr(parameter, "shared_embedding", False)


def _weight_decay_overrides(
    megatron_config: MegatronOptimizerConfig, config: OptimizerConfig
) -> dict[ParamKey, ParamGroupOverride]:
    """Return the optimizer settings that exempt some parameters from weight decay.

    The result is {selection of parameters: settings that replace the optimizer's for these parameters}.
    Megatron's default exempts all biases and 1-d parameters (norms). With optimizer.decay_embeddings=false,
    the token embeddings are exempt too.
    """
    overrides = get_standard_config_overrides(megatron_config)
    if not config.decay_embeddings:
        embeddings = ParamKey(
            with_name_predicate=ParamWithNamePredicate("token_embeddings", _is_token_embedding)
        )
        overrides[embeddings] = ParamGroupOverride(wd_mult=0.0)
    return overrides


class Optimizer:
    """Megatron's optimizer with gradient clipping, learning-rate schedule and a check of the gradient norm.

    A step is dropped if its gradient norm is not finite, or above optimizer.max_grad_norm_to_step.
    """

    def __init__(self, chunks: list, config: OptimizerConfig, decay_steps: int, params_dtype: torch.dtype):
        """Build optimizer and learning-rate scheduler for this rank's parameters.

        chunks: DDP-wrapped model chunks. Their ddp_config says whether the optimizer's states are divided
            over the data-parallel replicas (distributed optimizer).
        config: this project's OptimizerConfig, not Megatron's class of the same name.
        decay_steps: number of optimizer steps of the whole learning-rate schedule.
        params_dtype: dtype of the parameters.
        """
        self._config = config
        self._device = next(chunks[0].parameters()).device
        ddp_config = chunks[0].ddp_config
        megatron_config = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.lr_min,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=params_dtype == torch.bfloat16,
            params_dtype=params_dtype,
            use_distributed_optimizer=ddp_config.use_distributed_optimizer,
            overlap_param_gather=ddp_config.overlap_param_gather,
        )
        overrides = _weight_decay_overrides(megatron_config, config)
        self.inner = get_megatron_optimizer(megatron_config, chunks, overrides, use_gloo_process_groups=False)
        self.scheduler = lr_scheduler(self.inner, config, decay_steps)

    def parts(self) -> list:
        """Return Megatron's inner optimizers. Dense parameters and experts' parameters have separate ones."""
        return getattr(self.inner, "chained_optimizers", [self.inner])

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def forget(self) -> None:
        """Set Adam's moments and its number of steps to 0, as before the first step."""
        for part in self.parts():
            for state in part.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()
            for group in part.optimizer.param_groups:
                group["step"] = 0

    def load_scheduler(self, state: dict) -> None:
        """Resume the learning-rate schedule of a checkpoint, with the current optimizer settings.

        state: the scheduler's state_dict from the checkpoint.
        """
        continue_schedule(self.scheduler, self._config, state)

    def _must_drop(self, grad_norm: float) -> bool:
        """Return True on all ranks if any rank finds the gradient norm infinite, NaN or too large.

        All ranks must call this. The limit is optimizer.max_grad_norm_to_step. Replicas may add up the global
        norm in different orders, so its last bit may differ between ranks. All ranks must still decide alike,
        because no rank may take the step while another one drops it.
        """
        limit = self._config.max_grad_norm_to_step
        found = not math.isfinite(grad_norm) or (limit is not None and grad_norm > limit)
        flag = torch.tensor(float(found), device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _set(self, adam: AdamOptions) -> None:
        """Set options of Adam for the next step. Scheduler.step sets learning rate and weight decay anew."""
        config = self._config
        betas = (
            config.beta1 if adam.beta1 is None else adam.beta1,
            config.beta2 if adam.beta2 is None else adam.beta2,
        )
        for group in self.inner.param_groups:
            group.update(betas=betas, eps=config.eps if adam.eps is None else adam.eps)
            if adam.lr is not None:
                group["lr"] = adam.lr * group.get("lr_mult", 1.0)
            if adam.weight_decay is not None:
                group["weight_decay"] = adam.weight_decay * group.get("wd_mult", 1.0)

    def step(self, drop: bool = False, adam: AdamOptions | None = None) -> StepOutcome:
        """Take one optimizer step with clipped gradients, or drop it. All ranks must call this.

        A step is dropped if its gradient norm is not finite, or above optimizer.max_grad_norm_to_step. A
        dropped step changes neither parameters nor moments nor the learning rate.

        drop: if True, drop the step even if the gradient is fine. Must be the same on all ranks.
        adam: options of this step only. None: those of the configuration.
        """
        if adam is not None:
            self._set(adam)
        lr = self.inner.param_groups[0]["lr"]
        self.inner.prepare_grads()
        grad_norm = float(self.inner.get_grad_norm())
        if self._must_drop(grad_norm) or drop:
            self.inner.zero_grad()
            if adam is not None:
                self.scheduler.step(0)  # sets the schedule's rate again
            return StepOutcome(grad_norm, lr, dropped=True)
        # Megatron's own step() is not called, because it would prepare and measure the gradient a second
        # time. The rest of this method does what step() does after that.
        limit = self._config.clip_grad if adam is None or adam.clip_grad is None else adam.clip_grad
        for optimizer in self.parts():
            if limit > 0 and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), limit, grad_norm)
        self.inner.step_with_ready_grads()
        self.scheduler.step(1)
        return StepOutcome(grad_norm, lr, dropped=False)


def wrap_for_training(
    chunks: list[torch.nn.Module], config: Config, decay_steps: int
) -> tuple[list[DistributedDataParallel], Optimizer]:
    """Wrap each model chunk in Megatron's DDP, and build the optimizer over all chunks.

    The function also stores callbacks, such as the one that finishes the gradients, in the chunks' config.
    Megatron's pipeline schedules look for their callbacks there.

    decay_steps: number of optimizer steps of the whole learning-rate schedule.

    Returns (wrapped chunks, optimizer).
    """
    megatron, megatron_config = config.megatron, chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=megatron.distributed_optimizer,
        overlap_grad_reduce=megatron.overlap,
        overlap_param_gather=megatron.overlap and megatron.distributed_optimizer,
    )
    bf16 = megatron_config.bf16
    modules = [Float16Module(megatron_config, chunk) if bf16 else chunk for chunk in chunks]
    wrapped = [
        # Gradient buckets save time only in the chunk whose backward pass runs last.
        DistributedDataParallel(megatron_config, ddp_config, module, disable_bucketing=i > 0)
        for i, module in enumerate(modules)
    ]
    if megatron.overlap:
        no_sync = [ddp.no_sync for ddp in wrapped]
        megatron_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    optimizer = Optimizer(wrapped, config.optimizer, decay_steps, megatron_config.params_dtype)
    megatron_config.finalize_model_grads_func = finalize_model_grads
    megatron_config.grad_scale_func = optimizer.inner.scale_loss
    return wrapped, optimizer

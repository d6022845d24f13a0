"""Megatron's optimizer and learning-rate scheduler, built from our configuration."""

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True)
class StepOutcome:
    """grad_norm: before clipping, over all ranks. dropped: the gradient was not finite."""

    grad_norm: float
    lr: float
    dropped: bool


class Optimizer:
    """One optimizer step: clip, update, schedule; or drop the gradient if it is not finite."""

    def __init__(self, model, config, params_dtype: torch.dtype):
        """model: the DDP-wrapped stage, whose ddp_config says how states are split; config: schema.OptimizerConfig."""
        ddp_config = model.ddp_config
        self.inner = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=params_dtype == torch.bfloat16,
                params_dtype=params_dtype,
                use_distributed_optimizer=ddp_config.use_distributed_optimizer,
                overlap_param_gather=ddp_config.overlap_param_gather,
            ),
            [model],
            use_gloo_process_groups=False,
        )
        self.scheduler = OptimizerParamScheduler(
            self.inner,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr,
            lr_warmup_steps=config.lr_warmup_steps,
            # A constant rate never decays; Megatron only wants the number to be beyond the warm-up.
            lr_decay_steps=config.lr_warmup_steps + 1,
            lr_decay_style="constant",
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )
        # Step k of a warm-up of n runs at k/n of the peak; Megatron's first step would run at 0.
        self.scheduler.step(1)

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> StepOutcome:
        lr = self.inner.param_groups[0]["lr"]
        # The norm is global, so all ranks take the same branch.
        self.inner.prepare_grads()
        grad_norm = float(self.inner.get_grad_norm())
        if not math.isfinite(grad_norm):
            self.inner.zero_grad()
            return StepOutcome(grad_norm, lr, dropped=True)
        self.inner.step()
        self.scheduler.step(1)
        return StepOutcome(grad_norm, lr, dropped=False)

"""Megatron's optimizer and learning-rate scheduler, built from our configuration."""

import math
from dataclasses import dataclass

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
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
        self._config = config
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
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )
        # Step k of a warm-up of n runs at k/n of the peak; Megatron's first step would run at 0.
        self.scheduler.step(1)

    def _parts(self) -> list:
        """The optimizers Megatron chains: one per kind of parameter."""
        return getattr(self.inner, "chained_optimizers", [self.inner])

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def load_scheduler(self, state: dict) -> None:
        """Continue the schedule where `state` was, with the rates of the present configuration.

        Checkpoints carry the old rates inside the parameter groups; without this a changed
        optimizer.lr would be ignored on resume without a word.
        """
        config = self._config
        for group in self.inner.param_groups:
            group.update(max_lr=config.lr, min_lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps)
            group.update(start_wd=config.weight_decay, end_wd=config.weight_decay)
        # load_state_dict adds the saved steps to those already made.
        self.scheduler.num_steps = 0
        self.scheduler.load_state_dict(state)

    def step(self) -> StepOutcome:
        lr = self.inner.param_groups[0]["lr"]
        # The norm is global, so all ranks take the same branch.
        self.inner.prepare_grads()
        grad_norm = float(self.inner.get_grad_norm())
        if not math.isfinite(grad_norm):
            self.inner.zero_grad()
            return StepOutcome(grad_norm, lr, dropped=True)
        # What remains of Megatron's own step(), which would prepare and measure a second time.
        for optimizer in self._parts():
            if optimizer.config.clip_grad > 0 and optimizer.get_parameters():
                clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, grad_norm)
        self.inner.step_with_ready_grads()
        self.scheduler.step(1)
        return StepOutcome(grad_norm, lr, dropped=False)

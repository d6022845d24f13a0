"""Preparation of a model for training: Megatron's DDP with its gradient buffers, and the optimizer."""

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.transformer.module import Float16Module

from grpo_megatron.megatron.optimizer import Optimizer
from grpo_megatron.megatron.spec import ActorSpec


def wrap_for_training(
    chunks: list[torch.nn.Module], spec: ActorSpec, dtype: torch.dtype
) -> tuple[list[DistributedDataParallel], Optimizer]:
    """Wrap each model chunk in Megatron's DDP, and build the optimizer over all chunks.

    It also enters the hooks of DDP and optimizer in the chunks' config, where pipeline schedules find them.
    dtype: dtype of the parameters.
    """
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
        overlap_grad_reduce=spec.overlap,
        overlap_param_gather=spec.overlap and spec.distributed_optimizer,
    )
    modules = [Float16Module(config, chunk) if dtype == torch.bfloat16 else chunk for chunk in chunks]
    wrapped = [
        # Buckets pay off only in the chunk whose backward pass runs last.
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=i > 0)
        for i, module in enumerate(modules)
    ]
    if spec.overlap:
        no_sync = [ddp.no_sync for ddp in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    optimizer = Optimizer(wrapped, spec.optimizer, dtype)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.inner.scale_loss
    return wrapped, optimizer

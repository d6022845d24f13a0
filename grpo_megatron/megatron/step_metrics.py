"""Metrics of a training pass, merged over the ranks that measured them."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from grpo_megatron.config.schema import MoEConfig
from grpo_megatron.megatron.layers.router import take_loss_sums
from grpo_megatron.metrics import Mean, Metrics, merge
from grpo_megatron.model.architecture import MoE


def router_metrics(
    chunks: list, experts: MoE, config: MoEConfig, tokens: int, device: torch.device
) -> Metrics:
    """Return the metrics moe/load_balancing_loss and moe/z_loss of the routers. All ranks must call this.

    Each metric is a mean over this replica's tokens and layers with experts. A loss with coefficient 0 is
    left out. The function also resets the routers' sums and their recorded choices of experts.

    chunks: model chunks of this rank, whose routers have summed the losses during the training pass.
    experts: says which layers have experts.
    config: coefficients of the losses.
    tokens: number of the replica's tokens in the training pass.
    device: device on which the metrics are computed.
    """
    names = ("load_balancing_loss", "z_loss")
    sums = take_loss_sums(chunks)
    total = torch.stack([torch.as_tensor(sums.get(name, 0.0), device=device).float() for name in names])
    for group in (mpu.get_tensor_and_context_parallel_group(), mpu.get_pipeline_model_parallel_group()):
        dist.all_reduce(total, group=group)
    count = tokens * sum(experts.layers)
    coefficients = (config.aux_loss_coeff, config.z_loss_coeff)
    return {
        f"moe/{name}": Mean(value, count)
        for name, value, coefficient in zip(names, total, coefficients, strict=True)
        if coefficient
    }


def merge_over_context(metrics: Metrics) -> Metrics:
    """Return the metrics of this rank's CP group, merged. All ranks of the group must call this.

    CP ranks measure different tokens of the same sequences.

    metrics: the metrics that this rank measured.
    """
    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return metrics
    parts: list = [None] * group.size()
    dist.all_gather_object(parts, metrics, group=group)
    return merge(parts)


def beyond_limits(limits: dict[str, float], metrics: Metrics) -> tuple[str, ...]:
    """Return one sentence for each metric that, merged over all ranks, exceeds its limit or is NaN.

    All ranks must call this. If the result is not empty, the optimizer step must be dropped.

    limits: {name of the metric: largest allowed value}.
    metrics: {name: metric} as measured by this rank; may be empty.
    """
    if not limits:
        return ()
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, {name: metrics[name] for name in limits if name in metrics})
    found = {name: metric.result() for name, metric in merge(parts).items()}
    return tuple(
        f"{name}={value:.4g} exceeds its limit {limits[name]}"
        for name, value in found.items()
        if not value <= limits[name]
    )

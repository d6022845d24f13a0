"""The numbers that multiply each token's loss: advantage, weight, and the factor of the policy term.

The weight is the token's share in the mean over the optimizer step. It multiplies the whole loss of the
token. The factor corrects the mismatch between the engine's and the trainer's log-probs. It multiplies only
the policy term, not KL and entropy.

These are pure functions of the mini-batches of one step. The training controller (controller.py) writes
their results into the batches.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import AdvantageInputs, advantages
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController, kl_penalty
from grpo_megatron.batch.token_weights import token_weights, weights_after_rejection
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig, MaskAppliesTo
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Mean, Metrics


def step_advantages(
    batches: list[TrainBatch], options: AlgorithmConfig, kl_controller: KLController
) -> tuple[list[np.ndarray], Metrics]:
    """Return (advantages, metrics) of a step: one float32 [T] array per mini-batch, and scalars for the logs.

    The advantages are computed over all mini-batches together. With algorithm.use_kl_in_reward, the KL to the
    reference policy is subtracted from the rewards, and the coefficient in `kl_controller` is updated
    afterwards.

    batches: the mini-batches of the step.
    """
    metrics: Metrics = {}
    whole = TrainBatch.concatenate(batches)
    token_reward = None
    if options.use_kl_in_reward:
        logps = map(torch.from_numpy, (whole.old_logp, whole.ref_logp))
        kl = np.where(whole.loss_mask, kl_penalty(*logps, options.kl_penalty).double().numpy(), 0)
        token_reward = -kl_controller.coef * kl
        metrics["actor/kl_coef"] = Mean(kl_controller.coef, 1)
        mean, count = mean_over_trajectories(kl, whole)
        metrics["actor/kl_in_reward"] = Mean(mean * count, count)
        kl_controller.update(mean, count)
    inputs = AdvantageInputs(
        whole.reward, whole.group_id, whole.trajectory_id, whole.sequence_id, whole.loss_mask, token_reward
    )
    parts = np.split(advantages(inputs, options), np.cumsum([batch.num_tokens for batch in batches])[:-1])
    if options.use_valid_token_scale:
        parts = [
            own / np.float32(max(batch.loss_mask.sum(), 1)) for own, batch in zip(parts, batches, strict=True)
        ]
    return parts, metrics


def mean_over_trajectories(values: np.ndarray, batch: TrainBatch) -> tuple[float, int]:
    """Return (mean, count) over the trajectories that have a trained token.

    - mean: each trajectory's mean over its trained tokens, averaged over the trajectories. 0.0 if there is no
      trajectory.
    - count: number of these trajectories.

    values: float [T], one per token of the batch.
    """
    sequence = batch.sequence_id[batch.loss_mask]
    _, trajectory, counts = np.unique(batch.trajectory_id[sequence], return_inverse=True, return_counts=True)
    if not len(counts):
        return 0.0, 0
    means = np.bincount(trajectory, values[batch.loss_mask]) / counts
    return float(means.mean()), len(counts)


@dataclass(frozen=True)
class Coefficients:
    """The numbers that multiply each token's loss in one optimizer step."""

    weight: np.ndarray
    """float32 [T]. The token's share in the mean over the optimizer step. It multiplies the token's whole
    loss."""
    policy_factor: np.ndarray | None
    """float32 [T] or None (1 everywhere). Multiplies only the policy term, not KL and entropy."""
    loss_mask: np.ndarray
    """bool [T]. True for trained tokens."""


def step_coefficients(
    batch: TrainBatch, config: Config, correction: Correction | None
) -> tuple[Coefficients, Metrics]:
    """Return (coefficients, metrics) of one optimizer step. The metrics describe the mismatch correction.

    batch: the mini-batch of the optimizer step.
    correction: what to do about differences between the engine's and the trainer's log-probs. None if the
        differences become known only in the training forward pass, or if no correction is configured.

    A token that the correction masks loses its policy term. It keeps KL and entropy, unless
    algorithm.mask_applies_to is "all". By default it still counts in the denominator of the mean. With
    mismatch.renormalize, the mean is taken only over the tokens that are kept.
    """
    mode, longest = config.algorithm.loss_agg_mode, config.rollout.max_response_length
    if correction is None:
        return Coefficients(token_weights(batch, mode, longest), None, batch.loss_mask), {}
    sequence = torch.from_numpy(batch.sequence_id)

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(batch.num_sequences).index_add(0, sequence, values)[sequence]

    arrays = map(torch.from_numpy, (batch.rollout_logp, batch.old_logp, batch.loss_mask))
    factor, kept = (tensor.numpy() for tensor in correction(*arrays, sequence_sum))
    trained = batch.loss_mask & kept
    metrics: Metrics = {
        "mismatch/masked": Mean(float((batch.loss_mask & ~kept).sum()), float(batch.loss_mask.sum())),
        "mismatch/factor": Mean(float(factor[trained].sum()), float(trained.sum())),
    }
    if config.algorithm.mask_applies_to == MaskAppliesTo.all:
        counted = replace(batch, loss_mask=trained) if config.mismatch.renormalize else batch
        weight = np.where(trained, token_weights(counted, mode, longest), np.float32(0))
        return Coefficients(weight, factor, trained), metrics
    if config.mismatch.renormalize:
        weight, renormalised = weights_after_rejection(batch, kept, mode, longest)
        return Coefficients(weight, factor * renormalised, batch.loss_mask), metrics
    return Coefficients(token_weights(batch, mode, longest), factor, batch.loss_mask), metrics

"""What each token's loss is multiplied by: its advantage, its weight, and the factor of its policy term.

Pure functions of the mini-batches of one step; the controller puts what they return into the batches.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import AdvantageInputs, advantages
from grpo_megatron.algorithm.kl import KLController, kl_penalty
from grpo_megatron.algorithm.mismatch import Correction, describe_worst, mismatch_metrics
from grpo_megatron.batch.token_weights import token_weights, weights_after_rejection
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.metrics import Mean, Metrics


def step_advantages(batches: list[TrainBatch], options, kl_controller: KLController) -> tuple[list[np.ndarray], Metrics]:
    """Advantages over all mini-batches of a step together, with the KL in the reward if asked for.

    Returns float32 [T] for each mini-batch, and metrics. options: config.schema.AlgorithmConfig. The KL
    coefficient of kl_controller is updated after its use.
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
        parts = [own / np.float32(max(batch.loss_mask.sum(), 1)) for own, batch in zip(parts, batches, strict=True)]
    return parts, metrics


def mean_over_trajectories(values: np.ndarray, batch: TrainBatch) -> tuple[float, int]:
    """(mean over trajectories of their mean over trained tokens, number of trajectories with any); (0.0, 0) of none."""
    sequence = batch.sequence_id[batch.loss_mask]
    _, trajectory, counts = np.unique(batch.trajectory_id[sequence], return_inverse=True, return_counts=True)
    if not len(counts):
        return 0.0, 0
    means = np.bincount(trajectory, values[batch.loss_mask]) / counts
    return float(means.mean()), len(counts)


@dataclass(frozen=True)
class Coefficients:
    """Of each token of one optimizer step: weight float32 [T]; policy_factor float32 [T] or None (1 everywhere), which
    multiplies the policy term only; loss_mask bool [T], the tokens that are trained."""

    weight: np.ndarray
    policy_factor: np.ndarray | None
    loss_mask: np.ndarray


def step_coefficients(batch: TrainBatch, config, correction: Correction | None) -> tuple[Coefficients, Metrics]:
    """Token weights of one optimizer step, after what the mismatch masks; metrics of that.

    config: config.schema.Config. correction: None where the mismatch is not known yet, or nothing is
    done about it. A masked token keeps KL and entropy unless algorithm.mask_applies_to is "all".
    """
    options, longest = config.algorithm, config.rollout.max_response_length
    if correction is None:
        return Coefficients(token_weights(batch, options.loss_agg_mode, longest), None, batch.loss_mask), {}
    sequence = torch.from_numpy(batch.sequence_id)

    def sequence_sum(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(batch.num_sequences).index_add(0, sequence, values)[sequence]

    arrays = map(torch.from_numpy, (batch.rollout_logp, batch.old_logp, batch.loss_mask))
    ratio_weight, kept = (tensor.numpy() for tensor in correction(*arrays, sequence_sum))
    trained = batch.loss_mask & kept
    metrics: Metrics = {
        "mismatch/masked": Mean(float((batch.loss_mask & ~kept).sum()), float(batch.loss_mask.sum())),
        "mismatch/weight": Mean(float(ratio_weight[trained].sum()), float(trained.sum())),
    }
    if options.mask_applies_to == "all":
        weight = token_weights(replace(batch, loss_mask=trained), options.loss_agg_mode, longest)
        return Coefficients(weight, ratio_weight, trained), metrics
    weight, renormalised = weights_after_rejection(batch, kept, options.loss_agg_mode, longest)
    return Coefficients(weight, ratio_weight * renormalised, batch.loss_mask), metrics


def measure_mismatch(batch: TrainBatch) -> Metrics:
    """mismatch_metrics of a batch whose old log-probs are those of the weights the engine sampled with."""
    arrays = (batch.rollout_logp, batch.old_logp, batch.loss_mask, batch.number)
    return mismatch_metrics(*map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class MismatchReport:
    """worst: the worst tokens in their context. text: what to say, or nothing. stop: the run must not go on."""

    worst: str
    text: str
    stop: bool


def mismatch_report(metrics: Metrics, batches: list[TrainBatch], config, decode) -> MismatchReport:
    """metrics: those of mismatch_metrics, of the step's batches; config: config.schema.MismatchConfig; decode as in
    describe_worst, None: token ids are shown."""
    whole = TrainBatch.concatenate(batches)
    decode = decode or (lambda ids: " ".join(map(str, ids)))
    worst = describe_worst(metrics["mismatch/worst"].result(), whole.tokens, whole.cu_seqlens, decode)
    largest = metrics["mismatch/max"].result()
    text = ""
    if config.action in ("warn", "stop") and not largest <= config.threshold:
        text = (
            f"engine and trainer differ by up to {largest:.4g} nats in a token's log-prob, more than "
            f"mismatch.threshold={config.threshold}; the worst tokens:\n{worst}"
        )
    return MismatchReport(worst, text, bool(text) and config.action == "stop")

"""Coefficients of each token's loss: advantage, weight, and the factor of the policy term.

The weight is the token's share in the mean over the optimizer step. It multiplies the whole loss of the
token. The factor corrects the mismatch between the engine's and the trainer's log-probs. It multiplies only
the policy term, not KL and entropy.

`set_coefficients` works in three stages. `measure` reads the tokens and computes sums over each sequence.
`step_credit` and `step_weights` turn the sums into a few numbers per sequence. `token_coefficients` turns
these numbers into the coefficients of each token.
"""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import AdvantageInputs, Credit, advantages
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController, kl_penalty
from grpo_megatron.batch.sequence_weights import sequence_weights
from grpo_megatron.batch.sums import SequenceSums, suffix_sums
from grpo_megatron.batch.table import SampleTable, concatenated
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig, MaskAppliesTo
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Mean, Metrics, merge


@dataclass(frozen=True)
class Measured:
    """KL and mismatch correction of the T tokens of a mini-batch, with sums over each sequence."""

    sums: SequenceSums
    """Sums over the trained tokens of each sequence. Advantages and weights are computed from them."""
    suffix: np.ndarray | None
    """float64 [T]. KL summed from each token to the end of its sequence. None: the reward contains no KL."""
    factor: np.ndarray | None
    """float32 [T]. Factor by which the mismatch correction multiplies the token's policy term. None: no
    correction."""
    kept: np.ndarray
    """bool [T]. False for tokens that the mismatch correction rejects."""
    metrics: Metrics
    """Metrics of the mismatch correction."""


@dataclass(frozen=True)
class SequenceWeights:
    """Loss weights of the S sequences of one optimizer step."""

    weight: np.ndarray
    """float64 [S]. Weight of the loss of each trained token of the sequence."""
    factor: np.ndarray
    """float64 [S]. Additional factor that multiplies only the policy term of these tokens."""


def set_coefficients(
    batches: list[TrainBatch], config: Config, correction: Correction | None, kl_controller: KLController
) -> Metrics:
    """Set advantage, weight, policy_factor and loss_mask of the mini-batches of one training step.

    Advantages are computed over all mini-batches together, weights within each mini-batch. Returns metrics of
    the KL in the reward and of the mismatch correction.

    correction: correction of the mismatch between engine and trainer. None if the mismatch is not known
        before training, or if no correction is configured.
    kl_controller: holds the coefficient of the KL in the reward, which is updated for the next step.
    """
    options = config.algorithm
    measured = [measure(batch, options, correction) for batch in batches]
    table = concatenated([batch.table for batch in batches])
    sums = concatenated([one.sums for one in measured])
    credit, metrics = step_credit(table, sums, options, kl_controller)
    first = 0
    for batch, one in zip(batches, measured, strict=True):
        rows = slice(first, first + batch.num_sequences)
        divisor = max(one.sums.trained.sum(), 1.0) if options.use_valid_token_scale else 1.0
        own, weights = credit.part(rows, divisor), step_weights(batch.table, one.sums, config)
        batch.set(**token_coefficients(batch, one, own, weights, options.mask_applies_to))
        first = rows.stop
    return metrics | merge([one.metrics for one in measured])


def measure(batch: TrainBatch, options: AlgorithmConfig, correction: Correction | None) -> Measured:
    """Compute the KL in the reward and the mismatch correction of each token, and sums over each sequence.

    correction: correction of the differences between the engine's and the trainer's log-probs. None if the
        differences become known only in the training forward pass, or if no correction is configured.
    """
    mask, kl, suffix, factor, metrics = batch.loss_mask, None, None, None, {}
    kept = np.ones_like(mask)
    if options.use_kl_in_reward:
        logps = map(torch.from_numpy, (batch.old_logp, batch.ref_logp))
        kl = np.where(mask, kl_penalty(*logps, options.kl_penalty).double().numpy(), 0.0)
        suffix = suffix_sums(batch.cu_seqlens, kl)
    if correction is not None:
        sequence = torch.from_numpy(batch.sequence_id)

        def sequence_sum(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(batch.num_sequences).index_add(0, sequence, values)[sequence]

        arrays = map(torch.from_numpy, (batch.rollout_logp, batch.old_logp, mask))
        factor, kept = (tensor.numpy() for tensor in correction(*arrays, sequence_sum))
        trained = mask & kept
        metrics = {
            "mismatch/masked": Mean(float((mask & ~kept).sum()), float(mask.sum())),
            "mismatch/factor": Mean(float(factor[trained].sum()), float(trained.sum())),
        }
    sums = SequenceSums.of(batch.cu_seqlens, mask, kept, kl, suffix)
    return Measured(sums, suffix, factor, kept, metrics)


def step_credit(
    table: SampleTable, sums: SequenceSums, options: AlgorithmConfig, kl_controller: KLController
) -> tuple[Credit, Metrics]:
    """Return (advantages, metrics of the KL in the reward) of a whole training step.

    With algorithm.use_kl_in_reward, the KL to the reference policy is subtracted from the rewards, and the
    coefficient in `kl_controller` is updated afterwards. Without it, the metrics are empty.

    table: group, trajectory and reward of each of the S sequences.
    sums: sums over the trained tokens of each sequence.
    """
    metrics: Metrics = {}
    coef = kl_controller.coef if options.use_kl_in_reward else 0.0
    inputs = AdvantageInputs(table, sums, coef)
    credit = advantages(inputs, options)
    if options.use_kl_in_reward:
        metrics["actor/kl_coef"] = Mean(coef, 1)
        mean, count = mean_kl(inputs)
        metrics["actor/kl_in_reward"] = Mean(mean * count, count)
        kl_controller.update(mean, count)
    return credit, metrics


def mean_kl(inputs: AdvantageInputs) -> tuple[float, int]:
    """Return (mean, count): the mean KL per token to the reference policy, and the number of trajectories.

    - mean: KL in nats, averaged over the trained tokens of each trajectory, then over the trajectories. 0.0
      if there is no trajectory.
    - count: number of trajectories with a trained token. Other trajectories are ignored.
    """
    found, rows = inputs.trajectories, np.flatnonzero(inputs.sums.trained)
    if not len(rows):
        return 0.0, 0
    kl = np.bincount(found.of_sequence[rows], inputs.sums.kl[rows])
    return float((kl / found.tokens).mean()), len(found.tokens)


def step_weights(table: SampleTable, sums: SequenceSums, config: Config) -> SequenceWeights:
    """Return the loss weights of the sequences of one optimizer step.

    The weights implement the mean over tokens that algorithm.loss_agg_mode asks for. Tokens that the mismatch
    correction rejects count in the denominator of this mean. With mismatch.renormalize, they do not count in
    the mean of the policy term, and with algorithm.mask_applies_to=all not in the mean of KL and entropy
    either.

    table: group, trajectory and reward of each of the S sequences.
    sums: numbers of trained and of kept tokens of each sequence.
    """
    mode, longest = config.algorithm.loss_agg_mode, config.rollout.max_response_length
    ones = np.ones(len(sums.trained))
    of_trained = sequence_weights(table, sums.trained, mode, longest)
    if not config.mismatch.renormalize:
        return SequenceWeights(of_trained, ones)
    of_kept = sequence_weights(table, sums.kept, mode, longest)
    if config.algorithm.mask_applies_to == MaskAppliesTo.all:
        return SequenceWeights(of_kept, ones)
    # KL and entropy are averaged over all trained tokens, the policy term over the kept ones.
    factor = np.divide(of_kept, of_trained, out=np.zeros_like(ones), where=of_trained > 0)
    return SequenceWeights(of_trained, factor)


def token_coefficients(
    batch: TrainBatch,
    measured: Measured,
    credit: Credit,
    weights: SequenceWeights,
    applies_to: MaskAppliesTo,
) -> dict[str, np.ndarray | None]:
    """Return {name: array [T]} of advantage, weight, policy_factor and loss_mask for a mini-batch's tokens.

    policy_factor is None if there is no mismatch correction.

    measured: KL and mismatch correction of the mini-batch's tokens.
    credit: advantages of the mini-batch's sequences.
    weights: loss weights of the mini-batch's sequences.
    applies_to: what tokens lose that the mismatch correction rejects. "policy": their policy term (factor 0).
        "all": all terms, because they are removed from the loss mask.
    """
    sequence, mask = batch.sequence_id, batch.loss_mask
    advantage = credit.of_tokens(sequence, mask, measured.suffix)
    policy_factor = None
    if measured.factor is not None:
        policy_factor = measured.factor * weights.factor[sequence].astype(np.float32)
        if applies_to == MaskAppliesTo.all:
            mask = mask & measured.kept
    return {
        "advantage": advantage,
        "weight": np.where(mask, weights.weight[sequence], 0.0).astype(np.float32),
        "policy_factor": policy_factor,
        "loss_mask": mask,
    }

"""Coefficients of each token's loss: advantage, weight, and the factor of the policy term.

The weight is the token's share in the mean over the optimizer step. It multiplies the whole loss of the
token. The factor corrects the mismatch between the engine's and the trainer's log-probs. It multiplies only
the policy term, not KL and entropy.

The coefficients are computed in three stages, because the tokens are on the trainer's ranks, and only the
driver knows all sequences of a step:

1. `measure` reads the tokens, on the ranks, and sums them up for each sequence.
2. `step_coefficients` computes a few numbers for each sequence from the sums, in the driver.
3. `token_coefficients` spreads these numbers over the tokens, on the ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import AdvantageInputs, Credit, advantages, columns_of
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController, kl_penalty
from grpo_megatron.batch.sequence_weights import sequence_weights
from grpo_megatron.batch.sums import SequenceSums, suffix_sums
from grpo_megatron.batch.table import SampleTable, chosen_rows, concatenated
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import AlgorithmConfig, MaskAppliesTo
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Mean, Metrics


@dataclass(frozen=True)
class Measured:
    """KL and mismatch correction of the T tokens of a micro-batch, with sums over each sequence."""

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


@dataclass(frozen=True)
class SequenceCoefficients:
    """Advantages and weights of the S sequences of a mini-batch.

    `token_coefficients` computes the values of single tokens from them.
    """

    credit: Credit
    """Advantages of the sequences' tokens."""
    weights: SequenceWeights
    """Weights of the sequences' tokens."""
    trains: bool
    """False if no token of the mini-batch has a weight, so that the optimizer step must be dropped."""

    def of(self, sequences: np.ndarray) -> "SequenceCoefficients":
        """Return the advantages and weights of some of the sequences.

        sequences: int [n], indices of these sequences.
        """
        return SequenceCoefficients(
            self.credit.part(sequences), chosen_rows(self.weights, sequences), self.trains
        )


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
    columns = [getattr(batch, name) for name in columns_of(options)]
    sums = SequenceSums.of(batch.cu_seqlens, mask, kept, kl, suffix, columns)
    return Measured(sums, suffix, factor, kept, metrics)


def step_coefficients(
    tables: list[SampleTable], sums: list[SequenceSums], config: Config, kl_controller: KLController
) -> tuple[list[SequenceCoefficients], Metrics]:
    """Return (coefficients of each mini-batch of a step, metrics of the KL in the reward).

    Advantages are computed over all mini-batches together, weights over each one. With
    algorithm.use_valid_token_scale, the advantages of a mini-batch are divided by its number of trained
    tokens.

    tables, sums: the sequences of each mini-batch, and the sums over their tokens.
    kl_controller: coefficient of the KL in the reward. It is updated if algorithm.use_kl_in_reward is set.
    """
    options = config.algorithm
    credit, metrics = step_credit(concatenated(tables), concatenated(sums), options, kl_controller)
    found, first = [], 0
    for table, own in zip(tables, sums, strict=True):
        rows = slice(first, first + len(own.trained))
        divisor = max(own.trained.sum(), 1.0) if options.use_valid_token_scale else 1.0
        weights = step_weights(table, own, config)
        counted = own.kept if options.mask_applies_to == MaskAppliesTo.all else own.trained
        trains = bool((weights.weight[counted > 0] != 0).any())
        found.append(SequenceCoefficients(credit.part(rows, divisor), weights, trains))
        first = rows.stop
    return found, metrics


def step_credit(
    table: SampleTable, sums: SequenceSums, options: AlgorithmConfig, kl_controller: KLController
) -> tuple[Credit, Metrics]:
    """Return (advantages, metrics of the KL in the reward) of a whole training step.

    With algorithm.use_kl_in_reward, the KL to the reference policy is subtracted from the rewards, and the
    coefficient in `kl_controller` is updated afterwards. Without this setting, the metrics are empty.

    table: group, trajectory and reward of each of the S sequences.
    sums: sums over the trained tokens of each sequence.
    """
    metrics: Metrics = {}
    coef = kl_controller.coef if options.use_kl_in_reward else 0.0
    inputs = AdvantageInputs(table, sums, coef, columns_of(options))
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
    correction rejects count in the denominator of this mean. With mismatch.renormalize, they do not: with
    algorithm.mask_applies_to=policy, they are left out of the mean of the policy term only; with
    mask_applies_to=all, they are left out of the means of KL and entropy too.

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
    batch: TrainBatch, measured: Measured, given: SequenceCoefficients, applies_to: MaskAppliesTo
) -> dict[str, np.ndarray | None]:
    """Return {name: array [T]} of advantage, weight, policy_factor and loss_mask for a micro-batch's tokens.

    policy_factor is None if there is no mismatch correction.

    measured: KL and mismatch correction of the micro-batch's tokens.
    given: advantages and weights of the micro-batch's sequences.
    applies_to: what happens to tokens that the mismatch correction rejects. "policy": they lose the policy
        term (factor 0). "all": they lose all terms, because they are removed from the loss mask.
    """
    sequence, mask, weights = batch.sequence_id, batch.loss_mask, given.weights
    advantage = given.credit.of_tokens(sequence, mask, measured.suffix)
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

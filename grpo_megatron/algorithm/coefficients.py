"""The numbers that multiply each token's loss: advantage, weight, and the factor of the policy term.

The weight is the token's share in the mean over the optimizer step. It multiplies the whole loss of the
token. The factor corrects the mismatch between the engine's and the trainer's log-probs. It multiplies only
the policy term, not KL and entropy.

They are computed in three stages, because the tokens are on the trainer's ranks and only the driver knows all
sequences of a step:

1. `measure` reads the tokens, on the ranks, and sums them up for each sequence.
2. `step_coefficients` computes a few numbers for each sequence from the sums, in the driver.
3. `token_coefficients` spreads these numbers over the tokens, on the ranks.
"""

from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.advantages import AdvantageInputs, Credit, advantages
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
    """Result of `measure`: values of the T tokens of a micro-batch, and their sums over each sequence."""

    sums: SequenceSums
    """The sums, from which advantages and weights are computed."""
    suffix: np.ndarray | None
    """float64 [T]. KL from each token to the end of its sequence. None: the reward contains no KL."""
    factor: np.ndarray | None
    """float32 [T]. Factor of the mismatch correction for the policy term. None: no correction."""
    kept: np.ndarray
    """bool [T]. False for tokens that the mismatch correction rejects."""
    metrics: Metrics
    """Metrics of the mismatch correction."""


@dataclass(frozen=True)
class SequenceWeights:
    """Weights of the sequences of one optimizer step."""

    weight: np.ndarray
    """float64 [S]. Weight of the loss of each trained token of the sequence."""
    factor: np.ndarray
    """float64 [S]. Multiplies only the policy term."""


@dataclass(frozen=True)
class SequenceCoefficients:
    """Numbers of the S sequences of a mini-batch. `token_coefficients` spreads them over the tokens."""

    credit: Credit
    """Advantages of the sequences' tokens."""
    weights: SequenceWeights
    """Weights of the sequences' tokens."""
    trains: bool
    """False if no token of the mini-batch has a weight, so that the optimizer step must be dropped."""

    def of(self, sequences: np.ndarray) -> "SequenceCoefficients":
        """Return the numbers of some of the sequences. sequences: int, their indices."""
        return SequenceCoefficients(
            self.credit.part(sequences), chosen_rows(self.weights, sequences), self.trains
        )


def measure(batch: TrainBatch, options: AlgorithmConfig, correction: Correction | None) -> Measured:
    """Compute the KL in the reward and the mismatch correction of a micro-batch's tokens, and sum them up.

    correction: what to do about differences between the engine's and the trainer's log-probs. None if they
        become known only in the training forward pass, or if no correction is configured.
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


def step_coefficients(
    tables: list[SampleTable], sums: list[SequenceSums], config: Config, kl_controller: KLController
) -> tuple[list[SequenceCoefficients], Metrics]:
    """Return (coefficients of each mini-batch of a step, metrics about them).

    Advantages are computed over all mini-batches together, weights over each one.

    tables, sums: the sequences of each mini-batch, and the sums over their tokens.
    kl_controller: see `step_credit`.
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
    """Return (advantages, metrics) of a whole step.

    With algorithm.use_kl_in_reward, the KL to the reference policy is subtracted from the rewards, and the
    coefficient in `kl_controller` is updated afterwards.
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
    """Return (mean, count) over the trajectories that have a trained token.

    - mean: each trajectory's mean KL over its trained tokens, averaged over the trajectories. 0.0 if there is
      no trajectory.
    - count: number of these trajectories.
    """
    found, rows = inputs.trajectories, np.flatnonzero(inputs.sums.trained)
    if not len(rows):
        return 0.0, 0
    kl = np.bincount(found.of_sequence[rows], inputs.sums.kl[rows])
    return float((kl / found.tokens).mean()), len(found.tokens)


def step_weights(table: SampleTable, sums: SequenceSums, config: Config) -> SequenceWeights:
    """Return the weights of the sequences of one optimizer step.

    A token that the mismatch correction rejects loses its policy term. It keeps KL and entropy, unless
    algorithm.mask_applies_to is "all". By default it still counts in the denominator of the mean. With
    mismatch.renormalize, the mean is taken only over the tokens that are kept.
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
    """Return the arrays advantage, weight, policy_factor and loss_mask of one micro-batch, each [T].

    given: the numbers of the micro-batch's sequences.
    applies_to: "all": tokens that the mismatch correction rejects are no longer trained tokens.
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

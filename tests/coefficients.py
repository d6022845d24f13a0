"""A step's coefficients in one process, as ranks and driver compute them together."""

import numpy as np

from grpo_megatron.algorithm.coefficients import measure, step_coefficients, token_coefficients
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.batch.sequence_weights import sequence_weights
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.schema import Config
from grpo_megatron.metrics import Metrics, merge


def set_coefficients(
    batches: list[TrainBatch], config: Config, correction: Correction | None, controller: KLController
) -> Metrics:
    """Set the coefficients of a step's mini-batches, each of which is one micro-batch. Return metrics."""
    measured = [measure(batch, config.algorithm, correction) for batch in batches]
    tables, sums = [batch.table for batch in batches], [one.sums for one in measured]
    coefficients, metrics = step_coefficients(tables, sums, config, controller)
    for batch, one, given in zip(batches, measured, coefficients, strict=True):
        batch.set(**token_coefficients(batch, one, given, config.algorithm.mask_applies_to))
    return metrics | merge([one.metrics for one in measured])


def token_weights(batch: TrainBatch, mode: str, max_response_length: int) -> np.ndarray:
    """Return the loss weight of each token of one optimizer step, float32 [T], 0 for untrained tokens.

    mode: kind of mean over tokens, algorithm.loss_agg_mode. `sequence_weights` has the formulas.
    max_response_length: used by mode seq-mean-token-sum-norm, in tokens.
    """
    trained = np.add.reduceat(batch.loss_mask, batch.cu_seqlens[:-1], dtype=np.float64)
    weights = sequence_weights(batch.table, trained, mode, max_response_length)
    return np.where(batch.loss_mask, weights[batch.sequence_id], 0.0).astype(np.float32)

"""MiniBatches: the mini-batches of a training step on one rank, with what was computed for their tokens."""

from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.algorithm.coefficients import (
    Measured,
    SequenceCoefficients,
    measure,
    token_coefficients,
)
from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.algorithm.mismatch import in_context, measure_mismatch
from grpo_megatron.batch.sample import Sample
from grpo_megatron.batch.table import concatenated
from grpo_megatron.batch.train_batch import TrainBatch, fetched_batches
from grpo_megatron.config.rollout import OnUpdate
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.megatron.passes import Passes
from grpo_megatron.megatron.process_groups import RankInfo
from grpo_megatron.megatron.results import Measurement, TrainResult
from grpo_megatron.metrics import concrete, merge

# (step, index of the mini-batch within the step)
Key = tuple[int, int]


@dataclass
class _MiniBatch:
    """This data-parallel replica's part of a mini-batch, with what was computed for its tokens."""

    samples: list[TrainBatch]
    """The samples of each micro-batch. On the last pipeline stage, log-probs are added to them (old_logp and
    ref_logp)."""
    measured: list[Measured]
    """Result of coefficients.measure for each micro-batch. Empty except on the last pipeline stage."""
    weighted: list[TrainBatch]
    """The samples with the coefficients of the newest training pass. Empty before the first training pass,
    and on other pipeline stages than the last."""


class MiniBatches:
    """Holds the mini-batches of a training step on one rank, and runs the passes over them.

    All ranks must call each method. Each data-parallel replica has its own part of a mini-batch. One rank of
    each replica (RankInfo.reports) returns the results for this part. The other ranks return None.

    `measure` receives the samples, which stay on the ranks for the whole step. The ranks of the last pipeline
    stage compute and keep log-probs and loss coefficients. Only sums over each sequence are sent to the
    driver. `read` returns arrays for diagnosis.
    """

    def __init__(self, passes: Passes, config: Config, rank: RankInfo):
        """Create the object. It has no mini-batches until `measure` is called.

        passes: runs forward passes and training steps over micro-batches.
        rank: this process's rank in each process group.
        """
        self._passes, self._config, self._stage = passes, config, rank.pp_rank
        self._is_last_stage, self._reports = rank.last_stage, rank.reports
        self._kept: dict[Key, _MiniBatch] = {}

    def measure(
        self, samples: dict[Key, list[list[Sample]]], version: int | None = None
    ) -> dict[Key, Measurement] | None:
        """Receive the mini-batches of a step, compute their log-probs, and return sums over each sequence.

        All ranks must call this. One rank of each data-parallel replica returns {key: sums and metrics of the
        replica's part of the mini-batch}. The other ranks return None. The mini-batches of the step before
        are discarded.

        The old policy's log-probs are computed for all mini-batches before those of the reference. So the
        reference's weights are swapped in and out only once.

        samples: {(step, index of the mini-batch): samples of each micro-batch of this rank's replica}.
        version: version of the weights that are trained, from which the age of each token is computed. None:
            no sample was made with older weights, and no ages are computed.
        """
        parts = [part for parts in samples.values() for part in parts]
        batches = iter(fetched_batches(parts, self._stage, version))
        self._kept = {key: _MiniBatch([next(batches) for _ in samples[key]], [], []) for key in samples}
        if version is not None and self._config.rollout.on_update == OnUpdate.keep:
            # The engine's KV cache outlives a weight sync. So the log-prob of a new token may come from keys
            # and values of older weights, even those of another sequence with the same prefix.
            for kept in self._kept.values():
                for batch in kept.samples:
                    batch.age = np.maximum(batch.age, 1)
        self._compute_old()
        self._compute_reference()
        if self._is_last_stage:
            self._measure_tokens()
        return {key: self._measurement(kept) for key, kept in self._kept.items()} if self._reports else None

    def _compute_old(self) -> None:
        """Set old_logp, the old policy's log-probs, in all samples, as train.old_logprobs says.

        - recompute: a forward pass computes them.
        - rollout: the engine's log-probs are used.
        - current: they stay zero, because only the training pass computes them.
        """
        source = self._config.train.old_logprobs
        for key, kept in self._kept.items():
            if source == OldLogprobs.recompute:
                self._set("old_logp", kept, self._passes.logprobs(kept.samples, key=key, trained_only=True))
            elif source == OldLogprobs.rollout:
                for batch in kept.samples:
                    batch.old_logp = batch.rollout_logp

    def _compute_reference(self) -> None:
        """Set ref_logp, the reference's log-probs, in all samples. Do nothing if the algorithm needs none.

        For the exact KL, the reference's last hidden states are stored too (MicroBatch.reference_hidden).
        """
        algorithm = self._config.algorithm
        if not algorithm.needs_reference:
            return
        keep_hidden = PolicyLoss(algorithm).needs_full_kl
        with self._passes.reference():
            for key, kept in self._kept.items():
                logp = self._passes.logprobs(
                    kept.samples, reference=True, key=key, keep_hidden=keep_hidden, trained_only=True
                )
                self._set("ref_logp", kept, logp)

    def _set(self, name: str, kept: _MiniBatch, values: np.ndarray | None) -> None:
        """Set a column of a mini-batch's samples. Do nothing if `values` is None.

        name: name of the column in TrainBatch.
        values: float32 [T], one value per token of the mini-batch. None on earlier pipeline stages.
        """
        if values is None:
            return
        ends = np.cumsum([batch.num_tokens for batch in kept.samples])
        for batch, own in zip(kept.samples, np.split(values, ends[:-1]), strict=True):
            batch.set(**{name: own})

    @property
    def _is_known(self) -> bool:
        """True if the trainer's log-probs are computed before training (train.old_logprobs=recompute)."""
        return self._config.train.old_logprobs == OldLogprobs.recompute

    def _measure_tokens(self) -> None:
        """Compute each token's KL and mismatch correction, and sums over each sequence, for all mini-batches.

        The results are stored in the mini-batches (field `measured`). Every rank of the last pipeline stage
        does this, because `train_step` needs the results there.
        """
        correction = Correction.from_config(self._config.mismatch) if self._is_known else None
        for kept in self._kept.values():
            kept.measured = [measure(batch, self._config.algorithm, correction) for batch in kept.samples]

    def _measurement(self, kept: _MiniBatch) -> Measurement:
        """Return the sums and metrics of a mini-batch that `_measure_tokens` has measured, for the driver."""
        samples = kept.samples
        metrics = merge([one.metrics for one in kept.measured])
        if self._is_known:
            metrics |= measure_mismatch(samples)
        has_nan = any(np.isnan(logp).any() for batch in samples for logp in (batch.old_logp, batch.ref_logp))
        sums = concatenated([one.sums for one in kept.measured])
        return Measurement(sums, *concrete([metrics]), has_nan)

    def train_step(
        self, key: Key, coefficients: SequenceCoefficients, loss: PolicyLoss, step_tokens: int
    ) -> TrainResult | None:
        """Take one optimizer step on a mini-batch that `measure` has received. All ranks must call this.

        One rank of each data-parallel replica returns a TrainResult. The other ranks return None. The step is
        dropped, so that no weight changes, if coefficients.trains is False, if a metric exceeds its limit in
        loss.limits, if the gradient norm is not finite, or if it is above optimizer.max_grad_norm_to_step.

        key: (step, index of the mini-batch within the step).
        coefficients: advantages and weights of this replica's sequences, in the order of the micro-batches.
        loss: function that computes the loss of each token.
        step_tokens: number of tokens of the mini-batch over all replicas, padding excluded.
        """
        kept, samples = self._kept[key], self._kept[key].samples
        if self._is_last_stage:
            ends = np.cumsum([batch.num_sequences for batch in samples])
            rows = np.split(np.arange(ends[-1]), ends[:-1])
            applies_to = self._config.algorithm.mask_applies_to
            kept.weighted = samples = [
                replace(batch, **token_coefficients(batch, measured, coefficients.of(own), applies_to))
                for batch, measured, own in zip(samples, kept.measured, rows, strict=True)
            ]
        is_current = self._config.train.old_logprobs == OldLogprobs.current
        drop = not coefficients.trains
        result = self._passes.train_step(samples, loss, step_tokens, is_current, key, drop)
        return result and replace(result, metrics=in_context(result.metrics, samples))

    def read(self, key: Key, names: tuple[str, ...]) -> dict[str, np.ndarray] | None:
        """Return {name: array [T, ...]} of a mini-batch's T tokens on this replica, for diagnosis.

        The tokens are in the order of the micro-batches. One rank of each data-parallel replica returns the
        arrays. The other ranks return None.

        key: (step, index of the mini-batch within the step).
        names: names of the arrays, which are columns of TrainBatch. Advantages and weights are zero before
            the first `train_step`.
        """
        kept = self._kept[key]
        if not self._reports:
            return None
        batches = kept.weighted or kept.samples
        return {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in names}

    def read_sequences(
        self, rows: dict[Key, list[int]], names: tuple[str, ...]
    ) -> dict[Key, list[tuple[np.ndarray, ...]]] | None:
        """Return per-token arrays of some sequences of this replica, so that the driver can show them.

        The result has, for each key, a tuple of arrays [n, ...] for each sequence of n tokens. One rank of
        each data-parallel replica returns it. The other ranks return None.

        rows: for each mini-batch, indices of sequences in the order of the replica's micro-batches.
        names: names of the arrays, which are columns of TrainBatch.
        """
        if not self._reports:
            return None
        return {key: [self._row(key, index, names) for index in own] for key, own in rows.items()}

    def _row(self, key: Key, index: int, names: tuple[str, ...]) -> tuple[np.ndarray, ...]:
        for batch in self._kept[key].samples:
            if index < batch.num_sequences:
                start, end = batch.cu_seqlens[index : index + 2]
                return tuple(getattr(batch, name)[start:end] for name in names)
            index -= batch.num_sequences
        raise IndexError(f"mini-batch {key} lacks a sequence")

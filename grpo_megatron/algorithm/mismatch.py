"""Measurement of the mismatch between the log-probs of engine and trainer for the same tokens and weights.

correction.py defines delta and the ratio, and corrects the loss for the mismatch.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import MismatchAction, MismatchConfig
from grpo_megatron.metrics import Max, Mean, Metrics, RatioQuantiles, Top

# Token ids int [n] -> text.
Decode = Callable[[np.ndarray], str]


def mismatch_metrics(
    rollout_logp: torch.Tensor,
    logp: torch.Tensor,
    mask: torch.Tensor,
    index_in_step: torch.Tensor | None = None,
) -> Metrics:
    """Return metrics of how far the engine's log-probs are from the trainer's.

    With delta = logp - rollout_logp and ratio = exp(delta), the metrics over trained tokens are:

    - mismatch/max and mismatch/mean: maximum and mean of |delta|, in nats.
    - mismatch/k3: mean of ratio - 1 - delta, an estimate of KL(engine || trainer) in nats.
    - mismatch/ratio: quantiles of the ratio.
    - mismatch/worst: the tokens with the largest |delta|, as rows (|delta|, index_in_step, engine's
      log-prob, trainer's log-prob). Only if `index_in_step` is given.

    rollout_logp, logp: float [t], log-probs of the same t tokens in the engine and in the trainer.
    mask: bool [t], True for trained tokens.
    index_in_step: int64 [t], index of each token among all tokens of the training step.
    """
    logp = logp.detach()
    delta = torch.where(mask, logp - rollout_logp, 0)
    difference = delta.abs()
    clamped = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    count = mask.sum()
    metrics: Metrics = {
        "mismatch/max": Max(difference.max()),
        "mismatch/mean": Mean(difference.sum(), count),
        "mismatch/k3": Mean((clamped.expm1() - clamped).sum(), count),
        "mismatch/ratio": RatioQuantiles.of(delta, mask),
    }
    if index_in_step is not None:
        # float64 represents every index exactly.
        columns = (difference, index_in_step, rollout_logp, logp)
        rows = torch.stack([column.double() for column in columns], dim=1)
        metrics["mismatch/worst"] = Top.of(rows, mask)
    return metrics


def measure_mismatch(batch: TrainBatch) -> Metrics:
    """Return the metrics of the mismatch between engine and trainer for a batch (see `mismatch_metrics`).

    batch.old_logp has the trainer's log-probs. They must have been computed with the same weights that the
    engine sampled with.
    """
    arrays = (batch.rollout_logp, batch.old_logp, batch.loss_mask, batch.index_in_step)
    return mismatch_metrics(*map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class MismatchReport:
    """Findings on a step's mismatch between engine and trainer, and whether the run must stop.

    `mismatch_report` returns this object.
    """

    worst: str
    """One line for each of the tokens with the largest mismatch. The line shows the token in its context."""
    text: str
    """Message to the user. Empty if the mismatch is within mismatch.threshold, or if mismatch.action asks for
    no message."""
    stop: bool
    """True if the run must stop."""


def mismatch_report(
    metrics: Metrics, batches: list[TrainBatch], config: MismatchConfig, decode: Decode | None
) -> MismatchReport:
    """Return the report on a step's mismatch: the message to the user, and whether the run must stop.

    The mismatch is the difference between the engine's and the trainer's log-probs of the same tokens.

    metrics: merged results of `mismatch_metrics` for the step's batches.
    batches: the mini-batches of the step.
    decode: function from token ids to text, to show the worst tokens. If None, token ids are shown.
    """
    whole = TrainBatch.concatenate(batches)
    decode = decode or (lambda ids: " ".join(map(str, ids)))
    worst = describe_worst(metrics["mismatch/worst"].result(), whole.tokens, whole.cu_seqlens, decode)
    largest = metrics["mismatch/max"].result()
    text = ""
    if config.action in (MismatchAction.warn, MismatchAction.stop) and not largest <= config.threshold:
        text = (
            f"engine and trainer differ by up to {largest:.4g} nats in a token's log-prob, more than "
            f"mismatch.threshold={config.threshold}; the worst tokens:\n{worst}"
        )
    return MismatchReport(worst, text, bool(text) and config.action == MismatchAction.stop)


def describe_worst(
    worst: list[tuple], tokens: np.ndarray, cu_seqlens: np.ndarray, decode: Decode, context: int = 12
) -> str:
    """Return one line of text per row of `worst`: both log-probs, and the >>marked<< token in its context.

    worst: rows (|delta|, index_in_step, engine's log-prob, trainer's log-prob) of the metric mismatch/worst.
        `index_in_step` is an index into `tokens`. The log-probs are those of the token after this index.
    tokens: int [T], the token ids of the whole step.
    cu_seqlens: int [S+1], start of each of the step's S sequences in `tokens`, and the end of the last one.
    decode: function from token ids to text.
    context: number of tokens to show before the marked token. Half as many are shown after it.
    """
    lines = []
    for difference, index, engine, trainer in worst:
        target = int(index) + 1
        sequence = int(np.searchsorted(cu_seqlens, int(index), side="right")) - 1
        start, end = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        before = decode(tokens[max(start, target - context) : target])
        after = decode(tokens[target + 1 : min(end, target + 1 + context // 2)])
        text = f"{before}>>{decode(tokens[target : target + 1])}<<{after}"
        lines.append(
            f"|delta| {difference:.4g} (engine {engine:.4f}, trainer {trainer:.4f}), token {target - start} "
            f"of {end - start} in sequence {sequence}: {text!r}"
        )
    return "\n".join(lines)

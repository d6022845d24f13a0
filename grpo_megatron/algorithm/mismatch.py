"""Measurement of the mismatch between the log-probs of engine and trainer for the same tokens and weights.

correction.py defines delta and the ratio, and contains what the loss does about the mismatch.
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
    rollout_logp: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor, number: torch.Tensor | None = None
) -> Metrics:
    """Return metrics of how far the engine's log-probs are from the trainer's.

    All tensors are [t], mask is bool.

    The metrics are: max and mean of |delta|; k3 = mean of ratio - 1 - delta, an estimate of KL(engine ||
    trainer); quantiles of the ratio.

    number: int64 [t], identifies the tokens. If given, the worst tokens are added as rows (|delta|, number,
        engine's log-prob, trainer's).
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
    if number is not None:
        # float64 represents the number of every token exactly.
        rows = torch.stack([column.double() for column in (difference, number, rollout_logp, logp)], dim=1)
        metrics["mismatch/worst"] = Top.of(rows, mask)
    return metrics


def measure_mismatch(batch: TrainBatch) -> Metrics:
    """Return mismatch_metrics of a batch.

    Its old log-probs must be those of the weights that the engine sampled with.
    """
    arrays = (batch.rollout_logp, batch.old_logp, batch.loss_mask, batch.number)
    return mismatch_metrics(*map(torch.from_numpy, arrays))


@dataclass(frozen=True)
class MismatchReport:
    """The result of `mismatch_report`."""

    worst: str
    """The worst tokens in their context."""
    text: str
    """Message to the user, or empty."""
    stop: bool
    """True if the run must stop."""


def mismatch_report(
    metrics: Metrics, batches: list[TrainBatch], config: MismatchConfig, decode: Decode | None
) -> MismatchReport:
    """Return the report on the mismatch of a step.

    metrics: mismatch_metrics of the step's batches.
    decode: function from token ids to text. If None, the ids are shown.
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
    """Return one line per row of mismatch/worst: both log-probs, and the >>marked<< token in its context.

    A row's `number` is a stream position. Its log-prob is that of the next token.

    tokens: int [T], of the whole step.
    cu_seqlens: [S+1], of the whole step.
    context: number of tokens shown before. Half as many are shown after.
    """
    lines = []
    for difference, number, engine, trainer in worst:
        target = int(number) + 1
        sequence = int(np.searchsorted(cu_seqlens, int(number), side="right")) - 1
        start, end = int(cu_seqlens[sequence]), int(cu_seqlens[sequence + 1])
        before = decode(tokens[max(start, target - context) : target])
        after = decode(tokens[target + 1 : min(end, target + 1 + context // 2)])
        text = f"{before}>>{decode(tokens[target : target + 1])}<<{after}"
        lines.append(
            f"|delta| {difference:.4g} (engine {engine:.4f}, trainer {trainer:.4f}), token {target - start} "
            f"of {end - start} in sequence {sequence}: {text!r}"
        )
    return "\n".join(lines)

"""Measurement of the mismatch between the log-probs of engine and trainer for the same tokens and weights.

correction.py defines delta and the ratio, and corrects the loss for the mismatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.algorithm import MismatchAction, MismatchConfig
from grpo_megatron.metrics import Max, Mean, Metrics, RatioQuantiles, Top, merge

# Tokens of this age and older ones share a metric.
_OLDEST = 4
# Token ids int [n] -> text.
Decode = Callable[[np.ndarray], str]
# How many tokens to show before one with a large mismatch. Half as many are shown after it.
CONTEXT = 12


def mismatch_metrics(
    rollout_logp: torch.Tensor,
    logp: torch.Tensor,
    mask: torch.Tensor,
    token_index: torch.Tensor | None = None,
    age: torch.Tensor | None = None,
) -> Metrics:
    """Return metrics of how far the engine's log-probs are from the trainer's.

    With delta = logp - rollout_logp and ratio = exp(delta), the metrics over trained tokens of age 0 are:

    - mismatch/max and mismatch/mean: maximum and mean of |delta|, in nats.
    - mismatch/k3: mean of ratio - 1 - delta, an estimate of KL(engine || trainer) in nats.
    - mismatch/ratio: quantiles of the ratio.
    - mismatch/worst: the tokens with the largest |delta|, as rows (|delta|, token_index, engine's log-prob,
      trainer's log-prob). Only if `token_index` is given. `in_context` adds the tokens around each.

    Older tokens are measured separately, because the policy has changed since they were sampled. Their
    metrics are staleness/logprob_max, _mean, _k3 and _ratio. staleness/ratio_change_age_K is the mean of
    |ratio-1| over tokens of age K; the largest K covers all older tokens, too.

    rollout_logp, logp: float [t], log-probs of the same t tokens in the engine and in the trainer.
    mask: bool [t], True for trained tokens.
    token_index: int64 [t], the index by which `in_context` finds each token again.
    age: int32 [t], number of changes of the weights since each token was sampled. None: 0 for all tokens, and
        no metrics of older tokens.
    """
    logp = logp.detach()
    delta = logp - rollout_logp
    current = mask if age is None else mask & (age == 0)
    difference, metrics = _differences(delta, current, "mismatch/")
    if age is not None:
        metrics |= _differences(delta, mask & (age > 0), "staleness/logprob_")[1]
        for old in range(1, _OLDEST + 1):
            of_age = mask & (age == old if old < _OLDEST else age >= old)
            change = torch.where(of_age, delta, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1().abs()
            metrics[f"staleness/ratio_change_age_{old}"] = Mean(change.sum(), of_age.sum())
    if token_index is not None:
        # float64 represents every index exactly.
        columns = (difference, token_index, rollout_logp, logp)
        rows = torch.stack([column.double() for column in columns], dim=1)
        metrics["mismatch/worst"] = Top.of(rows, current)
    return metrics


def _differences(delta: torch.Tensor, mask: torch.Tensor, prefix: str) -> tuple[torch.Tensor, Metrics]:
    """Return (|delta|, metrics of delta) over the tokens whose mask is True. |delta| is 0 for the others.

    delta: float [t], the trainer's minus the engine's log-prob of each token.
    prefix: beginning of the names of the metrics.
    """
    delta = torch.where(mask, delta, 0)
    difference = delta.abs()
    clamped = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    count = mask.sum()
    return difference, {
        f"{prefix}max": Max(difference.max()),
        f"{prefix}mean": Mean(difference.sum(), count),
        f"{prefix}k3": Mean((clamped.expm1() - clamped).sum(), count),
        f"{prefix}ratio": RatioQuantiles.of(delta, mask),
    }


def with_tokens(metrics: Metrics) -> Metrics:
    """Return the metrics without the mismatch and staleness metrics that no token contributed to.

    `mismatch_metrics` returns metrics for every age of tokens, even if the step has no token of this age. All
    other metrics are kept.
    """
    absent = [name for name, metric in metrics.items() if isinstance(metric, Mean) and not metric.count]
    left_out = {name for name in absent if name.startswith("staleness/ratio_change_age_")}
    for prefix in ("mismatch/", "staleness/logprob_"):
        if f"{prefix}mean" in absent:
            left_out |= {f"{prefix}{name}" for name in ("max", "mean", "k3", "ratio", "worst")}
    return {name: metric for name, metric in metrics.items() if name not in left_out}


def measure_mismatch(batches: list[TrainBatch]) -> Metrics:
    """Return `mismatch_metrics` of some micro-batches together, with the worst tokens in their context.

    In mismatch/worst, each of the worst tokens is a `WorstToken`, which includes the tokens around it.

    batches: micro-batches whose old_logp has the trainer's log-probs. The log-probs of tokens of age 0 must
        have been computed with the same weights that the engine sampled with.
    """
    found, first = [], 0
    for batch in batches:
        index = np.arange(first, first + batch.num_tokens)
        arrays = (batch.rollout_logp, batch.old_logp, batch.loss_mask, index)
        age = None if batch.age is None else torch.from_numpy(batch.age)
        found.append(mismatch_metrics(*map(torch.from_numpy, arrays), age))
        first += batch.num_tokens
    return in_context(merge(found), batches)


class WorstToken(NamedTuple):
    """One of the tokens whose log-probs differ most between engine and trainer, in its context."""

    difference: float
    """|delta| in nats."""
    engine: float
    """The engine's log-prob of the token."""
    trainer: float
    """The trainer's log-prob of the token."""
    trajectory_id: int
    """Id of the trajectory that the token belongs to."""
    position: int
    """Index of the token in its sequence."""
    length: int
    """Number of tokens of its sequence."""
    before: tuple[int, ...]
    """Ids of the tokens before it, at most `CONTEXT`."""
    token: int
    """Id of the token."""
    after: tuple[int, ...]
    """Ids of the tokens after it, at most half of `CONTEXT`."""


def in_context(metrics: Metrics, batches: list[TrainBatch]) -> Metrics:
    """Return the metrics with each row of mismatch/worst replaced by a `WorstToken`.

    A WorstToken describes one of the tokens with the largest mismatch. It includes the tokens around this
    token, so the driver can show it without having the batches.

    metrics: merged `mismatch_metrics` of `batches`, with a `token_index` that numbers the tokens of all
        batches one after the other, from 0. Metrics without mismatch/worst are returned unchanged.
    """
    if "mismatch/worst" not in metrics:
        return metrics
    worst = metrics["mismatch/worst"]
    return metrics | {"mismatch/worst": Top([_in_context(row, batches) for row in worst.result()], worst.k)}


def _in_context(row: tuple, batches: list[TrainBatch]) -> WorstToken:
    difference, index, engine, trainer = row
    firsts = np.cumsum([0] + [batch.num_tokens for batch in batches])
    number = int(np.searchsorted(firsts, index, side="right")) - 1
    batch, index = batches[number], int(index) - int(firsts[number])
    sequence = int(np.searchsorted(batch.cu_seqlens, index, side="right")) - 1
    start, end = (int(edge) for edge in batch.cu_seqlens[sequence : sequence + 2])
    target = index + 1  # a position predicts the token after it

    def ids(first: int, last: int) -> tuple[int, ...]:
        return tuple(batch.tokens[first:last].tolist())

    return WorstToken(
        difference=difference,
        engine=engine,
        trainer=trainer,
        trajectory_id=int(batch.trajectory_id[sequence]),
        position=target - start,
        length=end - start,
        before=ids(max(start, target - CONTEXT), target),
        token=int(batch.tokens[target]),
        after=ids(target + 1, min(end, target + 1 + CONTEXT // 2)),
    )


@dataclass(frozen=True)
class MismatchReport:
    """Result of `mismatch_report`: a step's worst mismatch, the message to the user, and whether to stop."""

    worst: str
    """One line for each of the tokens with the largest mismatch. The line shows the token in its context."""
    text: str
    """Message to the user. Empty if the mismatch is within mismatch.threshold, or if mismatch.action asks for
    no message."""
    stop: bool
    """True if the run must stop."""


def ids_as_text(ids: np.ndarray) -> str:
    """Return token ids as a text of numbers, for runs without a tokenizer."""
    return " ".join(map(str, ids.tolist()))


def mismatch_report(metrics: Metrics, config: MismatchConfig, decode: Decode) -> MismatchReport:
    """Return the report on a step's mismatch: the message to the user, and whether the run must stop.

    The mismatch is the difference between the engine's and the trainer's log-probs of the same tokens.

    metrics: merged results of `mismatch_metrics` for the step, after `in_context`.
    decode: function from token ids to text, to show the worst tokens.
    """
    worst = "\n".join(_described(token, decode) for token in metrics["mismatch/worst"].result())
    largest = metrics["mismatch/max"].result()
    text = ""
    if config.action in (MismatchAction.warn, MismatchAction.stop) and not largest <= config.threshold:
        text = (
            f"engine and trainer differ by up to {largest:.4g} nats in a token's log-prob, more than "
            f"mismatch.threshold={config.threshold}; the worst tokens:\n{worst}"
        )
    return MismatchReport(worst, text, bool(text) and config.action == MismatchAction.stop)


def _described(worst: WorstToken, decode: Decode) -> str:
    """Return one line about a token: both log-probs, and the >>marked<< token between its neighbours."""
    before, token, after = (
        decode(np.array(ids, dtype=np.int64)) for ids in (worst.before, (worst.token,), worst.after)
    )
    text = f"{before}>>{token}<<{after}"
    return (
        f"|delta| {worst.difference:.4g} (engine {worst.engine:.4f}, trainer {worst.trainer:.4f}), token "
        f"{worst.position} of {worst.length} in trajectory {worst.trajectory_id}: {text!r}"
    )

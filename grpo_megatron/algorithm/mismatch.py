"""Engine and trainer compute different log-probs for the same tokens and weights: how far apart, and what to do.

delta = trainer's log-prob - engine's, at each trained token; ratio = exp(delta). Under
train.old_logprobs=recompute both are known before training, else in the training forward only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO
from grpo_megatron.metrics import Max, Mean, Metrics, RatioQuantiles, Top

# kind: (ratio_low, ratio_high) as published or recommended.
RATIO_BOUNDS = {
    "none": (0.0, float("inf")),
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq_tis": (0.0, 2.0),
    "mis": (0.0, 2.0),
    "rejection": (0.999, 1.001),
}
# Those that multiply the policy term by a ratio, beside masking.
WEIGHTING = ("tis", "icepop", "seq_tis", "mis")


def mismatch_metrics(
    rollout_logp: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor, number: torch.Tensor | None = None
) -> Metrics:
    """How far the engine's log-probs are from the trainer's; all tensors [t], mask bool.

    max and mean of |delta|; k3 = mean of ratio - 1 - delta, an estimate of KL(engine || trainer);
    quantiles of the ratio. With number (int64 [t], names of the tokens) also the worst tokens, as
    rows (|delta|, number, engine's log-prob, trainer's).
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
        "mismatch/ratio": RatioQuantiles.of(delta[mask]),
    }
    if number is not None:
        # float64, in which every token's number is exact.
        rows = torch.stack([column.double() for column in (difference, number, rollout_logp, logp)], dim=1)
        metrics["mismatch/worst"] = Top.of(rows[mask])
    return metrics


@dataclass(frozen=True)
class Correction:
    """What the mismatch does to the policy term of each token.

    kind, with rho the ratio of a token, and rho_y the product over the trained tokens of its sequence:
    tis: weight min(rho, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training"). icepop: weight rho, tokens with rho outside [low, high] masked
    (arXiv:2510.18855). seq_tis: weight min(rho_y, high). mis: weight rho_y, sequences with rho_y
    outside masked (both Liu et al. 2025, "When Speed Kills Stability"). rejection: weight 1, sequences
    whose geometric mean of rho is outside masked. max_difference: tokens with a greater |delta| are
    masked, in addition; None: none.
    """

    kind: str = "none"
    low: float = 0.0
    high: float = float("inf")
    max_difference: float | None = None

    @classmethod
    def from_config(cls, config) -> "Correction | None":
        """config: config.schema.MismatchConfig; None if it asks for nothing."""
        masking = config.action == "mask"
        if config.correction == "none" and not masking:
            return None
        low, high = RATIO_BOUNDS[config.correction]
        return cls(
            config.correction.value,
            low if config.ratio_low is None else config.ratio_low,
            high if config.ratio_high is None else config.ratio_high,
            config.threshold if masking else None,
        )

    def __call__(
        self, rollout_logp: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight [t], kept bool [t]), detached; 1 and True outside the mask.

        sequence_sum: [t] -> [t], at each token the sum over its sequence.
        """
        delta = torch.where(mask, logp.detach() - rollout_logp, 0)
        log_ratio = delta
        if self.kind in ("seq_tis", "mis", "rejection"):
            log_ratio = sequence_sum(delta)
        if self.kind == "rejection":
            log_ratio = log_ratio / sequence_sum(mask.to(delta.dtype)).clamp(min=1)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        kept = torch.ones_like(mask)
        weight = torch.ones_like(ratio)
        if self.kind in ("tis", "seq_tis"):
            weight = ratio.clamp(self.low, self.high)
        elif self.kind != "none":
            kept = (ratio >= self.low) & (ratio <= self.high)
            weight = weight if self.kind == "rejection" else torch.where(kept, ratio, 0)
        if self.max_difference is not None:
            kept = kept & (delta.abs() <= self.max_difference)
        return torch.where(mask, weight, 1), kept | ~mask


def describe_worst(worst: list[tuple], tokens: np.ndarray, cu_seqlens: np.ndarray, decode, context: int = 12) -> str:
    """One line per row of mismatch/worst: both log-probs, and the token >>marked<< in its context as text.

    tokens int [T], cu_seqlens [S+1] of the whole step: a row's number is the position whose next
    token the log-prob is of. decode: int array -> text. context: tokens shown before, and half as many after.
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
            f"|delta| {difference:.4g} (engine {engine:.4f}, trainer {trainer:.4f}), token {target - start} of {end - start} "
            f"in sequence {sequence}: {text!r}"
        )
    return "\n".join(lines)

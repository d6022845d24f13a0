"""Correction of the mismatch between engine and trainer: a factor and a mask for each token's policy term.

Engine and trainer compute slightly different log-probs for the same tokens and weights. Notation:

- delta: the trainer's minus the engine's log-prob of a trained token, in nats.
- rho = exp(delta): the token's ratio.
- rho_y: the product of the ratios of a sequence's trained tokens.

With train.old_logprobs=recompute, delta is known before training. Otherwise it becomes known only in the
training forward pass. A `Correction` can be called in both cases.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO
from grpo_megatron.config.algorithm import (
    MismatchAction,
    MismatchConfig,
    MismatchCorrection,
    MismatchRejection,
)

# Function [t] -> [t]: gives each token the sum of the values over all tokens of its sequence.
SequenceSum = Callable[[torch.Tensor], torch.Tensor]

# Default (low, high) bounds of the ratio, as published or recommended.
CORRECTION_BOUNDS = {
    MismatchCorrection.tis: (0.0, 2.0),
    MismatchCorrection.icepop: (0.5, 5.0),
    MismatchCorrection.seq_tis: (0.0, 2.0),
    MismatchCorrection.mis: (0.0, 2.0),
}
# Default (low, high) bounds. Only measures that are a ratio have published bounds. For KL estimates, no bound
# would fit every model.
REJECTION_BOUNDS = {
    MismatchRejection.token_ratio: (0.5, 5.0),
    MismatchRejection.seq_ratio: (0.0, 2.0),
    MismatchRejection.seq_geometric_ratio: (0.999, 1.001),
}
# Corrections that use the ratio of the whole sequence. The others use the ratio of each token.
OF_SEQUENCES = (MismatchCorrection.seq_tis, MismatchCorrection.mis)
# Corrections that mask tokens whose ratio is outside the bounds. The others truncate the ratio.
MASKING = (MismatchCorrection.icepop, MismatchCorrection.mis)


@dataclass(frozen=True)
class Weighting:
    """Importance weighting of the policy term, against the mismatch between engine and trainer.

    rho is a token's probability under the trainer divided by its probability under the engine. rho_y is the
    product of rho over a sequence's trained tokens. Each kind multiplies the policy term by another factor:

    - tis: rho clamped to [low, high], published with low = 0 (Yao et al. 2025, "Your Efficient RL Framework
      Secretly Brings You Off-Policy RL Training").
    - icepop: rho; tokens with rho outside [low, high] are masked (arXiv:2510.18855).
    - seq_tis: rho_y clamped to [low, high], published with low = 0 (Liu et al. 2025, "When Speed Kills
      Stability").
    - mis: rho_y; sequences with rho_y outside [low, high] are masked (Liu et al. 2025).
    """

    kind: MismatchCorrection
    low: float
    high: float

    def __call__(self, delta: torch.Tensor, sequence_sum: SequenceSum) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (factor, kept): the factor of each token's policy term, and whether the token is kept.

        - factor: float [t].
        - kept: bool [t], False for tokens that this weighting masks.

        delta: float [t], the trainer's minus the engine's log-prob of each token; 0 for untrained tokens.
        sequence_sum: function that gives each token the sum over all tokens of its sequence.
        """
        ratio = _exp(sequence_sum(delta) if self.kind in OF_SEQUENCES else delta)
        if self.kind in MASKING:
            return ratio, (ratio >= self.low) & (ratio <= self.high)
        return ratio.clamp(self.low, self.high), torch.ones_like(ratio, dtype=torch.bool)


@dataclass(frozen=True)
class Rejection:
    """Masking of tokens, or of whole sequences, on which engine and trainer disagree too much.

    A token or sequence is masked if its measure of the mismatch is outside [low, high]. delta is the
    trainer's minus the engine's log-prob of a token, and rho = exp(delta). `kind` chooses the measure:

    - token_ratio: rho of the token.
    - seq_ratio: the product of rho over a sequence's trained tokens.
    - seq_geometric_ratio: the geometric mean of rho over a sequence's trained tokens (Liu et al. 2025).
    - *_k2 and *_k3: delta²/2 and rho - 1 - delta, which estimate KL(engine || trainer) in nats. The prefix
      token_ takes the token's estimate; seq_sum_, seq_mean_ and seq_max_ take the sum, mean or maximum over
      the sequence. seq_max_ checks only `high`.
    """

    kind: MismatchRejection
    low: float
    high: float

    def __call__(self, delta: torch.Tensor, mask: torch.Tensor, sequence_sum: SequenceSum) -> torch.Tensor:
        """Return bool [t]: True for tokens that are kept, False for tokens that are masked.

        delta: float [t], the trainer's minus the engine's log-prob of each token; 0 for untrained tokens.
        mask: bool [t], True for trained tokens.
        sequence_sum: function that gives each token the sum over all tokens of its sequence.
        """
        level, _, measure = self.kind.value.rpartition("_")
        near = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = {"ratio": delta, "k2": near.square() / 2, "k3": near.expm1() - near}[measure]
        if level == "seq_max":
            # The maximum is within the bound if no token exceeds it. Counting these tokens needs only a sum,
            # the one reduction over sequences that the caller provides. `~(<=)` also counts NaN.
            return sequence_sum((~(values <= self.high)).to(delta.dtype)) == 0
        if level != "token":
            values = sequence_sum(values)
        if level in ("seq_mean", "seq_geometric"):
            values = values / sequence_sum(mask.to(delta.dtype)).clamp(min=1)
        if measure == "ratio":
            values = _exp(values)
        return (values >= self.low) & (values <= self.high)


@dataclass(frozen=True)
class Correction:
    """The configured corrections of the mismatch between engine and trainer, applied together.

    The corrections change only the policy term of a token's loss: they multiply it by a factor, or mask it. A
    token is kept if no correction masks it.
    """

    weighting: Weighting | None = None
    """Computes the factor of a kept token's policy term. None: the factor is 1."""
    rejection: Rejection | None = None
    """Chooses tokens or sequences to mask. None: no rejection."""
    max_difference: float | None = None
    """Largest difference between the engine's and the trainer's log-prob of a token, in nats. Tokens with a
    larger difference are masked too. None: no limit."""

    @classmethod
    def from_config(cls, config: MismatchConfig) -> "Correction | None":
        """Return the correction that the section `mismatch` configures, or None if it configures none."""
        weighting = rejection = None
        if config.correction != MismatchCorrection.none:
            bounds = _bounds(CORRECTION_BOUNDS[config.correction], config.ratio_low, config.ratio_high)
            weighting = Weighting(config.correction, *bounds)
        if config.rejection != MismatchRejection.none:
            published = REJECTION_BOUNDS.get(config.rejection, (0.0, float("inf")))
            rejection = Rejection(
                config.rejection, *_bounds(published, config.rejection_low, config.rejection_high)
            )
        limit = config.threshold if config.action == MismatchAction.mask else None
        found = cls(weighting, rejection, limit)
        return None if found == cls() else found

    def __call__(
        self, rollout_logp: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor, sequence_sum: SequenceSum
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (factor, kept): the factor of each token's policy term, and whether the token is kept.

        - factor: float [t], detached. 0 for masked tokens, 1 for untrained tokens.
        - kept: bool [t]. False for masked tokens, True for untrained tokens.

        rollout_logp, logp: float [t], the engine's and the trainer's log-probs of the same t tokens.
        mask: bool [t], True for trained tokens.
        sequence_sum: function that gives each token the sum over all tokens of its sequence.
        """
        delta = torch.where(mask, logp.detach() - rollout_logp, 0)
        factor, kept = torch.ones_like(delta), torch.ones_like(mask)
        if self.weighting:
            factor, kept = self.weighting(delta, sequence_sum)
        if self.rejection:
            kept = kept & self.rejection(delta, mask, sequence_sum)
        if self.max_difference is not None:
            kept = kept & (delta.abs() <= self.max_difference)
        return torch.where(mask, torch.where(kept, factor, 0), 1), kept | ~mask


def _exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio). `log_ratio` is clamped to ±MAX_LOG_RATIO first, so that nothing overflows."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _bounds(published: tuple[float, float], low: float | None, high: float | None) -> tuple[float, float]:
    """Return (low, high): the bounds that the user set, with the published value for a bound that is None."""
    return published[0] if low is None else low, published[1] if high is None else high

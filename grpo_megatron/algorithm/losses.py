"""Per-token losses. Pure tensor functions: nothing here knows of ranks, packs or prompts.

A loss object is called once per micro-batch with the log-probs of the training forward and the
arrays of the batch at the same positions. It returns one loss value per token; the caller sums
``weight * loss`` (see batch/token_weights.py), so no mean is taken here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import FULL_KL, kl_penalty, unbiased_kl
from grpo_megatron.algorithm.mismatch import mismatch_metrics
from grpo_megatron.algorithm.surrogates import RATIO_LEVELS, PolicyTerms, surrogate
from grpo_megatron.config.algorithm import AlgorithmConfig, MismatchAction, MismatchConfig
from grpo_megatron.metrics import Mean, Metrics


@dataclass(frozen=True)
class LossInputs:
    """What is known about each of t positions before the training forward; all tensors [t].

    mask bool: trained tokens. advantage, rollout_logp, ref_logp float32. old_logp float32, or None:
    the current policy is the old policy (its detached log-probs are used). sequence_sum: [t] -> [t],
    at each token the sum over all tokens of its sequence, wherever they are computed; detached.
    policy_factor float32: multiplies the policy term only; None: 1. number int64: the token's name in
    the metric of the worst mismatches; None: no such metric.
    """

    mask: torch.Tensor
    advantage: torch.Tensor
    rollout_logp: torch.Tensor
    ref_logp: torch.Tensor
    old_logp: torch.Tensor | None
    sequence_sum: Callable[[torch.Tensor], torch.Tensor]
    policy_factor: torch.Tensor | None = None
    number: torch.Tensor | None = None


class TokenLoss(Protocol):
    """needs_full_kl: wants full_kl. limits: {metric: largest value}; a step that exceeds one is dropped."""

    needs_full_kl: bool
    limits: dict[str, float]

    def __call__(
        self,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        inputs: LossInputs,
        full_kl: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """logp, entropy float32 [t] -> (loss [t], zero outside the mask; metrics).

        full_kl float32 [t]: the exact KL to the reference, given if needs_full_kl. All three are computed inside the mask alone;
        outside it they are zero.
        """


@dataclass(frozen=True)
class PolicyLoss:
    """ratio level × surrogate × KL to the reference × entropy bonus, each per token; fields as in config.schema.

    loss = factor · surrogate(ratio) + kl_loss_coef · KL - entropy_coeff · entropy. correction: of the
    mismatch, where it is known in the training forward only: it multiplies the policy term (by 0 where it
    masks), with mask_applies_to "all" what it masks loses KL and entropy too; token weights stay.
    early_stop_imp_ratio: largest mean of the ratio over the step's trained tokens, mismatch_limit: largest
    |log-prob difference| of engine and trainer; a step beyond is dropped.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    entropy_coeff: float = 0.0
    ratio_level: str = "token"
    surrogate: str = "clip"
    clip_ratio_c: float | None = None
    kl_loss_unbiased: bool = False
    mask_applies_to: str = "policy"
    early_stop_imp_ratio: float | None = None
    correction: Correction | None = None
    mismatch_limit: float | None = None

    @classmethod
    def from_config(
        cls, algorithm: AlgorithmConfig, mismatch: MismatchConfig, known_before: bool
    ) -> "PolicyLoss":
        """known_before: the trainer's log-probs are known before training, and what the mismatch asks for is done then."""
        same = {
            name: getattr(algorithm, name) for name in cls.__dataclass_fields__ if hasattr(algorithm, name)
        }
        if not known_before:
            same["correction"] = Correction.from_config(mismatch)
            same["mismatch_limit"] = mismatch.threshold if mismatch.action == MismatchAction.stop else None
        return cls(**same)

    @property
    def needs_full_kl(self) -> bool:
        return self.use_kl_loss and self.kl_loss_type == FULL_KL

    @property
    def limits(self) -> dict[str, float]:
        limits = {"actor/ratio": self.early_stop_imp_ratio, "mismatch/max": self.mismatch_limit}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __call__(self, logp, entropy, inputs, full_kl=None):
        mask = inputs.mask
        count = mask.sum()
        # Outside the mask the other side is 0 by convention, which may be far from logp:
        # exp() of that difference overflows, and inf * weight 0 is NaN.
        old_logp = (
            logp.detach() if inputs.old_logp is None else torch.where(mask, inputs.old_logp, logp.detach())
        )
        log_ratio = logp - old_logp
        used_ratio = RATIO_LEVELS[self.ratio_level](log_ratio, mask, inputs.sequence_sum)
        terms = PolicyTerms(logp, used_ratio, inputs.advantage, mask)
        loss, clipped = surrogate.get(self.surrogate)(terms, self)
        factor, kept = self._factor(logp, inputs)
        loss = torch.where(kept, factor * loss, 0.0)
        metrics: Metrics = {
            "actor/pg_loss": Mean(_masked_sum(loss, mask), count),
            "actor/clip_fraction": Mean(_masked_sum(clipped, mask), count),
            "actor/clip_fraction_high": Mean(_masked_sum(clipped & (log_ratio > 0), mask), count),
            "actor/clip_fraction_low": Mean(_masked_sum(clipped & (log_ratio < 0), mask), count),
            "actor/ratio": Mean(_masked_sum(terms.ratio, mask), count),
            "actor/ppo_kl": Mean(_masked_sum(-log_ratio, mask), count),
            "actor/entropy": Mean(_masked_sum(entropy, mask), count),
            **mismatch_metrics(inputs.rollout_logp, logp, mask, inputs.number),
        }
        if self.correction:
            metrics["mismatch/masked"] = Mean(_masked_sum(~kept, mask), count)
            metrics["mismatch/factor"] = Mean(_masked_sum(factor, mask & kept), (mask & kept).sum())
        if self.use_kl_loss:
            kl = self._kl(logp, log_ratio, inputs, full_kl)
            metrics["actor/kl_to_reference"] = Mean(_masked_sum(kl, mask), count)
            loss = loss + self.kl_loss_coef * kl
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * entropy
        trained = mask & kept if self.mask_applies_to == "all" else mask
        return torch.where(trained, loss, 0.0), metrics

    def _factor(self, logp: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """(factor of the policy term [t], tokens that keep it bool [t])."""
        factor, kept = torch.ones_like(logp), torch.ones_like(inputs.mask)
        if self.correction:
            factor, kept = self.correction(inputs.rollout_logp, logp, inputs.mask, inputs.sequence_sum)
        if inputs.policy_factor is not None:
            factor = factor * inputs.policy_factor
        return factor, kept

    def _kl(self, logp, log_ratio, inputs: LossInputs, full_kl) -> torch.Tensor:
        if self.needs_full_kl:
            return full_kl
        kl = kl_penalty(logp, torch.where(inputs.mask, inputs.ref_logp, logp.detach()), self.kl_loss_type)
        return unbiased_kl(kl, log_ratio) if self.kl_loss_unbiased else kl


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Supervised fine-tuning: negative log-likelihood of the response tokens."""

    needs_full_kl = False

    @property
    def limits(self) -> dict[str, float]:
        return {}

    def __call__(self, logp, entropy, inputs, full_kl=None):
        loss = torch.where(inputs.mask, -logp, 0.0)
        return loss, {"sft/loss_per_token": Mean(loss.detach().sum(), inputs.mask.sum())}


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values.detach().float(), 0.0).sum()

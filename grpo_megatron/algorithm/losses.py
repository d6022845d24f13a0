"""Losses with one value per token: the policy loss of RL, and the cross-entropy of supervised fine-tuning.

A loss object is called once per micro-batch, with the log-probs of the training forward pass and the arrays
of the batch at the same positions. It returns one loss value per token. The training pass sums
``weight * loss`` (see batch/sequence_weights.py), so no mean is taken here. Losses are pure tensor functions:
they know nothing of ranks, packs or prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from grpo_megatron.algorithm.correction import Correction
from grpo_megatron.algorithm.kl import FULL_KL, kl_penalty, unbiased_kl
from grpo_megatron.algorithm.mismatch import mismatch_metrics
from grpo_megatron.algorithm.surrogates import RATIO_LEVELS, PolicyTerms, surrogate
from grpo_megatron.config.algorithm import AlgorithmConfig, MismatchAction, MismatchConfig
from grpo_megatron.metrics import Mean, Metrics


@dataclass(frozen=True)
class TokenInputs:
    """The argument `inputs` of a TokenLoss: the data of t tokens that is known before the forward pass.

    Supervised training needs only the mask. LossInputs adds what the policy loss needs.

    mask: bool [t], True for trained tokens
    """

    mask: torch.Tensor


@dataclass(frozen=True)
class LossInputs(TokenInputs):
    """Arguments of the policy loss that are known before the training forward pass. All tensors are [t].

    "Engine" is the inference engine that sampled the tokens.
    """

    advantage: torch.Tensor
    """float32. Advantage of the token."""
    rollout_logp: torch.Tensor
    """float32. Log-prob of the token as the engine computed it when sampling."""
    ref_logp: torch.Tensor
    """float32. Log-prob of the token under the reference policy."""
    old_logp: torch.Tensor | None
    """float32. Log-prob of the token under the policy before the training step. None: the loss uses the
    current log-prob, detached, so the policy ratio is 1."""
    sequence_sum: Callable[[torch.Tensor], torch.Tensor]
    """Function [t] -> [t] that gives each token the detached sum over all tokens of its sequence, including
    those on other context-parallel ranks."""
    policy_factor: torch.Tensor | None = None
    """float32. Factor that multiplies only the policy term of the loss. None: 1."""
    age: torch.Tensor | None = None
    """int32. Number of changes of the weights since the token was sampled. None: 0."""
    token_index: torch.Tensor | None = None
    """int64. Index by which the metric mismatch/worst names each token. None: this metric is not computed."""


class TokenLoss(Protocol):
    """Interface of a loss that returns one value per token."""

    needs_full_kl: bool
    """True if the loss needs the argument full_kl, the exact KL over the vocabulary."""
    limits: dict[str, float]
    """{metric name: largest allowed value}. An optimizer step with a larger value is dropped: it does not
    change the weights."""

    def __call__(
        self,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        inputs: TokenInputs,
        full_kl: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Metrics]:
        """Return (loss, metrics) of t tokens. The loss is float32 [t], zero for untrained tokens.

        logp: float32 [t], log-probs of the tokens under the current policy.
        entropy: float32 [t], entropy of the current policy at each token.
        inputs: the data that is known before the forward pass.
        full_kl: float32 [t], the exact KL to the reference policy. Only given if needs_full_kl is True.

        logp, entropy and full_kl are zero for untrained tokens.
        """


@dataclass(frozen=True)
class PolicyLoss:
    """The policy loss of a token: factor · surrogate(ratio) + kl_loss_coef · KL - entropy_coeff · entropy.

    The configuration chooses surrogate, ratio level (token or sequence), KL to the reference policy and
    entropy bonus independently. factor corrects the mismatch between engine and trainer.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Settings of the loss. Other settings of the section, such as adv_estimator, are not read."""
    correction: Correction | None = None
    """Correction of the mismatch between engine and trainer, computed in the training forward pass. None: no
    correction is configured, or it was made before and is in LossInputs.policy_factor."""
    mismatch_limit: float | None = None
    """Largest allowed absolute difference of a token's engine and trainer log-probs, in nats. An optimizer
    step with a larger difference does not change the weights. None: no limit."""

    @classmethod
    def from_config(
        cls, algorithm: AlgorithmConfig, mismatch: MismatchConfig, known_before: bool
    ) -> "PolicyLoss":
        """Return the configured policy loss.

        known_before: True if the trainer's log-probs of the sampled tokens are computed before training
            (train.old_logprobs=recompute). The mismatch with the engine's log-probs is then corrected and
            checked outside of this loss. False: the returned loss corrects the mismatch, and has a
            `mismatch_limit` if mismatch.action is stop.
        """
        if known_before:
            return cls(algorithm)
        limit = mismatch.threshold if mismatch.action == MismatchAction.stop else None
        return cls(algorithm, Correction.from_config(mismatch), limit)

    @property
    def needs_full_kl(self) -> bool:
        return self.algorithm.use_kl_loss and self.algorithm.kl_loss_type == FULL_KL

    @property
    def limits(self) -> dict[str, float]:
        limits = {"actor/ratio": self.algorithm.early_stop_imp_ratio, "mismatch/max": self.mismatch_limit}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def __call__(self, logp, entropy, inputs, full_kl=None):
        mask = inputs.mask
        count = mask.sum()
        # Outside the mask old_logp is 0, which may be far from logp. exp() of the difference could overflow,
        # and infinity times a weight of 0 is NaN.
        old_logp = (
            logp.detach() if inputs.old_logp is None else torch.where(mask, inputs.old_logp, logp.detach())
        )
        log_ratio = logp - old_logp
        used_ratio = RATIO_LEVELS[self.algorithm.ratio_level](log_ratio, mask, inputs.sequence_sum)
        terms = PolicyTerms(logp, used_ratio, inputs.advantage, mask)
        loss, clipped = surrogate.get(self.algorithm.surrogate)(terms, self.algorithm)
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
            **mismatch_metrics(inputs.rollout_logp, logp, mask, inputs.token_index, inputs.age),
        }
        if self.correction:
            metrics["mismatch/masked"] = Mean(_masked_sum(~kept, mask), count)
            metrics["mismatch/factor"] = Mean(_masked_sum(factor, mask & kept), (mask & kept).sum())
        if self.algorithm.use_kl_loss:
            kl = self._kl(logp, log_ratio, inputs, full_kl)
            metrics["actor/kl_to_reference"] = Mean(_masked_sum(kl, mask), count)
            loss = loss + self.algorithm.kl_loss_coef * kl
        if self.algorithm.entropy_coeff:
            loss = loss - self.algorithm.entropy_coeff * entropy
        trained = mask & kept if self.algorithm.mask_applies_to == "all" else mask
        return torch.where(trained, loss, 0.0), metrics

    def _factor(self, logp: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (factor, kept): the factor of each token's policy term, and whether the token is kept.

        - factor: float [t].
        - kept: bool [t], False for tokens that the mismatch correction masks.

        logp: float [t], log-probs of the tokens under the current policy.
        """
        factor, kept = torch.ones_like(logp), torch.ones_like(inputs.mask)
        if self.correction:
            factor, kept = self.correction(inputs.rollout_logp, logp, inputs.mask, inputs.sequence_sum)
        if inputs.policy_factor is not None:
            factor = factor * inputs.policy_factor
        return factor, kept

    def _kl(self, logp, log_ratio, inputs: LossInputs, full_kl) -> torch.Tensor:
        """Return the KL to the reference policy at each token, [t], in nats.

        The result is the exact KL or an estimate, as algorithm.kl_loss_type says.

        logp: [t], log-probs of the tokens under the current policy.
        log_ratio: [t], these log-probs minus the log-probs under the old policy.
        full_kl: [t], the exact KL, or None if an estimate is configured.
        """
        if self.needs_full_kl:
            return full_kl
        kl = kl_penalty(
            logp, torch.where(inputs.mask, inputs.ref_logp, logp.detach()), self.algorithm.kl_loss_type
        )
        return unbiased_kl(kl, log_ratio) if self.algorithm.kl_loss_unbiased else kl


@dataclass(frozen=True)
class CrossEntropyLoss:
    """The loss of supervised fine-tuning: the negative log-likelihood of each trained token."""

    needs_full_kl = False

    @property
    def limits(self) -> dict[str, float]:
        return {}

    def __call__(self, logp, entropy, inputs, full_kl=None):
        loss = torch.where(inputs.mask, -logp, 0.0)
        return loss, {"sft/loss_per_token": Mean(loss.detach().sum(), inputs.mask.sum())}


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over the tokens whose `mask` is True, float32 and detached, for a metric."""
    return torch.where(mask, values.detach().float(), 0.0).sum()

"""Per-token losses. Pure tensor functions: nothing here knows of ranks, packs or prompts.

A loss object is called once per micro-batch with the log-probs of the training forward and the
arrays of the batch at the same positions. It returns one loss value per token; the caller sums
``weight * loss`` (see batch/weights.py), so no mean is taken here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO, kl_penalty
from grpo_megatron.metrics import Max, Mean, Metrics


@dataclass(frozen=True)
class LossInputs:
    """What is known about each of t positions before the training forward; all tensors [t].

    mask bool: trained tokens. advantage, rollout_logp, ref_logp float32. old_logp float32, or None:
    the current policy is the old policy (its detached log-probs are used).
    """

    mask: torch.Tensor
    advantage: torch.Tensor
    rollout_logp: torch.Tensor
    ref_logp: torch.Tensor
    old_logp: torch.Tensor | None


class TokenLoss(Protocol):
    def __call__(self, logp: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """logp, entropy float32 [t] -> (loss [t], zero outside the mask; metrics)."""


def clipped_surrogate(
    log_ratio: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped objective as a loss, with DAPO's separate limits; (loss [t], clipped bool [t]).

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(log_ratio) (arXiv:1707.06347 eq. 7,
    arXiv:2503.14476 eq. 8). `clipped` marks tokens whose gradient the clipping removes.
    """
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def mismatch_metrics(rollout_logp: torch.Tensor, logp: torch.Tensor, mask: torch.Tensor) -> Metrics:
    """How far the engine's log-probs are from the trainer's for the same tokens and weights."""
    difference = torch.where(mask, (rollout_logp - logp.detach()).abs(), 0)
    return {
        "mismatch/max": Max(difference.max()),
        "mismatch/mean": Mean(difference.sum(), mask.sum()),
    }


@dataclass(frozen=True)
class PolicyLoss:
    """GRPO's loss: clipped surrogate + KL to the reference - entropy bonus, each per token."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    entropy_coeff: float = 0.0

    def __call__(self, logp, entropy, inputs):
        mask = inputs.mask
        count = mask.sum()

        def kept(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            # Outside the mask the other side is 0 by convention, which may be far from logp:
            # exp() of that difference overflows, and inf * weight 0 is NaN.
            return torch.where(mask, values, other)

        old_logp = logp.detach() if inputs.old_logp is None else kept(inputs.old_logp, logp.detach())
        log_ratio = logp - old_logp
        loss, clipped = clipped_surrogate(log_ratio, inputs.advantage, self.clip_ratio_low, self.clip_ratio_high)
        metrics: Metrics = {
            "actor/pg_loss": Mean(_masked_sum(loss, mask), count),
            "actor/clip_fraction": Mean(_masked_sum(clipped, mask), count),
            "actor/ppo_kl": Mean(_masked_sum(-log_ratio, mask), count),
            "actor/entropy": Mean(_masked_sum(entropy, mask), count),
            **mismatch_metrics(inputs.rollout_logp, logp, mask),
        }
        if self.use_kl_loss:
            kl = kl_penalty(logp, kept(inputs.ref_logp, logp.detach()), self.kl_loss_type)
            metrics["actor/kl_to_reference"] = Mean(_masked_sum(kl, mask), count)
            loss = loss + self.kl_loss_coef * kl
        if self.entropy_coeff:
            loss = loss - self.entropy_coeff * entropy
        return torch.where(mask, loss, 0.0), metrics


@dataclass(frozen=True)
class CrossEntropyLoss:
    """Supervised fine-tuning: negative log-likelihood of the response tokens."""

    def __call__(self, logp, entropy, inputs):
        loss = torch.where(inputs.mask, -logp, 0.0)
        return loss, {"sft/loss_per_token": Mean(loss.detach().sum(), inputs.mask.sum())}


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values.detach().float(), 0.0).sum()

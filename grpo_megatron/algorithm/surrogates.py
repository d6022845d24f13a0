"""The configurable parts of the policy gradient: the level of the ratio, and the surrogate objective.

A surrogate is a function (PolicyTerms, AlgorithmConfig) -> (loss [t], clipped bool [t]), registered by
`@surrogate("name")`. `clipped` marks tokens whose gradient the surrogate removes or limits. It is used only
for the clip_fraction metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_megatron.algorithm.kl import MAX_LOG_RATIO
from grpo_megatron.config.algorithm import AlgorithmConfig
from grpo_megatron.plugins import Call, Registry

surrogate = Registry("surrogate", "algorithm.surrogate", call=Call(("terms", "options")))
LossAndClipped = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PolicyTerms:
    """Inputs of a surrogate (the form of the policy term) for t tokens. All tensors are [t]."""

    logp: torch.Tensor
    """float32, differentiable. Log-prob of the token under the current policy."""
    log_ratio: torch.Tensor
    """float32, differentiable. Log of the current over the old policy's probability, of the token or of
    its sequence (RATIO_LEVELS)."""
    advantage: torch.Tensor
    """float32. Advantage of the token."""
    mask: torch.Tensor
    """bool. True for trained tokens."""

    @property
    def ratio(self) -> torch.Tensor:
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# --- ratio levels: (log ratio of each token, mask, sequence_sum) -> log ratio to use at each token


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return the log ratio of each token unchanged, [t] (PPO, GRPO)."""
    return log_ratio


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return GSPO's log ratio [t]: each token gets the mean log ratio of its sequence's trained tokens.

    This is log s_i of arXiv:2507.18071 eq. 7. The gradient is that of the token's own log-prob (the
    GSPO-token form, eq. 14), so that no gradient has to pass through a collective. If all tokens of a
    sequence have the same loss weight, the sum of these gradients is exactly GSPO's.
    """
    total = sequence_sum(torch.where(mask, log_ratio.detach(), 0.0))
    mean = total / sequence_sum(mask.to(log_ratio.dtype)).clamp(min=1)
    return mean + log_ratio - log_ratio.detach()


def sequence_sum_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return the summed log ratio of each token's sequence, log pi(y) - log pi_old(y), as [t].

    The gradient at a token is that of its own log-prob, multiplied by n, the number of trained tokens of its
    sequence. With loss weights proportional to 1/n (modes group-sum and seq-mean-token-mean), the sum over
    the tokens is exactly the gradient of the sequence's ratio.
    """
    total = sequence_sum(torch.where(mask, log_ratio.detach(), 0.0))
    count = sequence_sum(mask.to(log_ratio.dtype))
    return total + count * (log_ratio - log_ratio.detach())


RATIO_LEVELS = {"token": token_ratio, "sequence": sequence_ratio, "sequence_sum": sequence_sum_ratio}


# --- surrogates


@surrogate("clip")
def clip(terms: PolicyTerms, options: AlgorithmConfig) -> LossAndClipped:
    """Return (loss, clipped) of PPO's objective, with DAPO's separate limits and an optional dual clip.

    With ratio r and advantage A, the loss is -min(r A, clip(r, 1 - low, 1 + high) A) (arXiv:1707.06347 eq. 7,
    arXiv:2503.14476 eq. 8). If A < 0 and clip_ratio_c = c is set, the loss is at most -c A (arXiv:1912.09729
    eq. 5). `clipped` is True for tokens whose loss a limit changes.
    """
    ratio, advantage = terms.ratio, terms.advantage
    unclipped = -advantage * ratio
    limited = -advantage * ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    loss, clipped = torch.maximum(unclipped, limited), limited > unclipped
    if options.clip_ratio_c is not None:
        most = -advantage * options.clip_ratio_c
        beyond = (advantage < 0) & (loss > most)
        loss, clipped = torch.where(beyond, most, loss), clipped | beyond
    return loss, clipped


@surrogate("cispo")
def cispo(terms: PolicyTerms, options: AlgorithmConfig) -> LossAndClipped:
    """Return (loss, clipped) of CISPO: REINFORCE weighted with the clipped ratio.

    With ratio r and advantage A, the loss is -sg(clip(r, 1 - low, 1 + high)) A logp, as in MiniMax-M1,
    arXiv:2506.13585 eq. 4, 5. sg (stop gradient): the ratio itself gets no gradient, so no token loses its
    gradient. clip_ratio_low of 1 or more means no lower limit, as in the paper. `clipped` is True for tokens
    whose ratio was clipped.
    """
    ratio = terms.ratio.detach()
    limited = ratio.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return -limited * terms.advantage * terms.logp, limited != ratio


@surrogate("reinforce")
def reinforce(terms: PolicyTerms, options: AlgorithmConfig) -> LossAndClipped:
    """Return (loss, clipped) of REINFORCE: the loss is -advantage · logp, and no token is clipped.

    See Williams 1992. The loss does not correct for samples of an older policy, so it is exact only for the
    first optimizer step on a batch.
    """
    return -terms.advantage * terms.logp, torch.zeros_like(terms.mask)

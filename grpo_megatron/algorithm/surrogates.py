"""The configurable parts of the policy term: the level of the policy ratio, and the surrogate objective.

A surrogate is a function (PolicyTerms, AlgorithmConfig) -> (loss [t], clipped bool [t]), registered by
`@surrogate("name")`. `clipped` marks the tokens whose gradient the surrogate removes or limits. Only the
clip_fraction metrics use `clipped`.
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
    """Inputs of a surrogate objective, such as PPO's clipped one, for t tokens. All tensors are [t]."""

    logp: torch.Tensor
    """float32, differentiable. Log-prob of the token under the current policy."""
    log_ratio: torch.Tensor
    """float32, differentiable. Log of the policy ratio, which is the current policy's probability divided by
    the old policy's. The ratio is the token's or its sequence's (RATIO_LEVELS)."""
    advantage: torch.Tensor
    """float32. Advantage of the token."""
    mask: torch.Tensor
    """bool. True for trained tokens."""

    @property
    def ratio(self) -> torch.Tensor:
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


# --- ratio levels: (log ratio of each token, mask, sequence_sum) -> log ratio to use at each token
# mask: bool [t], True for trained tokens. sequence_sum: see LossInputs.sequence_sum.


def token_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return each token's own log ratio, [t], as PPO and GRPO use it.

    `log_ratio` is returned unchanged. The other arguments are there because all ratio levels have the same
    signature.
    """
    return log_ratio


def sequence_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return GSPO's log ratio [t]: each token gets the mean log ratio of its sequence's trained tokens.

    The value is log s_i of arXiv:2507.18071 eq. 7. The gradient is the one of the token's own log-prob (the
    GSPO-token form, eq. 14), so that no gradient has to pass through a collective. If all tokens of a
    sequence have the same loss weight, the sum of these gradients is exactly GSPO's gradient.

    log_ratio: [t], log-prob of each token under the current policy minus the one under the old policy.
    mask: bool [t], True for trained tokens.
    sequence_sum: function that gives each token the detached sum over all tokens of its sequence.
    """
    total = sequence_sum(torch.where(mask, log_ratio.detach(), 0.0))
    mean = total / sequence_sum(mask.to(log_ratio.dtype)).clamp(min=1)
    return mean + log_ratio - log_ratio.detach()


def sequence_sum_ratio(log_ratio: torch.Tensor, mask: torch.Tensor, sequence_sum: Callable) -> torch.Tensor:
    """Return the log ratio of whole sequences, [t]: each token gets log pi(y) - log pi_old(y).

    y is the token's sequence, so the value is the sum of the log ratios of the sequence's trained tokens.

    The gradient at a token is n times the gradient of the token's own log-prob, where n is the number of
    trained tokens of its sequence. With loss weights proportional to 1/n (modes group-sum and
    seq-mean-token-mean), the sum over the tokens is exactly the gradient of the sequence's ratio.

    log_ratio: [t], log-prob of each token under the current policy minus the one under the old policy.
    mask: bool [t], True for trained tokens.
    sequence_sum: function that gives each token the detached sum over all tokens of its sequence.
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
    arXiv:2503.14476 eq. 8). low and high are algorithm.clip_ratio_low and clip_ratio_high. If A < 0 and
    algorithm.clip_ratio_c = c is set, the loss is at most -c A (dual clip, arXiv:1912.09729 eq. 5).

    `clipped` is True for tokens whose loss one of these limits changes.
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

    With ratio r and advantage A, the loss is -sg(clip(r, 1 - low, 1 + high)) · A · logp (MiniMax-M1,
    arXiv:2506.13585 eq. 4, 5). sg means stop gradient: only logp has a gradient, so clipping removes no
    token's gradient. low and high are algorithm.clip_ratio_low and clip_ratio_high. With low >= 1 there is no
    lower limit, as in the paper.

    `clipped` is True for tokens whose ratio was clipped.
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


@surrogate("importance_sampling")
def importance_sampling(terms: PolicyTerms, options: AlgorithmConfig) -> LossAndClipped:
    """Return (loss, clipped) of the policy gradient with importance sampling, without any limit.

    With ratio r and advantage A, the loss is -r A. No token is clipped.
    """
    return -terms.advantage * terms.ratio, torch.zeros_like(terms.mask)

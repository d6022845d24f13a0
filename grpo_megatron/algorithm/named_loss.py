"""The losses that a user's own loop chooses by name, and a user's function as a loss."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from grpo_megatron.algorithm.losses import CrossEntropyLoss, PolicyLoss, TokenLoss
from grpo_megatron.algorithm.surrogates import surrogate
from grpo_megatron.config.algorithm import AlgorithmConfig

# A loss: a name, a TokenLoss, or a function (logp, entropy, inputs) -> loss, all float32 [t].
AnyLoss = str | TokenLoss | Callable[..., torch.Tensor]


@dataclass(frozen=True)
class OwnLoss:
    """A user's function as a loss.

    function: (logp, entropy, inputs) -> loss. See TokenLoss for the arguments. The loss of untrained tokens
        is ignored.
    """

    function: Callable[..., torch.Tensor]

    needs_full_kl = False

    @property
    def limits(self) -> dict[str, float]:
        return {}

    def __call__(self, logp, entropy, inputs, full_kl=None):
        return torch.where(inputs.mask, self.function(logp, entropy, inputs), 0.0), {}


def named_loss(loss: AnyLoss, algorithm: AlgorithmConfig) -> TokenLoss:
    """Return a loss.

    loss: `policy`, the loss that `algorithm` describes; `cross_entropy`, the negative log-likelihood; the
        name of a surrogate, such as `clip`, for this surrogate without KL and entropy terms; or a function,
        see OwnLoss.

    Raises UserError for an unknown name.
    """
    if not isinstance(loss, str):
        return loss if hasattr(loss, "needs_full_kl") else OwnLoss(loss)
    if loss == "policy":
        return PolicyLoss(algorithm)
    if loss == "cross_entropy":
        return CrossEntropyLoss()
    surrogate.get(loss)  # raises UserError for an unknown name
    return PolicyLoss(replace(algorithm, surrogate=loss, use_kl_loss=False, entropy_coeff=0.0))

"""Per-token estimators of KL(policy || reference), and the coefficient of the KL in the reward.

The estimators use only the log-probs of the sampled token.
"""

from dataclasses import dataclass

import torch

from grpo_megatron.config.algorithm import KLControl, KLControlConfig

# Names of the estimators in other stacks -> ours.
_ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}

# All types that `kl_penalty` knows: the estimators, and each with +, which combines its value with the
# gradient of k2.
KL_TYPES = {f"{name}{plus}": f"{ours}{plus}" for plus in ("", "+") for name, ours in _ESTIMATORS.items()}

# Types whose expectation under the policy, weighted by the policy's ratio, has the gradient of the KL.
UNBIASED_TYPES = ("k1", "kl", "k3", "low_var_kl")

# The exact KL over the vocabulary. It is not estimated from one token, so it is not computed here.
FULL_KL = "full"

# exp() of a larger log-ratio only says "far away", and overflows eventually.
MAX_LOG_RATIO = 20.0


def kl_penalty(logp: torch.Tensor, ref_logp: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Return the KL estimate at each token, with shape and dtype of logp. The gradient flows through logp.

    With d = log ref - log policy: k1 = -d, abs = |d|, k2 = d²/2, k3 = exp(d) - 1 - d >= 0 (Schulman,
    "Approximating KL Divergence", 2020). k3 uses expm1, which keeps its digits if policy and reference are
    close. d is clamped to ±20.

    Only k2 has the gradient of the KL in expectation. A type with + has the value of the type and the
    gradient of k2 (straight-through).

    Raises ValueError for another type.
    """
    known = KL_TYPES.get(kl_type)
    if known is None:
        raise ValueError(f"unknown KL type {kl_type!r}; known: {', '.join(KL_TYPES)}")
    d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    square = d.square() / 2
    values = {"k1": lambda: -d, "abs": lambda: d.abs(), "k2": lambda: square, "k3": lambda: d.expm1() - d}
    value = values[known.rstrip("+")]()
    return square + (value - square).detach() if known.endswith("+") else value


def unbiased_kl(kl: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return ratio · kl, with the gradient through both; shapes as given.

    log_ratio: logp - old_logp of the token.

    For samples of the old policy, the expectation of the result is that of kl under the current policy. For
    k1 and k3, its gradient is the KL's too (DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate).
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl


@dataclass
class KLController:
    """The coefficient of the KL in the reward, either fixed or adapted to reach a target.

    Adaptive (Ziegler et al. 2019, arXiv:1909.08593 section 2.2), after n trajectories of mean KL k:
    coef *= 1 + clip(k / target - 1, -0.2, 0.2) · n / horizon
    """

    coef: float
    adaptive: bool = False
    target: float = 0.1
    horizon: float = 10000.0

    @classmethod
    def from_config(cls, config: KLControlConfig) -> "KLController":
        return cls(config.kl_coef, config.type == KLControl.adaptive, config.target_kl, config.horizon)

    def update(self, kl: float, trajectories: int) -> None:
        """Adapt the coefficient.

        kl: mean over trajectories of the mean over their tokens, in nats.
        trajectories: number of trajectories.
        """
        if self.adaptive:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * trajectories / self.horizon

    def state_dict(self) -> dict:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        """Restore an adaptive coefficient. A fixed one keeps the value of the configuration."""
        if self.adaptive:
            self.coef = state["coef"]

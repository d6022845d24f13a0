"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled token, and their coefficient."""

from dataclasses import dataclass

import torch

from grpo_megatron.config.algorithm import KLControl, KLControlConfig

# Names in use elsewhere -> ours.
_ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}

# Everything `kl_penalty` knows: the estimators, and with + their values with the gradient of k2.
KL_TYPES = {f"{name}{plus}": f"{ours}{plus}" for plus in ("", "+") for name, ours in _ESTIMATORS.items()}

# Whose expectation under the policy, weighted by the policy's ratio, has the gradient of the KL.
UNBIASED_TYPES = ("k1", "kl", "k3", "low_var_kl")

# The exact KL over the vocabulary: not an estimate from one token, so not computed here.
FULL_KL = "full"

# exp() of a larger log-ratio says nothing but "far away", and overflows in the end.
MAX_LOG_RATIO = 20.0


def kl_penalty(logp: torch.Tensor, ref_logp: torch.Tensor, kl_type: str) -> torch.Tensor:
    """KL estimate at each token, shape and dtype of logp; gradient flows through logp.

    With d = log ref - log policy: k1 = -d, abs = |d|, k2 = d²/2, k3 = exp(d) - 1 - d >= 0 (Schulman,
    "Approximating KL Divergence", 2020); expm1 keeps its digits where policy and reference are close. d is
    clamped to ±20. Only k2 has the gradient of the KL in
    expectation; a type with + has the value of the type and the gradient of k2 (straight-through).
    Raises ValueError on another type.
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
    """ratio · kl, the gradient through both; shapes as given.

    For samples of the old policy, with log_ratio = logp - old_logp of the token, the expectation of
    this is that of kl under the current policy; for k1 and k3 its gradient is the KL's too
    (DeepSeek-V3.2, arXiv:2512.02556, unbiased KL estimate).
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl


@dataclass
class KLController:
    """The coefficient of the KL in the reward; fixed, or steered towards a target.

    Adaptive (Ziegler et al. 2019, arXiv:1909.08593 section 2.2): after n trajectories of mean KL k,
    coef *= 1 + clip(k / target - 1, -0.2, 0.2) · n / horizon.
    """

    coef: float
    adaptive: bool = False
    target: float = 0.1
    horizon: float = 10000.0

    @classmethod
    def from_config(cls, config: KLControlConfig) -> "KLController":
        return cls(config.kl_coef, config.type == KLControl.adaptive, config.target_kl, config.horizon)

    def update(self, kl: float, trajectories: int) -> None:
        """kl: mean over trajectories of the mean over their tokens, in nats."""
        if self.adaptive:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * trajectories / self.horizon

    def state_dict(self) -> dict:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        """A fixed coefficient is the configuration's, whatever it was before."""
        if self.adaptive:
            self.coef = state["coef"]

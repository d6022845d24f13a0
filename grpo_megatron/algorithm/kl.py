"""Per-token estimators of KL(policy || reference), and the coefficient of the KL in the reward.

The estimators use only the log-probs of the sampled token.
"""

from dataclasses import dataclass

import torch

from grpo_megatron.config.algorithm import KLControl, KLControlConfig

# {name of an estimator, here or in other projects: its name here}
_ESTIMATORS = {"k1": "k1", "kl": "k1", "abs": "abs", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}

# {type that `kl_penalty` accepts: its name here}. Each estimator exists in two types. The type with a + has
# the same value, but the gradient of k2.
KL_TYPES = {f"{name}{plus}": f"{own}{plus}" for plus in ("", "+") for name, own in _ESTIMATORS.items()}

# Types for which `unbiased_kl` has the gradient of the KL in expectation.
UNBIASED_TYPES = ("k1", "kl", "k3", "low_var_kl")

# The exact KL over the vocabulary. It is not estimated from one token, so it is not computed here.
FULL_KL = "full"

# Log-ratios are clamped to ± this number before exp(), which could overflow otherwise.
MAX_LOG_RATIO = 20.0


def kl_penalty(logp: torch.Tensor, ref_logp: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Return an estimate of KL(policy || reference) at each token, in nats, with shape and dtype of `logp`.

    The gradient flows through `logp`.

    logp, ref_logp: log-probs of the sampled tokens under the policy and under the reference policy.
    kl_type: a key of KL_TYPES. With d = ref_logp - logp, clamped to ±20: k1 = -d, abs = |d|, k2 = d²/2,
        k3 = exp(d) - 1 - d >= 0 (Schulman, "Approximating KL Divergence", 2020). A type with +, such as k3+,
        has the value of the type before the + and the gradient of k2 (straight-through), because only the
        expected gradient of k2 is the gradient of the KL.

    Raises ValueError for any other type.
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
    """Return the KL estimate of each token multiplied by the policy ratio: exp(log_ratio) · kl, [t].

    The samples come from the old policy. Importance weighting corrects for this: the expectation of the
    result over these samples equals the expectation of `kl` under the current policy. For the types k1 and
    k3, the expected gradient is also the gradient of the KL (DeepSeek-V3.2, arXiv:2512.02556, unbiased KL
    estimate). Gradients flow through both factors.

    kl: [t], result of `kl_penalty`.
    log_ratio: [t], log-prob of the token under the current policy minus its log-prob under the old policy.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl


@dataclass
class KLController:
    """The coefficient of the KL in the reward, either fixed or adapted so that the KL approaches a target.

    After a step of n trajectories with mean KL k, an adaptive coefficient is updated (Ziegler et al. 2019,
    arXiv:1909.08593 section 2.2): coef *= 1 + clip(k / target - 1, -0.2, 0.2) · n / horizon

    coef: the current coefficient.
    adaptive: True if `update` changes the coefficient, False if it is fixed.
    target: the KL per token, in nats, that an adaptive coefficient steers to.
    horizon: number of trajectories in which an adaptive coefficient changes by at most 20%.
    """

    coef: float
    adaptive: bool = False
    target: float = 0.1
    horizon: float = 10000.0

    @classmethod
    def from_config(cls, config: KLControlConfig) -> "KLController":
        return cls(config.kl_coef, config.type == KLControl.adaptive, config.target_kl, config.horizon)

    def update(self, kl: float, trajectories: int) -> None:
        """Adapt the coefficient to the KL of a training step. A fixed coefficient does not change.

        kl: KL to the reference policy in nats per token: the mean over the trained tokens of each trajectory,
            averaged over the trajectories.
        trajectories: number of trajectories of the step.
        """
        if self.adaptive:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * trajectories / self.horizon

    def state_dict(self) -> dict:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict) -> None:
        """Restore an adaptive coefficient from a checkpoint.

        A fixed coefficient keeps the configured value, algorithm.kl_ctrl.kl_coef.
        """
        if self.adaptive:
            self.coef = state["coef"]

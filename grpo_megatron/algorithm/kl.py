"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled token."""

import torch

# Names in use elsewhere -> ours.
KL_TYPES = {"k1": "k1", "kl": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}

# exp() of a larger log-ratio says nothing but "far away", and overflows in the end.
MAX_LOG_RATIO = 20.0


def kl_penalty(logp: torch.Tensor, ref_logp: torch.Tensor, kl_type: str) -> torch.Tensor:
    """KL estimate at each token, shape and dtype of logp; gradient flows through logp.

    With d = log ref - log policy: k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1 >= 0 (Schulman,
    "Approximating KL Divergence", 2020). d is clamped to ±20. Raises ValueError on another type.
    """
    d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match KL_TYPES.get(kl_type):
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return d.exp() - d - 1
    raise ValueError(f"unknown kl_loss_type {kl_type!r}; known: {', '.join(KL_TYPES)}")

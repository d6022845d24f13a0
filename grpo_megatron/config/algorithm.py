"""The sections `algorithm` and `mismatch` of the configuration."""

from enum import Enum
from typing import Literal

from grpo_megatron.config.options import FilledText, dataclass, option, section

# Estimators of the KL from one token, with their alternative names. algorithm.kl.KL_TYPES computes them.
KL_ESTIMATORS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


class MaskAppliesTo(str, Enum):
    policy = "policy"
    all = "all"


class KLControl(str, Enum):
    fixed = "fixed"
    adaptive = "adaptive"


class MismatchCorrection(str, Enum):
    none = "none"
    tis = "tis"
    icepop = "icepop"
    seq_tis = "seq_tis"
    mis = "mis"


class MismatchRejection(str, Enum):
    none = "none"
    token_ratio = "token_ratio"
    token_k2 = "token_k2"
    token_k3 = "token_k3"
    seq_ratio = "seq_ratio"
    seq_geometric_ratio = "seq_geometric_ratio"
    seq_sum_k2 = "seq_sum_k2"
    seq_sum_k3 = "seq_sum_k3"
    seq_mean_k2 = "seq_mean_k2"
    seq_mean_k3 = "seq_mean_k3"
    seq_max_k2 = "seq_max_k2"
    seq_max_k3 = "seq_max_k3"


class MismatchAction(str, Enum):
    off = "off"
    warn = "warn"
    mask = "mask"
    stop = "stop"


@dataclass
class KLControlConfig:
    type: KLControl = option(
        KLControl.fixed, "fixed: kl_coef; adaptive: steered to target_kl (arXiv:1909.08593 section 2.2)"
    )
    kl_coef: float = option(0.001, "coefficient of the KL in the reward; adaptive: the first one", ge=0)
    target_kl: float = option(0.1, "adaptive only: KL per token to steer to", "nats", gt=0)
    horizon: float = option(
        10000.0, "adaptive only: the coefficient changes by at most 20% in this many", "trajectories", gt=0
    )


@dataclass
class AlgorithmConfig:
    preset: FilledText | None = option(
        None, "published recipe that the other keys start from, see docs/algorithms.md; null: none"
    )
    adv_estimator: FilledText = option(
        "grpo",
        "grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gpg, or module:function; see "
        "docs/algorithms.md",
    )
    norm_adv_by_std_in_grpo: bool = option(True, "divide by the group's standard deviation; false: Dr.GRPO")
    adv_whiten: bool = option(False, "whiten advantages over all trained tokens of the step")
    adv_clip: float | None = option(
        None, "limit advantages to plus or minus this, after whitening; null: no limit", gt=0
    )
    use_valid_token_scale: bool = option(
        False,
        "divide advantages by the number of trained tokens of the optimizer step (beside what loss_agg_mode "
        "does)",
    )
    filters: list[FilledText] = option(
        [], "which groups are trained on, applied in order: nonzero_variance, or module:function"
    )
    overlong_filter: bool = option(
        False, "responses cut off at rollout.max_response_length are not trained on (DAPO)"
    )
    ratio_level: Literal["token", "sequence", "sequence_sum"] = option(
        "token",
        "policy ratio of: token; sequence (GSPO, its geometric mean over the sequence); sequence_sum (the "
        "whole sequence's)",
    )
    surrogate: FilledText = option(
        "clip", "objective of a token: clip (PPO), cispo, reinforce (no ratio), or module:function"
    )
    clip_ratio_low: float = option(0.2, "policy ratio clipped below 1 - this", ge=0)
    clip_ratio_high: float = option(0.2, "policy ratio clipped above 1 + this", ge=0)
    clip_ratio_c: float | None = option(
        None, "dual clip: the loss of a negative advantage is at most this times it; null: off", gt=1
    )
    early_stop_imp_ratio: float | None = option(
        None,
        "drop an optimizer step whose mean policy ratio over trained tokens is more than this; null: never",
        gt=1,
    )
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-sum"
    ] = option(
        "token-mean",
        "token-mean, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, group-sum",
    )
    use_kl_loss: bool = option(False, "add the KL to the reference policy to the loss")
    kl_loss_coef: float = option(0.001, "coefficient of the KL in the loss", ge=0)
    kl_loss_type: Literal[(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), "full")] = option(
        "k3",
        "estimator of the KL: k1 (kl), abs, k2 (mse), k3 (low_var_kl), each also with + (the gradient of "
        "k2), full (exact, over the whole vocabulary)",
    )
    kl_loss_unbiased: bool = option(
        False,
        "k1 and k3: weighted with the policy ratio, which makes the gradient unbiased (arXiv:2512.02556)",
    )
    use_kl_in_reward: bool = option(
        False, "subtract the KL of the old to the reference policy from each token's reward"
    )
    kl_penalty: Literal[KL_ESTIMATORS] = option(
        "k1",
        "estimator of the KL in the reward: k1 (kl), abs, k2 (mse), k3 (low_var_kl)",
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig, "coefficient of the KL in the reward")
    entropy_coeff: float = option(0.0, "coefficient of the entropy bonus")
    entropy_floor: float | None = option(
        None,
        "the bonus acts only after a step whose mean entropy was below this; null: always",
        "nats per token",
        gt=0,
    )
    mask_applies_to: MaskAppliesTo = option(
        MaskAppliesTo.policy,
        "what a token that the mismatch masks loses: its policy term, or all (KL and entropy too)",
    )

    @property
    def needs_reference(self) -> bool:
        """True if log-probs under the reference policy are needed."""
        return self.use_kl_loss or self.use_kl_in_reward


@dataclass
class MismatchConfig:
    correction: MismatchCorrection = option(
        MismatchCorrection.none,
        "weight of the policy term by the ratio of trainer to engine: none, tis, icepop, seq_tis, mis; see "
        "docs/algorithms.md",
    )
    ratio_low: float | None = option(
        None, "lower bound of the correction's ratio; null: the published one", ge=0
    )
    ratio_high: float | None = option(
        None, "upper bound of the correction's ratio; null: the published one", gt=0
    )
    rejection: MismatchRejection = option(
        MismatchRejection.none,
        "what masks the policy term, without a weight: the ratio of tokens or sequences, or an estimate of "
        "the KL between engine and trainer; see docs/algorithms.md",
    )
    rejection_low: float | None = option(
        None, "smallest ratio that rejection keeps; null: the published one", ge=0
    )
    rejection_high: float | None = option(
        None,
        "largest ratio, or KL in nats, that rejection keeps; null: the published one, for a KL there is none",
        gt=0,
    )
    renormalize: bool = option(
        False,
        "the means are over the tokens that are not masked; false: a masked token counts as 0 (IcePop, "
        "arXiv:2510.18855)",
    )
    action: MismatchAction = option(
        MismatchAction.warn,
        "about tokens beyond threshold: off, warn (print the worst), mask (their policy term), stop (the "
        "run; without the step)",
    )
    threshold: float = option(
        1.0, "largest acceptable difference of a token's log-probs, engine to trainer", "nats", gt=0
    )

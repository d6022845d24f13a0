"""The sections `algorithm` and `mismatch` of the configuration."""

from enum import Enum
from typing import Literal

from grpo_megatron.config.options import FilledText, dataclass, option, section

# Names of the estimators of the KL of one token: k1 (or kl), abs, k2 (or mse), k3 (or low_var_kl). The module
# algorithm.kl computes them.
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
        KLControl.fixed,
        "fixed: the coefficient stays kl_coef. adaptive: it brings the KL towards target_kl "
        "(arXiv:1909.08593 section 2.2).",
    )
    kl_coef: float = option(0.001, "Coefficient; with type=adaptive, its first value.", ge=0)
    target_kl: float = option(0.1, "KL per token that an adaptive coefficient aims at.", "nats", gt=0)
    horizon: float = option(
        10000.0,
        "Number of trajectories in which an adaptive coefficient changes by at most 20%.",
        "trajectories",
        gt=0,
    )


@dataclass
class AlgorithmConfig:
    preset: FilledText | None = option(
        None, "Published recipe from which the other keys start (docs/algorithms.md)."
    )
    adv_estimator: FilledText = option(
        "grpo",
        "Estimator of the advantages (docs/algorithms.md).",
    )
    norm_adv_by_std_in_grpo: bool = option(
        True,
        "Divide grpo's advantages by the group's standard deviation. false: as in Dr.GRPO.",
    )
    adv_whiten: bool = option(False, "Whiten advantages over all trained tokens of the step.")
    adv_clip: float | None = option(
        None,
        "Maximum absolute value of an advantage, after whitening.",
        gt=0,
    )
    use_valid_token_scale: bool = option(
        False,
        "Divide advantages by the optimizer step's trained tokens, in addition to loss_agg_mode.",
    )
    filters: list[FilledText] = option(
        [],
        "Filters of groups, applied in order. nonzero_variance keeps groups whose rewards differ.",
    )
    overlong_filter: bool = option(
        False, "Do not train on responses cut off at rollout.max_response_length (DAPO)."
    )
    ratio_level: Literal["token", "sequence", "sequence_sum"] = option(
        "token",
        "What has a policy ratio. token: each token. sequence: the response, by the geometric mean over its"
        " tokens (GSPO). sequence_sum: the response, by the product.",
    )
    surrogate: FilledText = option(
        "clip",
        "Objective of a token (docs/algorithms.md).",
    )
    clip_ratio_low: float = option(0.2, "The policy ratio is clipped at 1 minus this.", ge=0)
    clip_ratio_high: float = option(0.2, "The policy ratio is clipped at 1 plus this.", ge=0)
    clip_ratio_c: float | None = option(
        None,
        "Dual clip: for a negative advantage, a token's loss is at most this times |advantage|.",
        gt=1,
    )
    early_stop_imp_ratio: float | None = option(
        None,
        "Maximum mean policy ratio of an optimizer step. A step above it is dropped.",
        gt=1,
    )
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-sum"
    ] = option(
        "token-mean",
        "How the losses of tokens are combined into one (docs/algorithms.md).",
    )
    use_kl_loss: bool = option(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = option(0.001, "Coefficient of the KL in the loss.", ge=0)
    kl_loss_type: Literal[(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), "full")] = option(
        "k3",
        "Estimator of the KL in the loss (docs/algorithms.md).",
    )
    kl_loss_unbiased: bool = option(
        False,
        "Weight k1 and k3 with the policy ratio, which makes the gradient unbiased (arXiv:2512.02556).",
    )
    use_kl_in_reward: bool = option(
        False,
        "Subtract the KL of the old policy to the reference policy from each token's reward.",
    )
    kl_penalty: Literal[KL_ESTIMATORS] = option(
        "k1",
        "Estimator of the KL in the reward, as in kl_loss_type.",
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig, "Coefficient of the KL in the reward.")
    entropy_coeff: float = option(0.0, "Coefficient of the entropy bonus.")
    entropy_floor: float | None = option(
        None,
        "Use the entropy bonus only after a step whose mean entropy was below this.",
        "nats per token",
        gt=0,
    )
    mask_applies_to: MaskAppliesTo = option(
        MaskAppliesTo.policy,
        "Loss terms that section mismatch masks. policy: the policy term. all: KL and entropy too.",
    )

    @property
    def needs_reference(self) -> bool:
        """Return True if log-probs under the reference policy are needed, for a KL in the loss or reward."""
        return self.use_kl_loss or self.use_kl_in_reward


@dataclass
class MismatchConfig:
    correction: MismatchCorrection = option(
        MismatchCorrection.none,
        "How the ratio of trainer to engine weights the policy term (docs/algorithms.md).",
    )
    ratio_low: float | None = option(
        None, "Lower bound of the correction's ratio. null: see docs/algorithms.md.", ge=0
    )
    ratio_high: float | None = option(
        None, "Upper bound of the correction's ratio. null: see docs/algorithms.md.", gt=0
    )
    rejection: MismatchRejection = option(
        MismatchRejection.none,
        "Ratio of trainer to engine, or KL, that decides which policy terms are masked (docs/algorithms.md).",
    )
    rejection_low: float | None = option(
        None, "Minimum ratio that the rejection keeps. null: see docs/algorithms.md.", ge=0
    )
    rejection_high: float | None = option(
        None,
        "Maximum ratio that the rejection keeps (null: see docs/algorithms.md), or maximum KL in nats, "
        "which must be set.",
        gt=0,
    )
    renormalize: bool = option(
        False,
        "Take means over unmasked tokens. false: masked tokens count as 0 (IcePop, arXiv:2510.18855).",
    )
    action: MismatchAction = option(
        MismatchAction.warn,
        "Tokens above threshold. off: nothing. warn: the worst are printed. mask: their policy terms are "
        "masked. stop: the run ends without applying the step.",
    )
    threshold: float = option(
        1.0, "Maximum difference between a token's log-probs of engine and trainer.", "nats", gt=0
    )

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
        "How the coefficient changes. fixed: it stays kl_coef. adaptive: it is adjusted so that the KL "
        "approaches target_kl (arXiv:1909.08593 section 2.2).",
    )
    kl_coef: float = option(
        0.001, "Coefficient of the KL in the reward. With type=adaptive it is the initial value.", ge=0
    )
    target_kl: float = option(0.1, "KL per token that an adaptive coefficient approaches.", "nats", gt=0)
    horizon: float = option(
        10000.0,
        "Number of trajectories in which an adaptive coefficient changes by at most 20%.",
        "trajectories",
        gt=0,
    )


@dataclass
class AlgorithmConfig:
    preset: FilledText | None = option(
        None, "Published recipe from which the other keys start; docs/algorithms.md lists them. null: none."
    )
    adv_estimator: FilledText = option(
        "grpo",
        "Estimator of the advantages: grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gpg, "
        "or module:function. docs/algorithms.md explains them.",
    )
    norm_adv_by_std_in_grpo: bool = option(
        True,
        "true: the advantages of grpo are divided by the group's standard deviation. false: they are not, "
        "as in Dr.GRPO.",
    )
    adv_whiten: bool = option(False, "true: advantages are whitened over all trained tokens of the step.")
    adv_clip: float | None = option(
        None,
        "Maximum absolute value of an advantage. Larger advantages are clipped to it, after whitening. null: "
        "there is no limit.",
        gt=0,
    )
    use_valid_token_scale: bool = option(
        False,
        "true: advantages are divided by the number of trained tokens of the optimizer step, in addition to "
        "loss_agg_mode.",
    )
    filters: list[FilledText] = option(
        [],
        "Filters that choose the groups to train on, applied in order: nonzero_variance, or "
        "module:function. []: all groups.",
    )
    overlong_filter: bool = option(
        False, "true: responses cut off at rollout.max_response_length are not trained on (DAPO)."
    )
    ratio_level: Literal["token", "sequence", "sequence_sum"] = option(
        "token",
        "Text that a policy ratio is computed for. token: each token. sequence: the whole response, as the "
        "geometric mean of its tokens' ratios (GSPO). sequence_sum: the whole response, as their product.",
    )
    surrogate: FilledText = option(
        "clip",
        "Objective of a token: clip (PPO), cispo, reinforce (without a policy ratio), or module:function.",
    )
    clip_ratio_low: float = option(
        0.2, "Lower clip range of the policy ratio: it is clipped at 1 minus this.", ge=0
    )
    clip_ratio_high: float = option(
        0.2, "Upper clip range of the policy ratio: it is clipped at 1 plus this.", ge=0
    )
    clip_ratio_c: float | None = option(
        None,
        "Bound of dual clip: for a negative advantage, the loss of a token is at most this times "
        "|advantage|. null: off.",
        gt=1,
    )
    early_stop_imp_ratio: float | None = option(
        None,
        "Maximum mean of the policy ratio over the trained tokens of an optimizer step. A step with a larger "
        "mean is dropped. null: there is no limit.",
        gt=1,
    )
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "group-sum"
    ] = option(
        "token-mean",
        "How the losses of tokens are combined into one: token-mean, seq-mean-token-sum, "
        "seq-mean-token-mean, seq-mean-token-sum-norm, or group-sum. docs/algorithms.md explains them.",
    )
    use_kl_loss: bool = option(False, "true: the KL to the reference policy is added to the loss.")
    kl_loss_coef: float = option(0.001, "Coefficient of the KL in the loss.", ge=0)
    kl_loss_type: Literal[(*KL_ESTIMATORS, *(f"{name}+" for name in KL_ESTIMATORS), "full")] = option(
        "k3",
        "Estimator of the KL in the loss: k1 (or kl), abs, k2 (mse) or k3 (low_var_kl). With a + at the end, "
        "such as k3+, its gradient is that of k2. full: no estimate, but the KL over the whole vocabulary.",
    )
    kl_loss_unbiased: bool = option(
        False,
        "true: the estimators k1 and k3 are weighted with the policy ratio, which makes the gradient "
        "unbiased (arXiv:2512.02556).",
    )
    use_kl_in_reward: bool = option(
        False,
        "true: the KL of the old policy to the reference policy is subtracted from the reward of each token.",
    )
    kl_penalty: Literal[KL_ESTIMATORS] = option(
        "k1",
        "Estimator of the KL in the reward: k1 (or kl), abs, k2 (mse), k3 (low_var_kl).",
    )
    kl_ctrl: KLControlConfig = section(KLControlConfig, "Coefficient of the KL in the reward.")
    entropy_coeff: float = option(0.0, "Coefficient of the entropy bonus. 0: there is none.")
    entropy_floor: float | None = option(
        None,
        "A step has the entropy bonus only if the mean entropy of the step before was below this. null: "
        "every step has it.",
        "nats per token",
        gt=0,
    )
    mask_applies_to: MaskAppliesTo = option(
        MaskAppliesTo.policy,
        "Loss terms that are removed from a token that section mismatch masks. policy: the policy term. "
        "all: the KL and entropy terms too.",
    )

    @property
    def needs_reference(self) -> bool:
        """Return True if log-probs under the reference policy are needed, for a KL in the loss or reward."""
        return self.use_kl_loss or self.use_kl_in_reward


@dataclass
class MismatchConfig:
    correction: MismatchCorrection = option(
        MismatchCorrection.none,
        "Method that weights the policy term by the ratio of trainer to engine: none, tis, icepop, seq_tis "
        "or mis. docs/algorithms.md explains them.",
    )
    ratio_low: float | None = option(
        None, "Lower bound of the correction's ratio. null: the bound in docs/algorithms.md.", ge=0
    )
    ratio_high: float | None = option(
        None, "Upper bound of the correction's ratio. null: the bound in docs/algorithms.md.", gt=0
    )
    rejection: MismatchRejection = option(
        MismatchRejection.none,
        "Criterion by which the policy terms of tokens or sequences are masked: the ratio of trainer to "
        "engine, or an estimate of their KL. docs/algorithms.md explains the choices.",
    )
    rejection_low: float | None = option(
        None, "Minimum ratio that the rejection keeps. null: the bound in docs/algorithms.md.", ge=0
    )
    rejection_high: float | None = option(
        None,
        "Maximum ratio that the rejection keeps, or maximum KL in nats. null: the bound in "
        "docs/algorithms.md; for a KL there is none, so it must be set.",
        gt=0,
    )
    renormalize: bool = option(
        False,
        "true: means are over the tokens that are not masked. false: a masked token counts as 0 (IcePop, "
        "arXiv:2510.18855).",
    )
    action: MismatchAction = option(
        MismatchAction.warn,
        "What happens to tokens whose difference exceeds threshold. off: nothing. warn: the worst are "
        "printed. mask: their policy terms are masked. stop: the run ends without applying the step.",
    )
    threshold: float = option(
        1.0, "Maximum acceptable difference between a token's log-probs of engine and trainer.", "nats", gt=0
    )

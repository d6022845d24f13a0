"""Mapping of verl's keys to those of grpo_megatron: algorithm, loss, batch sizes, and the whole mapping VERL.

verl's settings are the arguments of `python3 -m verl.trainer.main_ppo key=value ...`.
"""

from typing import Any

from grpo_megatron.importers.converters import absorbed, choice, clip_ratios, fixed, flag, room_for, truth
from grpo_megatron.importers.mapping import CannotCarry, Source, System, becomes, dropped, same, trains
from grpo_megatron.importers.verl_correction import CORRECTION, ROLLOUT_CORRECTION, bypasses
from grpo_megatron.importers.verl_data import DATA, REWARD
from grpo_megatron.importers.verl_findings import findings, refusal
from grpo_megatron.importers.verl_optimizer import OPTIMIZER
from grpo_megatron.importers.verl_rollout import ENGINE
from grpo_megatron.importers.verl_trainer import ACTOR, ROLLOUT, TRAINER

ESTIMATORS = {
    name: name for name in ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")
} | {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}
LOSS_MODES = {
    "vanilla": {"algorithm.surrogate": "clip", "algorithm.ratio_level": "token"},
    "gspo": {
        "algorithm.surrogate": "clip",
        "algorithm.ratio_level": "sequence",
        "algorithm.loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"algorithm.surrogate": "cispo", "algorithm.ratio_level": "token"},
    "gpg": {"algorithm.surrogate": "reinforce", "algorithm.ratio_level": "token"},
}
AGGREGATION = {
    name: name
    for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}


def _longest(source: Source) -> int:
    return source.number("data.max_prompt_length") + source.number("data.max_response_length")


def _dynamic_tokens(value: Any, source: Source) -> dict[str, Any]:
    if not truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"verl ignores this without {ACTOR}.use_dynamic_bsz")
    # With CP, verl's limit may be shorter than a sequence, because it spreads the sequence over the ranks.
    return {"train.max_tokens_per_micro_batch": max(int(value), _longest(source))}


def _micro_batch(value: Any, source: Source) -> dict[str, Any]:
    if value is None:
        return {}
    if truth(source[f"{ACTOR}.use_dynamic_bsz"]):
        raise CannotCarry(f"verl ignores this with {ACTOR}.use_dynamic_bsz")
    return {"train.max_tokens_per_micro_batch": int(value) * _longest(source)}


def _discounting(estimators: tuple[str, ...], why: str):
    """Return a function that checks that verl's algorithm.gamma or algorithm.lam discounts nothing.

    grpo_megatron does not discount advantages. The function raises CannotCarry for a value other than 1 if
    the run's advantage estimator reads the key. Otherwise it returns {}: no key is set.

    estimators: verl's advantage estimators that read the key.
    why: message of the CannotCarry.
    """

    def convert(value: Any, source: Source) -> dict[str, Any]:
        if value != 1 and source["algorithm.adv_estimator"] in estimators:
            raise CannotCarry(f"{value}: {why}")
        return {}

    return convert


def _filter_groups(value: Any, source: Source) -> dict[str, Any]:
    return (
        {"algorithm.filters": ["nonzero_variance"], "rollout.dynamic_sampling.enabled": True}
        if truth(value)
        else {}
    )


def _group_metric(value: Any, source: Source) -> dict[str, Any]:
    if value is not None and truth(source["algorithm.filter_groups.enable"]):
        raise CannotCarry("here groups are always filtered by the reward that is trained with")
    return {}


def _of_other_losses(value: Any, source: Source) -> dict[str, Any]:
    if _loss_mode(source) not in LOSS_MODES:
        raise CannotCarry("this belongs to a policy loss that does not exist here")
    return {}


def _generated_batches(value: Any, source: Source) -> dict[str, Any]:
    """Convert verl's filter_groups.max_num_gen_batches to {"rollout.dynamic_sampling.max_batches": value}.

    The value 0, which means no limit in verl, becomes 10000. If filter_groups.enable is off, verl ignores the
    limit, and the result is {}: no key is set.
    """
    if not truth(source["algorithm.filter_groups.enable"]):
        return {}
    return {"rollout.dynamic_sampling.max_batches": float(value) or 10000.0}


def _loss_mode(source: Source) -> str:
    """Return verl's name of the policy loss that a run uses, such as `vanilla`.

    The name is the value of policy_loss.loss_mode. With rollout_correction.bypass_mode, the name follows from
    rollout_correction.loss_type instead: `ppo_clip` gives `vanilla`, `reinforce` gives `gpg`, and any other
    value gives `unknown`.
    """
    if not bypasses(source):
        return str(source[f"{ACTOR}.policy_loss.loss_mode"])
    return {"ppo_clip": "vanilla", "reinforce": "gpg"}.get(source[f"{CORRECTION}.loss_type"], "unknown")


def _loss(value: Any, source: Source) -> dict[str, Any]:
    return choice(LOSS_MODES, "no such policy loss here")(_loss_mode(source), source)


def _aggregation(value: Any, source: Source) -> Any:
    ours = choice(AGGREGATION)(value, source)
    if _loss_mode(source) != "gspo" or ours == "seq-mean-token-mean":
        return ours
    if truth(source[f"{ACTOR}.use_kl_loss"]) or source.number(f"{ACTOR}.entropy_coeff"):
        raise CannotCarry(
            "verl's gspo uses seq-mean-token-mean, and this mode only for KL and entropy; here one mode "
            "applies to all three"
        )
    return {}


def _scale_factor(value: Any, source: Source) -> dict[str, Any]:
    if value is None or source[f"{ACTOR}.loss_agg_mode"] != "seq-mean-token-sum-norm":
        return {}
    if source.number(f"{ACTOR}.loss_scale_factor") != source.number("data.max_response_length"):
        raise CannotCarry(
            "seq-mean-token-sum-norm divides by rollout.max_response_length here; the whole gradient has a "
            "different scale"
        )
    return {}


_PER_GPU = "packed, not padded"

ALGORITHM = (
    becomes(
        "algorithm.adv_estimator",
        "algorithm.adv_estimator",
        choice(ESTIMATORS, "no such estimator here (no critic)"),
        "grpo_vectorized: grpo, rloo_vectorized: rloo; gpg has another alpha; a group of one has the "
        "advantage 0 here",
        default="gae",
    ),
    becomes("algorithm.norm_adv_by_std_in_grpo", "algorithm.norm_adv_by_std_in_grpo", flag, default=True),
    becomes("algorithm.use_kl_in_reward", "algorithm.use_kl_in_reward", flag, default=False),
    same("algorithm.kl_penalty", "algorithm.kl_penalty", default="kl"),
    same("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.type", default="fixed"),
    same("algorithm.kl_ctrl.kl_coef", "algorithm.kl_ctrl.kl_coef", default=0.001),
    same("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.target_kl", default=0.1),
    same("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.horizon", default=10000),
    becomes(
        "algorithm.gamma",
        (),
        _discounting(("gae", "reinforce_plus_plus", "remax"), "advantages here are not discounted"),
        "only 1 where the estimator reads it (gae, reinforce_plus_plus, remax)",
    ),
    becomes(
        "algorithm.lam",
        (),
        _discounting(("gae",), "there is no critic here"),
        "only 1 where the estimator reads it (gae)",
    ),
    becomes(
        "algorithm.filter_groups.enable",
        ("algorithm.filters", "rollout.dynamic_sampling.enabled"),
        _filter_groups,
        "true: the filter nonzero_variance, and new prompts for dropped groups",
    ),
    becomes(
        "algorithm.filter_groups.max_num_gen_batches",
        "rollout.dynamic_sampling.max_batches",
        _generated_batches,
        "0 (no limit) becomes 10000",
    ),
    becomes(
        "algorithm.filter_groups.metric",
        (),
        _group_metric,
        "groups are judged by the training reward; read only with filter_groups.enable",
    ),
    absorbed(
        "algorithm.filter_groups.max_inflight_gen_batches", "see rollout.dynamic_sampling.over_sampling"
    ),
    fixed("algorithm.use_pf_ppo", (False, None), "samples are never drawn again by their weight here"),
    absorbed("algorithm.pf_ppo.*", "belongs to algorithm.use_pf_ppo"),
    *ROLLOUT_CORRECTION,
)

LOSS = (
    becomes(
        f"{ACTOR}.clip_ratio",
        ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
        clip_ratios,
        "clip_ratio_low and clip_ratio_high win, which verl's own files set to 0.2",
    ),
    same(f"{ACTOR}.clip_ratio_low", "algorithm.clip_ratio_low", default=0.2),
    same(f"{ACTOR}.clip_ratio_high", "algorithm.clip_ratio_high", default=0.2),
    becomes(
        f"{ACTOR}.clip_ratio_c",
        "algorithm.clip_ratio_c",
        lambda value, source: value if _loss_mode(source) == "vanilla" else None,
        "verl always applies dual clip",
        default=3.0,
    ),
    becomes(
        f"{ACTOR}.policy_loss.loss_mode",
        ("algorithm.surrogate", "algorithm.ratio_level", "algorithm.loss_agg_mode"),
        _loss,
        "vanilla: clip, ratio of the token; gspo: clip, ratio of the sequence, always seq-mean-token-mean; "
        "cispo: cispo; gpg: reinforce; in bypass_mode, loss_type decides",
        default="vanilla",
    ),
    becomes(
        f"{ACTOR}.loss_agg_mode",
        "algorithm.loss_agg_mode",
        _aggregation,
        "always a mean over the whole optimizer step; not read with gspo; before February 2026, verl's "
        "seq-mean-token-sum-norm did not divide by the number of trajectories",
        default="token-mean",
    ),
    becomes(f"{ACTOR}.use_kl_loss", "algorithm.use_kl_loss", flag, default=False),
    same(f"{ACTOR}.kl_loss_coef", "algorithm.kl_loss_coef", default=0.001),
    same(
        f"{ACTOR}.kl_loss_type",
        "algorithm.kl_loss_type",
        "the same names",
        default="low_var_kl",
    ),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coeff", default=0),
    becomes(
        f"{ACTOR}.policy_loss.*",
        (),
        _of_other_losses,
        "belongs to losses that do not exist here (clip_cov, kl_cov, dro, sapo)",
    ),
    becomes(f"{ACTOR}.tau_pos", (), _of_other_losses, "belongs to a loss that does not exist here (sapo)"),
    becomes(f"{ACTOR}.tau_neg", (), _of_other_losses, "belongs to a loss that does not exist here (sapo)"),
    becomes(
        f"{ACTOR}.loss_scale_factor",
        (),
        _scale_factor,
        "seq-mean-token-sum-norm divides by rollout.max_response_length here; verl's default is the width of "
        "the padded response tensor",
    ),
)

BATCH = (
    *trains(
        same("data.train_batch_size", "data.train_batch_size", default=1024),
        same(
            f"{ACTOR}.ppo_mini_batch_size",
            "train.ppo_mini_batch_size",
            "prompts in both; must divide data.train_batch_size here",
            default=256,
        ),
        same(f"{ACTOR}.ppo_epochs", "train.ppo_epochs", default=1),
        same(f"{ROLLOUT}.n", "rollout.n", default=1),
    ),
    becomes(
        f"{ACTOR}.use_dynamic_bsz",
        "train.max_tokens_per_micro_batch",
        room_for(_longest),
        "always by tokens",
        default=False,
    ),
    becomes(
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "train.max_tokens_per_micro_batch",
        _micro_batch,
        _PER_GPU,
        unit="sequences per GPU -> tokens",
    ),
    becomes(
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "train.max_tokens_per_micro_batch",
        _dynamic_tokens,
        "per CP rank in both; here at least the longest sequence",
    ),
    dropped(f"{ACTOR}.ppo_micro_batch_size", "deprecated in verl; use ppo_micro_batch_size_per_gpu"),
    dropped(
        "*micro_batch_size*",
        "all passes of a step use one partition into micro-batches: train.max_tokens_per_micro_batch",
    ),
    dropped(
        "*max_token_len*",
        "all passes of a step use one partition into micro-batches: train.max_tokens_per_micro_batch",
    ),
    dropped("*log_prob_use_dynamic_bsz", "micro-batches are always packed by tokens here"),
    fixed(f"{ACTOR}.shuffle", (False,), "the order within a step is that of the batch here"),
)

VERL = System(
    "verl",
    (
        dropped("*_target_", "verl's class for a section"),
        *trains(*ALGORITHM, dropped("algorithm.*", "no such part of the algorithm here"), *LOSS),
        *(*BATCH, *DATA, *REWARD, *ENGINE, *OPTIMIZER, *TRAINER),
    ),
    findings,
    refusal,
)

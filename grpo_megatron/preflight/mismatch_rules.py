"""Rules about the section mismatch, which handles log-probs that differ between engine and trainer."""

from collections.abc import Iterator

from grpo_megatron.algorithm.correction import MASKING, OF_SEQUENCES, REJECTION_BOUNDS
from grpo_megatron.config.algorithm import (
    MismatchAction,
    MismatchConfig,
    MismatchCorrection,
    MismatchRejection,
)
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config.
MISMATCH = RuleBook()

_TRAIN = ("train",)


@MISMATCH.rule(
    "A correction that weights with the ratio to the engine needs a policy ratio that is not to the engine, "
    "or none.",
    "mismatch.correction",
    "train.old_logprobs",
    "algorithm.surrogate",
    commands=_TRAIN,
)
def mismatch_is_weighted_once(config: Config) -> Iterator[str]:
    correction = config.mismatch.correction
    to_the_engine = (
        config.train.old_logprobs == OldLogprobs.rollout and config.algorithm.surrogate != "reinforce"
    )
    if to_the_engine and correction != MismatchCorrection.none:
        yield (
            f"mismatch.correction={correction.value} with train.old_logprobs=rollout would count the ratio "
            "to the engine twice: the policy ratio is to the engine already; use mismatch.rejection, or "
            "algorithm.surrogate=reinforce, which has none"
        )


@MISMATCH.rule(
    "The bounds are those of a correction, so there must be one.",
    "mismatch.ratio_low",
    "mismatch.ratio_high",
    "mismatch.correction",
    commands=_TRAIN,
)
def bounds_have_a_correction(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    if mismatch.correction == MismatchCorrection.none and (mismatch.ratio_low, mismatch.ratio_high) != (
        None,
        None,
    ):
        yield "mismatch.ratio_low and ratio_high are bounds of mismatch.correction, which is none"


@MISMATCH.rule(
    "The bounds are those of a rejection, so there must be one.",
    "mismatch.rejection_low",
    "mismatch.rejection_high",
    "mismatch.rejection",
    commands=_TRAIN,
)
def bounds_have_a_rejection(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    if mismatch.rejection == MismatchRejection.none and (mismatch.rejection_low, mismatch.rejection_high) != (
        None,
        None,
    ):
        yield "mismatch.rejection_low and rejection_high are bounds of mismatch.rejection, which is none"


@MISMATCH.rule(
    "A rejection by a KL has one bound, the largest KL to keep, for which there is no published number.",
    "mismatch.rejection",
    "mismatch.rejection_low",
    "mismatch.rejection_high",
    commands=_TRAIN,
)
def kl_rejection_has_its_bound(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    if mismatch.rejection == MismatchRejection.none or mismatch.rejection in REJECTION_BOUNDS:
        return
    if mismatch.rejection_high is None:
        yield (
            f"mismatch.rejection={mismatch.rejection.value} needs mismatch.rejection_high, the largest KL to "
            "keep"
        )
    if mismatch.rejection_low is not None:
        yield (
            f"mismatch.rejection_low is a bound of ratios; mismatch.rejection={mismatch.rejection.value} is "
            "a KL"
        )


def _in_order(config: Config, name: str) -> Iterator[str]:
    """Yield a violation if mismatch.{name}_low is above mismatch.{name}_high."""
    low, high = getattr(config.mismatch, f"{name}_low"), getattr(config.mismatch, f"{name}_high")
    if low is not None and high is not None and low > high:
        yield f"mismatch.{name}_low={low} is more than mismatch.{name}_high={high}"


@MISMATCH.rule(
    "The lower bound is not above the upper one.",
    "mismatch.ratio_low",
    "mismatch.ratio_high",
    commands=_TRAIN,
)
def bounds_are_in_order(config: Config) -> Iterator[str]:
    yield from _in_order(config, "ratio")


@MISMATCH.rule(
    "The lower bound is not above the upper one.",
    "mismatch.rejection_low",
    "mismatch.rejection_high",
    commands=_TRAIN,
)
def rejection_bounds_are_in_order(config: Config) -> Iterator[str]:
    yield from _in_order(config, "rejection")


@MISMATCH.rule("A threshold is one of an action.", "mismatch.threshold", "mismatch.action", commands=_TRAIN)
def threshold_has_an_action(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    if mismatch.action == MismatchAction.off and mismatch.threshold != MismatchConfig().threshold:
        yield f"mismatch.threshold={mismatch.threshold} means nothing with mismatch.action=off"


@MISMATCH.rule(
    "Means over what is not masked need something that masks.",
    "mismatch.renormalize",
    "mismatch.correction",
    "mismatch.rejection",
    "mismatch.action",
    commands=_TRAIN,
)
def renormalize_has_a_mask(config: Config) -> Iterator[str]:
    mismatch = config.mismatch
    masks = mismatch.rejection != MismatchRejection.none or mismatch.correction in MASKING
    if mismatch.renormalize and not masks and mismatch.action != MismatchAction.mask:
        yield (
            "mismatch.renormalize means nothing where no token is masked: see mismatch.correction, "
            "rejection, action"
        )


@MISMATCH.rule(
    "Means over what is not masked need to know it before training.",
    "mismatch.renormalize",
    "train.old_logprobs",
    commands=_TRAIN,
)
def renormalize_knows_in_time(config: Config) -> Iterator[str]:
    old_logprobs = config.train.old_logprobs
    if config.mismatch.renormalize and old_logprobs != OldLogprobs.recompute:
        yield (
            "mismatch.renormalize needs what is masked before training, so train.old_logprobs=recompute, "
            f"which is {old_logprobs.value}"
        )


@MISMATCH.rule(
    "The gradient of a whole sequence's ratio is exact only where its tokens share one factor and one "
    "advantage.",
    "algorithm.ratio_level",
    "mismatch.correction",
    "mismatch.rejection",
    "mismatch.action",
    "algorithm.adv_estimator",
    "algorithm.use_kl_in_reward",
    commands=_TRAIN,
)
def sequence_sum_has_one_factor(config: Config) -> Iterator[str]:
    algorithm, mismatch = config.algorithm, config.mismatch
    if algorithm.ratio_level != "sequence_sum":
        return
    of_tokens = {
        f"mismatch.correction={mismatch.correction.value}": mismatch.correction
        not in (MismatchCorrection.none, *OF_SEQUENCES),
        f"mismatch.rejection={mismatch.rejection.value}": mismatch.rejection.value.startswith("token_"),
        "mismatch.action=mask": mismatch.action == MismatchAction.mask,
        "algorithm.adv_estimator=reinforce_plus_plus with use_kl_in_reward": algorithm.adv_estimator
        == "reinforce_plus_plus"
        and algorithm.use_kl_in_reward,
    }
    for what, said in of_tokens.items():
        if said:
            yield (
                f"{what} is another number for each token, and algorithm.ratio_level=sequence_sum has one "
                "ratio for the whole sequence; use what is of sequences (seq_tis, mis, a rejection of "
                "seq_*), or another ratio_level"
            )

"""Rules about the section mismatch, which handles log-probs that differ between engine and trainer."""

from grpo_megatron.algorithm.correction import MASKING, OF_SEQUENCES, REJECTION_BOUNDS
from grpo_megatron.config.algorithm import MismatchCorrection, MismatchRejection
from grpo_megatron.preflight.rule import RuleBook, at_most, excludes, needs, only_with

_MASKING = "|".join(one.value for one in MASKING)
_TOKEN_CORRECTIONS = "|".join(
    one.value for one in MismatchCorrection if one not in (MismatchCorrection.none, *OF_SEQUENCES)
)
_TOKEN_REJECTIONS = "|".join(one.value for one in MismatchRejection if one.value.startswith("token_"))
_KL_REJECTIONS = "|".join(
    one.value for one in MismatchRejection if one not in (MismatchRejection.none, *REJECTION_BOUNDS)
)

# Each check takes a Config.
MISMATCH = RuleBook(
    excludes(
        "mismatch.correction!=none",
        "train.old_logprobs=rollout and algorithm.surrogate!=reinforce",
        "the policy ratio is already relative to the engine, so the correction would apply it twice; use "
        "mismatch.rejection instead",
    ),
    only_with(("mismatch.ratio_low", "mismatch.ratio_high"), "mismatch.correction!=none"),
    only_with(("mismatch.rejection_low", "mismatch.rejection_high"), "mismatch.rejection!=none"),
    needs(
        f"mismatch.rejection={_KL_REJECTIONS}",
        "mismatch.rejection_high",
        "it is the largest KL to keep, and there is no published default",
    ),
    excludes(
        f"mismatch.rejection={_KL_REJECTIONS}",
        "mismatch.rejection_low!=null",
        "a KL has no lower bound",
    ),
    at_most("mismatch.ratio_low", "mismatch.ratio_high"),
    at_most("mismatch.rejection_low", "mismatch.rejection_high"),
    only_with("mismatch.threshold", "mismatch.action!=off"),
    needs(
        "mismatch.renormalize=true",
        f"mismatch.rejection!=none or mismatch.correction={_MASKING} or mismatch.action=mask",
        "otherwise no token is masked",
    ),
    needs(
        "mismatch.renormalize=true",
        "train.old_logprobs=recompute",
        "the masked tokens must be known before training",
    ),
    excludes(
        "algorithm.ratio_level=sequence_sum",
        f"mismatch.correction={_TOKEN_CORRECTIONS} or mismatch.rejection={_TOKEN_REJECTIONS} "
        "or mismatch.action=mask "
        "or algorithm.adv_estimator=reinforce_plus_plus and algorithm.use_kl_in_reward=true",
        "all tokens of a sequence must have the same factor and advantage; use a correction or rejection "
        "of sequences, or a different algorithm.ratio_level",
    ),
)

"""Rules about the algorithm: sections algorithm, mismatch, ref, and reward.overlong_buffer."""

from grpo_megatron.algorithm.advantages import advantage_estimator
from grpo_megatron.algorithm.correction import MASKING, OF_SEQUENCES, REJECTION_BOUNDS
from grpo_megatron.algorithm.filters import group_filter
from grpo_megatron.algorithm.kl import FULL_KL, KL_TYPES, UNBIASED_TYPES
from grpo_megatron.algorithm.surrogates import RATIO_LEVELS, surrogate
from grpo_megatron.batch.token_weights import LOSS_AGG_MODES
from grpo_megatron.config.algorithm import KLControl, MismatchAction, MismatchCorrection, MismatchRejection
from grpo_megatron.config.schema import Config, OldLogprobs


def choice(key: str, value: str, choices) -> list[str]:
    return [] if value in choices else [f"{key}={value} is unknown; choose one of {', '.join(choices)}"]


def ranges(positive: dict[str, float | None], not_negative: dict[str, float | None]) -> list[str]:
    """Values that are too small, or NaN; None stands for an option that is off."""
    set_ones = {key: value for key, value in (positive | not_negative).items() if value is not None}
    found = [
        f"{key} must be greater than 0, is {value}" for key, value in set_ones.items() if key in positive and not value > 0
    ]
    found += [
        f"{key} must not be negative, is {value}" for key, value in set_ones.items() if key in not_negative and not value >= 0
    ]
    return found


def algorithm_violations(config: Config) -> list[str]:
    """Every broken rule as one sentence that names the keys."""
    return _ranges(config) + _choices(config) + _policy_loss(config) + _kl(config) + _mismatch(config) + _sequence_sum(config)


def _ranges(config: Config) -> list[str]:
    algorithm, mismatch, buffer = config.algorithm, config.mismatch, config.reward.overlong_buffer
    not_negative = {
        "algorithm.clip_ratio_low": algorithm.clip_ratio_low,
        "algorithm.clip_ratio_high": algorithm.clip_ratio_high,
        "mismatch.ratio_low": mismatch.ratio_low,
        "mismatch.ratio_high": mismatch.ratio_high,
        "mismatch.rejection_low": mismatch.rejection_low,
        "mismatch.rejection_high": mismatch.rejection_high,
        "reward.overlong_buffer.length": buffer.length,
        "reward.overlong_buffer.penalty": buffer.penalty,
        "ref.reset_every": config.ref.reset_every,
    }
    positive = {
        "algorithm.adv_clip": algorithm.adv_clip,
        "algorithm.early_stop_imp_ratio": algorithm.early_stop_imp_ratio,
        "algorithm.entropy_floor": algorithm.entropy_floor,
        "algorithm.kl_ctrl.target_kl": algorithm.kl_ctrl.target_kl,
        "algorithm.kl_ctrl.horizon": algorithm.kl_ctrl.horizon,
        "mismatch.threshold": mismatch.threshold,
    }
    found = ranges(positive, not_negative)
    if algorithm.clip_ratio_c is not None and not algorithm.clip_ratio_c > 1:
        found.append(f"algorithm.clip_ratio_c must be greater than 1, is {algorithm.clip_ratio_c}")
    if buffer.length > config.rollout.max_response_length:
        found.append(
            f"reward.overlong_buffer.length={buffer.length} is more than "
            f"rollout.max_response_length={config.rollout.max_response_length}"
        )
    return found


def _choices(config: Config) -> list[str]:
    algorithm = config.algorithm
    found = advantage_estimator.problems(algorithm.adv_estimator) + surrogate.problems(algorithm.surrogate)
    for name in algorithm.filters:
        found += group_filter.problems(name)
    found += choice("algorithm.loss_agg_mode", algorithm.loss_agg_mode, LOSS_AGG_MODES)
    found += choice("algorithm.kl_loss_type", algorithm.kl_loss_type, (*KL_TYPES, FULL_KL))
    found += choice("algorithm.kl_penalty", algorithm.kl_penalty, [name for name in KL_TYPES if not name.endswith("+")])
    found += choice("algorithm.ratio_level", algorithm.ratio_level, RATIO_LEVELS)
    return found


def _policy_loss(config: Config) -> list[str]:
    algorithm = config.algorithm
    found = []
    per_sequence = ("group-sum", "seq-mean-token-mean")
    if algorithm.ratio_level == "sequence_sum" and algorithm.loss_agg_mode not in per_sequence:
        found.append(
            f"algorithm.ratio_level=sequence_sum needs the weights of algorithm.loss_agg_mode={' or '.join(per_sequence)}, "
            f"which is {algorithm.loss_agg_mode}"
        )
    if algorithm.surrogate == "reinforce" and algorithm.ratio_level != "token":
        found.append(
            f"algorithm.surrogate=reinforce has no policy ratio, so algorithm.ratio_level={algorithm.ratio_level} means nothing"
        )
    if algorithm.clip_ratio_c is not None and algorithm.surrogate in ("cispo", "reinforce"):
        found.append(f"algorithm.clip_ratio_c goes with algorithm.surrogate=clip, not with {algorithm.surrogate}")
    if algorithm.early_stop_imp_ratio is not None and config.train.old_logprobs == OldLogprobs.current:
        found.append("algorithm.early_stop_imp_ratio: with train.old_logprobs=current the policy ratio is always 1")
    if algorithm.entropy_floor is not None and not algorithm.entropy_coeff > 0:
        found.append("algorithm.entropy_floor needs algorithm.entropy_coeff, the bonus that acts below it")
    return found


def _kl(config: Config) -> list[str]:
    algorithm, ref = config.algorithm, config.ref
    found = []
    if algorithm.kl_loss_unbiased and (not algorithm.use_kl_loss or algorithm.kl_loss_type not in UNBIASED_TYPES):
        found.append(
            f"algorithm.kl_loss_unbiased needs algorithm.use_kl_loss and algorithm.kl_loss_type of {', '.join(UNBIASED_TYPES)}, "
            f"which is {algorithm.kl_loss_type}"
        )
    if algorithm.use_kl_in_reward and config.train.old_logprobs == OldLogprobs.current:
        found.append(
            "algorithm.use_kl_in_reward needs the old log-probs before training: train.old_logprobs=recompute or rollout"
        )
    if algorithm.kl_ctrl.type == KLControl.adaptive and not algorithm.use_kl_in_reward:
        found.append("algorithm.kl_ctrl.type=adaptive steers the KL in the reward: set algorithm.use_kl_in_reward")
    if ref.reset_every > 0 and not algorithm.needs_reference:
        found.append("ref.reset_every: there is no reference without algorithm.use_kl_loss or algorithm.use_kl_in_reward")
    if ref.reset_every > 0 and config.checkpoint.every % ref.reset_every:
        # The reference is then the checkpoint's own weights, and need not be stored.
        found.append(
            f"checkpoint.every={config.checkpoint.every} must be a multiple of ref.reset_every={ref.reset_every}, "
            "so that a resumed run knows its reference"
        )
    return found


def _mismatch(config: Config) -> list[str]:
    mismatch = config.mismatch
    found = []
    corrects, rejects = mismatch.correction != MismatchCorrection.none, mismatch.rejection != MismatchRejection.none
    if config.train.old_logprobs == OldLogprobs.rollout and corrects and config.algorithm.surrogate != "reinforce":
        found.append(
            f"mismatch.correction={mismatch.correction.value} with train.old_logprobs=rollout would count the ratio to the engine "
            "twice: the policy ratio is to the engine already; use mismatch.rejection, or algorithm.surrogate=reinforce, which has none"
        )
    if not corrects and (mismatch.ratio_low is not None or mismatch.ratio_high is not None):
        found.append("mismatch.ratio_low and ratio_high are bounds of mismatch.correction, which is none")
    if not rejects and (mismatch.rejection_low is not None or mismatch.rejection_high is not None):
        found.append("mismatch.rejection_low and rejection_high are bounds of mismatch.rejection, which is none")
    if rejects and mismatch.rejection not in REJECTION_BOUNDS:
        if mismatch.rejection_high is None:
            found.append(f"mismatch.rejection={mismatch.rejection.value} needs mismatch.rejection_high, the largest KL to keep")
        if mismatch.rejection_low is not None:
            found.append(f"mismatch.rejection_low is a bound of ratios; mismatch.rejection={mismatch.rejection.value} is a KL")
    for name in ("ratio", "rejection"):
        low, high = getattr(mismatch, f"{name}_low"), getattr(mismatch, f"{name}_high")
        if low is not None and high is not None and low > high:
            found.append(f"mismatch.{name}_low={low} is more than mismatch.{name}_high={high}")
    if mismatch.action == MismatchAction.off and mismatch.threshold != type(mismatch)().threshold:
        found.append(f"mismatch.threshold={mismatch.threshold} means nothing with mismatch.action=off")
    return found + _renormalize(config, rejects or mismatch.correction in MASKING)


def _renormalize(config: Config, masks: bool) -> list[str]:
    if not config.mismatch.renormalize:
        return []
    if not masks and config.mismatch.action != MismatchAction.mask:
        return ["mismatch.renormalize means nothing where no token is masked: see mismatch.correction, rejection, action"]
    if config.train.old_logprobs != OldLogprobs.recompute:
        return [
            "mismatch.renormalize needs what is masked before training, so train.old_logprobs=recompute, which is "
            f"{config.train.old_logprobs.value}"
        ]
    return []


def _sequence_sum(config: Config) -> list[str]:
    """The gradient of the whole sequence's ratio at a token is exact only where the tokens of a sequence share one factor
    and one advantage."""
    algorithm, mismatch = config.algorithm, config.mismatch
    if algorithm.ratio_level != "sequence_sum":
        return []
    of_tokens = {
        f"mismatch.correction={mismatch.correction.value}": mismatch.correction not in (MismatchCorrection.none, *OF_SEQUENCES),
        f"mismatch.rejection={mismatch.rejection.value}": mismatch.rejection.value.startswith("token_"),
        "mismatch.action=mask": mismatch.action == MismatchAction.mask,
        "algorithm.adv_estimator=reinforce_plus_plus with use_kl_in_reward": algorithm.adv_estimator == "reinforce_plus_plus"
        and algorithm.use_kl_in_reward,
    }
    return [
        f"{what} is another number for each token, and algorithm.ratio_level=sequence_sum has one ratio for the whole sequence; "
        "use what is of sequences (seq_tis, mis, a rejection of seq_*), or another ratio_level"
        for what, said in of_tokens.items()
        if said
    ]

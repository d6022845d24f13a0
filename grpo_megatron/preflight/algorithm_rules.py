"""Rules about the algorithm: the sections algorithm, mismatch and ref, and reward.overlong_buffer."""

from collections.abc import Iterator

from grpo_megatron.algorithm.advantages import GROUP_RELATIVE, advantage_estimator
from grpo_megatron.algorithm.filters import group_filter
from grpo_megatron.algorithm.kl import UNBIASED_TYPES
from grpo_megatron.algorithm.surrogates import surrogate
from grpo_megatron.config.algorithm import KLControl
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.preflight.rule import RuleBook

# Each check takes a Config. All rules are for `train`, because other commands have no choice of algorithm.
ALGORITHM = RuleBook()

_TRAIN = ("train",)
_WITHOUT_RATIO = ("cispo", "reinforce")
_PER_SEQUENCE = ("group-sum", "seq-mean-token-mean")


@ALGORITHM.rule(
    "The estimator is a registered one, or a function that can be imported.",
    "algorithm.adv_estimator",
    commands=_TRAIN,
)
def estimator_is_known(config: Config) -> Iterator[str]:
    yield from advantage_estimator.problems(config.algorithm.adv_estimator)


@ALGORITHM.rule(
    "The surrogate is a registered one, or a function that can be imported.",
    "algorithm.surrogate",
    commands=_TRAIN,
)
def surrogate_is_known(config: Config) -> Iterator[str]:
    yield from surrogate.problems(config.algorithm.surrogate)


@ALGORITHM.rule(
    "Each filter is a registered one, or a function that can be imported.",
    "algorithm.filters",
    commands=_TRAIN,
)
def filters_are_known(config: Config) -> Iterator[str]:
    for name in config.algorithm.filters:
        yield from group_filter.problems(name)


@ALGORITHM.rule(
    "An estimator that compares the samples of a group needs groups of several.",
    "rollout.n",
    "algorithm.adv_estimator",
    commands=_TRAIN,
)
def groups_can_be_compared(config: Config) -> Iterator[str]:
    if config.rollout.n == 1 and config.algorithm.adv_estimator in GROUP_RELATIVE:
        yield "rollout.n=1 gives every sample the advantage 0; a group needs at least 2"


@ALGORITHM.rule(
    "The soft overlong punishment begins within the response.",
    "reward.overlong_buffer.length",
    "rollout.max_response_length",
    commands=_TRAIN,
)
def overlong_buffer_is_within_the_response(config: Config) -> Iterator[str]:
    length, longest = config.reward.overlong_buffer.length, config.rollout.max_response_length
    if length > longest:
        yield f"reward.overlong_buffer.length={length} is more than rollout.max_response_length={longest}"


@ALGORITHM.rule(
    "The ratio of a whole sequence goes with one equal weight for all tokens of a sequence.",
    "algorithm.ratio_level",
    "algorithm.loss_agg_mode",
    commands=_TRAIN,
)
def sequence_sum_has_its_weights(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.ratio_level == "sequence_sum" and algorithm.loss_agg_mode not in _PER_SEQUENCE:
        yield (
            "algorithm.ratio_level=sequence_sum needs the weights of "
            f"algorithm.loss_agg_mode={' or '.join(_PER_SEQUENCE)}, which is {algorithm.loss_agg_mode}"
        )


@ALGORITHM.rule(
    "A level of the policy ratio means something only for a policy loss with a ratio.",
    "algorithm.surrogate",
    "algorithm.ratio_level",
    commands=_TRAIN,
)
def reinforce_has_no_ratio(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.surrogate == "reinforce" and algorithm.ratio_level != "token":
        yield (
            "algorithm.surrogate=reinforce has no policy ratio, so "
            f"algorithm.ratio_level={algorithm.ratio_level} means nothing"
        )


@ALGORITHM.rule(
    "Dual clip is a part of the clipped policy loss.",
    "algorithm.clip_ratio_c",
    "algorithm.surrogate",
    commands=_TRAIN,
)
def dual_clip_has_its_loss(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.clip_ratio_c is not None and algorithm.surrogate in _WITHOUT_RATIO:
        yield f"algorithm.clip_ratio_c goes with algorithm.surrogate=clip, not with {algorithm.surrogate}"


@ALGORITHM.rule(
    "A limit of the policy ratio needs old log-probs that are not the current ones.",
    "algorithm.early_stop_imp_ratio",
    "train.old_logprobs",
    commands=_TRAIN,
)
def early_stop_has_a_ratio(config: Config) -> Iterator[str]:
    if config.algorithm.early_stop_imp_ratio is not None and config.train.old_logprobs == OldLogprobs.current:
        yield "algorithm.early_stop_imp_ratio: with train.old_logprobs=current the policy ratio is always 1"


@ALGORITHM.rule(
    "The entropy floor switches a bonus on and off, so there must be one.",
    "algorithm.entropy_floor",
    "algorithm.entropy_coeff",
    commands=_TRAIN,
)
def entropy_floor_has_a_bonus(config: Config) -> Iterator[str]:
    if config.algorithm.entropy_floor is not None and not config.algorithm.entropy_coeff > 0:
        yield "algorithm.entropy_floor needs algorithm.entropy_coeff, the bonus that acts below it"


@ALGORITHM.rule(
    "The unbiased KL is that in the loss, of an estimator that has one.",
    "algorithm.kl_loss_unbiased",
    "algorithm.use_kl_loss",
    "algorithm.kl_loss_type",
    commands=_TRAIN,
)
def unbiased_kl_has_its_estimator(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.kl_loss_unbiased and (
        not algorithm.use_kl_loss or algorithm.kl_loss_type not in UNBIASED_TYPES
    ):
        yield (
            "algorithm.kl_loss_unbiased needs algorithm.use_kl_loss and algorithm.kl_loss_type of "
            f"{', '.join(UNBIASED_TYPES)}, which is {algorithm.kl_loss_type}"
        )


@ALGORITHM.rule(
    "The KL in the reward is known before training only if the old log-probs are.",
    "algorithm.use_kl_in_reward",
    "train.old_logprobs",
    commands=_TRAIN,
)
def kl_in_reward_is_known_in_time(config: Config) -> Iterator[str]:
    if config.algorithm.use_kl_in_reward and config.train.old_logprobs == OldLogprobs.current:
        yield (
            "algorithm.use_kl_in_reward needs the old log-probs before training: "
            "train.old_logprobs=recompute or rollout"
        )


@ALGORITHM.rule(
    "The adaptive coefficient is that of the KL in the reward.",
    "algorithm.kl_ctrl.type",
    "algorithm.use_kl_in_reward",
    commands=_TRAIN,
)
def adaptive_kl_has_its_kl(config: Config) -> Iterator[str]:
    if config.algorithm.kl_ctrl.type == KLControl.adaptive and not config.algorithm.use_kl_in_reward:
        yield "algorithm.kl_ctrl.type=adaptive steers the KL in the reward: set algorithm.use_kl_in_reward"


@ALGORITHM.rule(
    "Only a reference that a KL asks for can be reset.",
    "ref.reset_every",
    "algorithm.use_kl_loss",
    "algorithm.use_kl_in_reward",
    commands=_TRAIN,
)
def there_is_a_reference_to_reset(config: Config) -> Iterator[str]:
    if config.ref.reset_every > 0 and not config.algorithm.needs_reference:
        yield (
            "ref.reset_every: there is no reference without algorithm.use_kl_loss or "
            "algorithm.use_kl_in_reward"
        )

"""Rules about the algorithm: the sections algorithm and ref, and reward.overlong_buffer."""

from collections.abc import Iterator

from grpo_megatron.algorithm.advantages import GROUP_RELATIVE, advantage_estimator, columns_of
from grpo_megatron.algorithm.filters import group_filter
from grpo_megatron.algorithm.kl import UNBIASED_TYPES
from grpo_megatron.algorithm.surrogates import surrogate
from grpo_megatron.config.schema import Config, OldLogprobs
from grpo_megatron.preflight.rule import RuleBook, at_most, excludes, needs

# All rules are for `train`, because other commands have no choice of algorithm.
_TRAIN = ("train",)

# Each check takes a Config.
ALGORITHM = RuleBook(
    excludes(
        "rollout.n=1",
        f"algorithm.adv_estimator={'|'.join(GROUP_RELATIVE)}",
        "these estimators compare the samples of a group, so a single sample always gets the advantage 0; "
        "raise rollout.n",
    ),
    at_most("reward.overlong_buffer.length", "rollout.max_response_length"),
    needs(
        "algorithm.ratio_level=sequence_sum",
        "algorithm.loss_agg_mode=group-sum|seq-mean-token-mean",
        "all tokens of a sequence must have the same weight",
    ),
    excludes(
        "algorithm.surrogate=reinforce",
        "algorithm.ratio_level!=token",
        "this surrogate has no policy ratio",
    ),
    excludes(
        "algorithm.clip_ratio_c",
        "algorithm.surrogate=cispo|reinforce|importance_sampling",
        "dual clip is a part of the surrogate clip",
    ),
    excludes(
        "algorithm.early_stop_imp_ratio",
        "train.old_logprobs=current",
        "the policy ratio is always 1 in this case",
    ),
    needs(
        "algorithm.entropy_floor",
        "algorithm.entropy_coeff",
        "the floor switches the entropy bonus on and off",
    ),
    needs(
        "algorithm.kl_loss_unbiased=true",
        f"algorithm.use_kl_loss=true and algorithm.kl_loss_type={'|'.join(UNBIASED_TYPES)}",
        "only the gradients of these estimators have an unbiased form",
    ),
    needs(
        "algorithm.use_kl_in_reward=true",
        "train.old_logprobs=recompute|rollout",
        "the KL in the reward must be known before training",
    ),
    needs(
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl sets the coefficient of the KL in the reward",
    ),
    needs(
        "ref.reset_every",
        "algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true",
        "a reference model is used only for a KL",
    ),
)


@ALGORITHM.rule(
    "algorithm.adv_estimator must name a registered estimator, or a function as module:attribute.",
    "algorithm.adv_estimator",
    commands=_TRAIN,
    whole=True,
)
def estimator_is_known(config: Config) -> Iterator[str]:
    yield from advantage_estimator.problems(config.algorithm.adv_estimator)


@ALGORITHM.rule(
    "The log-probs that algorithm.adv_estimator asks for (needs_columns) must be computed before training.",
    "algorithm.adv_estimator",
    "train.old_logprobs",
    "algorithm.use_kl_loss",
    "algorithm.use_kl_in_reward",
    commands=_TRAIN,
)
def columns_are_computed(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if advantage_estimator.problems(algorithm.adv_estimator):
        return
    names = columns_of(algorithm)
    if "old_logp" in names and config.train.old_logprobs == OldLogprobs.current:
        yield "old_logp is not; set train.old_logprobs=recompute"
    if "ref_logp" in names and not algorithm.needs_reference:
        yield "ref_logp is not; set algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true"


@ALGORITHM.rule(
    "algorithm.surrogate must name a registered surrogate, or a function as module:attribute.",
    "algorithm.surrogate",
    commands=_TRAIN,
    whole=True,
)
def surrogate_is_known(config: Config) -> Iterator[str]:
    yield from surrogate.problems(config.algorithm.surrogate)


@ALGORITHM.rule(
    "algorithm.filters must name registered filters, or functions as module:attribute.",
    "algorithm.filters",
    commands=_TRAIN,
    whole=True,
)
def filters_are_known(config: Config) -> Iterator[str]:
    for name in config.algorithm.filters:
        yield from group_filter.problems(name)

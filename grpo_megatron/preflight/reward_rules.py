"""Rules about rewards: their functions and options, failures, the reward model, and programs in a sandbox."""

from collections.abc import Iterator
from dataclasses import fields

from grpo_megatron.config.reward import MODEL, OnFailure, RewardConfig, functions_of
from grpo_megatron.config.sandbox import SandboxLimits
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import (
    COMMANDS,
    ENGINE_COMMANDS,
    RuleBook,
    excludes,
    only_with,
    shown,
    value_of,
)
from grpo_megatron.rewards import known_program, resolve_rewards
from grpo_megatron.rollout.environments import asks_reward_function

_TRAIN = ("train",)
# Keys that name reward functions; config.reward.functions_of reads both.
_FUNCTIONS = ("reward.function", "reward.terms")
# Keys about the reward functions. They have no effect with an environment that computes all rewards itself.
_REWARDS = (*_FUNCTIONS, "reward.args", "reward.extract", "reward.answer_from", "reward.response_from")

# Each check takes a Config.
REWARD = RuleBook(
    excludes(
        "reward.terms",
        f"reward.function!={RewardConfig().function} or reward.args",
        "each term has its own function and options",
        ENGINE_COMMANDS,
    ),
    only_with("reward.failure_value", "reward.on_failure=value", commands=ENGINE_COMMANDS),
)


@REWARD.rule(
    "reward.answer_from must contain at least one place; [whole] uses the answer as it is.",
    "reward.answer_from",
    commands=COMMANDS,
)
def answers_are_somewhere(config: Config) -> Iterator[str]:
    if not config.reward.answer_from:
        yield shown(config, "reward.answer_from")


@REWARD.rule(
    "reward.extract has an effect only with the reward function exact_match.",
    "reward.extract",
    *_FUNCTIONS,
    commands=ENGINE_COMMANDS,
)
def extract_has_its_reward(config: Config) -> Iterator[str]:
    functions = functions_of(config.reward)
    if config.reward.extract is not None and "exact_match" not in functions:
        yield f"reward functions: {', '.join(functions)}"


@REWARD.rule(
    "The reward functions of reward.function or reward.terms must exist, or be importable, and must accept "
    "their options.",
    *_FUNCTIONS,
    "reward.args",
    "reward.extract",
    "rollout.environment",
    "rollout.agent.function",
    "rollout.agent.command",
    "rollout.replay",
    commands=ENGINE_COMMANDS,
    whole=True,
)
def rewards_are_known(config: Config) -> Iterator[str]:
    if config.rollout.replay or not _asks_reward_function(config):
        return
    try:
        rewards = resolve_rewards(config.reward)
    except UserError as error:
        yield str(error)
        return
    for reward in rewards:
        if reward.of_group and (config.rollout.environment is not None or config.rollout.agent.is_set):
            yield (
                f"reward {reward.name} compares the responses to a prompt, so it cannot be combined with "
                "rollout.environment or rollout.agent; use a different reward"
            )


@REWARD.rule(
    "A correct test program must pass with reward.code.preamble and within reward.code.limits.",
    *_FUNCTIONS,
    "reward.code.preamble",
    "reward.code.isolation",
    *(f"reward.code.limits.{field.name}" for field in fields(SandboxLimits)),
    "rollout.environment",
    "rollout.tools",
    "rollout.replay",
    commands=ENGINE_COMMANDS,
    whole=True,
)
def a_right_program_passes(config: Config) -> Iterator[str]:
    code, rollout = config.reward.code, config.rollout
    scored = "code" in functions_of(config.reward) and _asks_reward_function(config)
    if rollout.replay or not (scored or (rollout.environment == "tools" and "python" in rollout.tools)):
        return
    try:
        problem = known_program.problem(code, code.preamble if scored else "")
    except UserError:  # this machine has no sandbox, which another rule reports
        return
    if problem:
        yield problem


@REWARD.rule(
    "reward.on_failure=leave_out needs train.packing=true where several ranks share the samples, because "
    "groups then have any size, but without packing all ranks need the same number of samples.",
    "reward.on_failure",
    "train.packing",
    "megatron.data_parallel",
    "megatron.pipeline_parallel",
    "megatron.virtual_pipeline",
    commands=_TRAIN,
)
def smaller_groups_can_be_shared(config: Config) -> Iterator[str]:
    sizes = ParallelSizes.from_config(config.megatron)
    multiple = sizes.dp * sizes.micro_batch_multiple
    if config.reward.on_failure == OnFailure.leave_out and not config.train.packing and multiple > 1:
        yield f"the number of samples must be a multiple of {multiple}"


@REWARD.rule(
    "reward.code.limits.seconds must be less than reward.timeout, which limits the time for all tests of a "
    "response.",
    "reward.code.limits.seconds",
    "reward.timeout",
    *_FUNCTIONS,
    commands=ENGINE_COMMANDS,
)
def programs_end_before_the_reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if "code" in functions_of(reward) and reward.code.limits.seconds >= reward.timeout:
        yield shown(config, "reward.code.limits.seconds", "reward.timeout")


@REWARD.rule(
    f"{', '.join(_REWARDS)} have no effect with a rollout.environment that rewards the model itself; remove "
    "them.",
    "rollout.environment",
    *_REWARDS,
    commands=ENGINE_COMMANDS,
)
def environment_gives_the_rewards(config: Config) -> Iterator[str]:
    if _asks_reward_function(config):
        return
    changed = [key for key in _REWARDS if value_of(config, key) != value_of(Config(), key)]
    if changed:
        yield shown(config, *changed)


def _asks_reward_function(config: Config) -> bool:
    """Return True if the run uses the configured reward functions (reward.function or reward.terms).

    The result is False only if rollout.environment computes all rewards itself. For an unknown environment it
    is True; another rule reports that error.
    """
    try:
        return asks_reward_function(config.rollout, config.reward)
    except UserError:  # another rule reports the error
        return True


@REWARD.rule(
    "reward.model.path must be set if, and only if, model is one of the reward functions.",
    *_FUNCTIONS,
    "reward.model.path",
    commands=_TRAIN,
)
def reward_model_is_somewhere(config: Config) -> Iterator[str]:
    functions = functions_of(config.reward)
    if (MODEL in functions) != (config.reward.model.path is not None):
        yield f"{shown(config, 'reward.model.path')}, reward functions: {', '.join(functions)}"


@REWARD.rule(
    "reward.terms can have only one term with the function model, because there is only one "
    "reward.model.path.",
    *_FUNCTIONS,
    commands=_TRAIN,
)
def there_is_one_reward_model(config: Config) -> Iterator[str]:
    if functions_of(config.reward).count(MODEL) > 1:
        yield shown(config, "reward.terms")


@REWARD.rule(
    "The reward function model cannot be combined with rollout.environment or rollout.agent, because it "
    "scores a single response.",
    *_FUNCTIONS,
    "rollout.environment",
    "rollout.agent.function",
    "rollout.agent.command",
    commands=_TRAIN,
)
def reward_model_scores_one_response(config: Config) -> Iterator[str]:
    several_turns = config.rollout.environment is not None or config.rollout.agent.is_set
    if MODEL in functions_of(config.reward) and several_turns:
        yield shown(config, "rollout.environment", "rollout.agent.function", "rollout.agent.command")


@REWARD.rule(
    "The reward function model cannot be combined with rollout.dynamic_sampling.enabled=true: it scores "
    "after generation, but dynamic sampling needs rewards earlier; use algorithm.filters alone to leave "
    "groups out.",
    *_FUNCTIONS,
    "rollout.dynamic_sampling.enabled",
    commands=_TRAIN,
)
def dynamic_sampling_has_its_rewards(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward) and config.rollout.dynamic_sampling.enabled:
        yield ""


@REWARD.rule(
    "The reward function model cannot be combined with rollout.record, which writes samples before they "
    "are scored.",
    *_FUNCTIONS,
    "rollout.record",
    commands=_TRAIN,
)
def recorded_samples_have_rewards(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward) and config.rollout.record:
        yield shown(config, "rollout.record")


@REWARD.rule(
    "reward.function and reward.terms cannot use the function model in eval, because it scores on the "
    "trainer's ranks, and there are none.",
    *_FUNCTIONS,
    commands=("eval",),
)
def an_evaluation_has_no_reward_model(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward):
        yield ""

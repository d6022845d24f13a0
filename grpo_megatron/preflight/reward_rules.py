"""Rules about rewards: their functions and options, failures, the reward model, and programs in a sandbox."""

from collections.abc import Iterator
from dataclasses import fields

from grpo_megatron.config.reward import MODEL, OnFailure, RewardConfig, functions_of
from grpo_megatron.config.sandbox import SandboxLimits
from grpo_megatron.config.schema import Config
from grpo_megatron.errors import UserError
from grpo_megatron.model.parallel_sizes import ParallelSizes
from grpo_megatron.preflight.rule import COMMANDS, ENGINE_COMMANDS, RuleBook
from grpo_megatron.rewards import known_program, resolve_rewards
from grpo_megatron.rollout.environments import asks_reward_function

# Each check takes a Config.
REWARD = RuleBook()

_TRAIN = ("train",)
_REWARDS = ("function", "args", "terms", "extract", "answer_from", "response_from")


@REWARD.rule(
    "The reference answer is looked for in at least one place.", "reward.answer_from", commands=COMMANDS
)
def answers_are_somewhere(config: Config) -> Iterator[str]:
    if not config.reward.answer_from:
        yield "reward.answer_from is empty; use whole to take the answer as it is"


@REWARD.rule(
    "A regular expression finds the answer for the reward that compares it.",
    "reward.extract",
    "reward.function",
    "reward.terms",
    commands=ENGINE_COMMANDS,
)
def extract_has_its_reward(config: Config) -> Iterator[str]:
    functions = functions_of(config.reward)
    if config.reward.extract is not None and "exact_match" not in functions:
        yield f"reward.extract goes with reward.function=exact_match only, not with {', '.join(functions)}"


@REWARD.rule(
    "The reward's functions exist, or can be imported, have the options that they are given, and can score "
    "what there is.",
    "reward.function",
    "reward.args",
    "reward.terms",
    "reward.extract",
    "rollout.environment",
    "rollout.replay",
    commands=ENGINE_COMMANDS,
)
def rewards_are_known(config: Config) -> Iterator[str]:
    if config.rollout.replay or not _asks_reward_function(config):
        return
    try:
        rewards = resolve_rewards(config.reward)
    except UserError as error:
        yield str(error)
        return
    if config.rollout.environment is not None:
        for reward in rewards:
            if reward.of_group:
                yield (
                    f"reward {reward.name} compares the answers to a prompt, and rollout.environment has "
                    "episodes: use other rewards"
                )


@REWARD.rule(
    "A program that is right passes with the preamble and within the limits of the reward code. It is run "
    "once.",
    "reward.function",
    "reward.terms",
    "reward.code.preamble",
    "reward.code.isolation",
    *(f"reward.code.limits.{field.name}" for field in fields(SandboxLimits)),
    "rollout.environment",
    "rollout.tools",
    "rollout.replay",
    commands=ENGINE_COMMANDS,
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
    "Terms take the place of a single function.",
    "reward.terms",
    "reward.function",
    "reward.args",
    commands=ENGINE_COMMANDS,
)
def terms_or_one_function(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.terms and (reward.function != RewardConfig().function or reward.args):
        yield (
            "reward.function and reward.args mean nothing with reward.terms; give each term its function and "
            "its options"
        )


@REWARD.rule(
    "The value of a failed reward is that of a run which goes on.",
    "reward.failure_value",
    "reward.on_failure",
    commands=ENGINE_COMMANDS,
)
def failure_value_is_used(config: Config) -> Iterator[str]:
    value, on_failure = config.reward.failure_value, config.reward.on_failure
    if value != RewardConfig().failure_value and on_failure != OnFailure.value:
        yield (
            f"reward.failure_value={value} means nothing with reward.on_failure={on_failure.value}; set it "
            "to value"
        )


@REWARD.rule(
    "Where failed samples are left out, any number of them is shared by the ranks.",
    "reward.on_failure",
    "train.packing",
    "megatron.data_parallel",
    "megatron.pipeline_parallel",
    "megatron.virtual_pipeline",
    commands=_TRAIN,
)
def smaller_groups_can_be_shared(config: Config) -> Iterator[str]:
    if config.reward.on_failure != OnFailure.leave_out or config.train.packing:
        return
    sizes = ParallelSizes.from_config(config.megatron)
    step = sizes.dp * sizes.micro_batch_multiple
    if step > 1:
        yield (
            "reward.on_failure=leave_out makes groups of any size, and with train.packing=false the number "
            f"of samples must be a multiple of {step}, for the ranks to share: set train.packing=true"
        )


@REWARD.rule(
    "A program has its time within that of its reward.",
    "reward.code.limits.seconds",
    "reward.timeout",
    "reward.function",
    "reward.terms",
    commands=ENGINE_COMMANDS,
)
def programs_end_before_the_reward(config: Config) -> Iterator[str]:
    reward = config.reward
    if "code" in functions_of(reward) and reward.code.limits.seconds >= reward.timeout:
        yield (
            f"reward.code.limits.seconds={reward.code.limits.seconds:g} must be below "
            f"reward.timeout={reward.timeout:g}, within which a response's program is run on all of its "
            "tests"
        )


@REWARD.rule(
    "An environment gives the rewards itself.",
    "rollout.environment",
    *(f"reward.{name}" for name in _REWARDS),
    commands=ENGINE_COMMANDS,
)
def environment_gives_the_rewards(config: Config) -> Iterator[str]:
    if _asks_reward_function(config):
        return
    for name in _REWARDS:
        if getattr(config.reward, name) != getattr(RewardConfig(), name):
            yield (
                f"reward.{name} means nothing with rollout.environment, which gives the rewards itself: "
                "leave it out"
            )


def _asks_reward_function(config: Config) -> bool:
    """Return True if reward.function or reward.terms scores responses or the last turns of episodes.

    It is False if rollout.environment gives the rewards itself.
    """
    try:
        return asks_reward_function(config.rollout, config.reward)
    except UserError:  # another rule reports the error
        return True


@REWARD.rule(
    "A reward model is somewhere, and used, for one answer to a prompt.",
    "reward.function",
    "reward.terms",
    "reward.model.path",
    "rollout.environment",
    commands=_TRAIN,
)
def reward_model_is_somewhere(config: Config) -> Iterator[str]:
    functions, path = functions_of(config.reward), config.reward.model.path
    if MODEL not in functions and path is not None:
        yield (
            f"reward.model.path={path} means nothing with the reward {', '.join(functions)}; set "
            "reward.function=model"
        )
    if MODEL in functions:
        if path is None:
            yield "the reward model needs reward.model.path, the HF folder of a reward model"
        if functions.count(MODEL) > 1:
            yield "reward.terms has several terms of the function model, but there is one reward.model.path"
        if config.rollout.environment is not None:
            yield (
                "the reward model scores one answer to a prompt, and rollout.environment has several turns: "
                "use other rewards"
            )


@REWARD.rule(
    "A reward model on the ranks scores when generation has ended; dynamic sampling needs rewards before.",
    "reward.function",
    "reward.terms",
    "rollout.dynamic_sampling.enabled",
    commands=_TRAIN,
)
def dynamic_sampling_has_its_rewards(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward) and config.rollout.dynamic_sampling.enabled:
        yield (
            "rollout.dynamic_sampling.enabled=true decides by the rewards while engines generate, and the "
            "reward model gives them afterwards: set rollout.dynamic_sampling.enabled=false, and leave "
            "groups out by algorithm.filters alone"
        )


@REWARD.rule(
    "What is recorded has its rewards.", "reward.function", "reward.terms", "rollout.record", commands=_TRAIN
)
def recorded_samples_have_rewards(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward) and config.rollout.record:
        yield "rollout.record writes samples before the reward model scores them: set rollout.record=null"


@REWARD.rule("A reward model is on a trainer's ranks.", "reward.function", "reward.terms", commands=("eval",))
def an_evaluation_has_no_reward_model(config: Config) -> Iterator[str]:
    if MODEL in functions_of(config.reward):
        key = "reward.terms" if config.reward.terms else "reward.function"
        yield (
            f"{key}: the function model scores on the ranks of a trainer, and eval has engines alone; choose "
            "another reward"
        )

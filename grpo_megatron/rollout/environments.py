"""Environments: they answer the model over several turns, and run in separate worker processes.

An environment is a class (or a function that makes an instance) registered by `@environment("name")`. One
instance plays one episode. All its methods run one after the other in one process, each within reward.timeout
seconds. This module is light to import, because the worker processes import only it when they start.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry

BUILT_IN = ("gymnasium", "tools", "verifiers:ID")


class EnvironmentFailed(UserError):
    """A method of an environment raised an error, exceeded its time limit, or returned an invalid value."""


# Methods of an environment, with the names of their arguments.
_METHODS = {"reset": ("seed",), "step": ("response",), "close": ()}

# The registry holds environments from plugins. The built-in ones are made from the configuration.
environment = Registry("environment", "rollout.environment", BUILT_IN, Call(("prompt",)))


@dataclass(frozen=True)
class StepResult:
    """The environment's answer to one turn of the model."""

    observation: str | list[dict[str, Any]] = ""
    """Text or chat messages (dicts with role and content) that the model reads next."""
    reward: float = 0.0
    """Reward of this turn. The reward of the whole episode is the sum over its turns."""
    done: bool = False
    """True if the episode is over. `observation` is then not used."""
    components: dict[str, float] = field(default_factory=dict)
    """Further numbers for the logs, by name. Each is summed over the turns of the episode."""


class Environment(Protocol):
    """The interface of an environment. One instance plays one episode.

    The methods may also be plain functions, without `async`. The class or function that is registered by
    `@environment` may have two attributes:

    - tools: a list of JSON schemas of functions, which the chat template shows to the model.
    - asks_reward_function: if True, reward.function scores the text of the last turn. This score is added to
      the rewards of the turns.
    """

    def __init__(self, prompt: Prompt): ...

    async def reset(self, seed: int) -> str | list[dict[str, Any]] | None:
        """Begin the episode, and return the first observation, which the model reads after the prompt.

        The observation is a text or a list of chat messages. None means that the model reads the prompt only.

        seed: seed of the initial state. All episodes of a group (one prompt) get the same seed, so that they
            start in the same state.
        """

    async def step(self, response: str) -> StepResult:
        """Process one turn of the model, and return the environment's answer.

        response: the text of the turn, without end and padding tokens.
        """

    async def close(self) -> None:
        """Release the environment's resources. A class may omit this method.

        It is the last call that an instance gets, even if the episode failed.
        """


def resolve_environment(rollout: RolloutConfig, reward: RewardConfig) -> Callable[[Prompt], Environment]:
    """Return the class or function that rollout.environment names. It makes an environment from a prompt.

    reward: configuration whose time limit and sandbox settings the environment `tools` uses.

    Raises UserError if the name is unknown, or if the environment cannot be used, for example because a
    method is missing.
    """
    if rollout.environment == "gymnasium":
        from grpo_megatron.rollout.gymnasium_environment import gymnasium_environment

        return gymnasium_environment(rollout.gymnasium)
    if rollout.environment == "tools":
        from grpo_megatron.rollout.tool_environment import ToolEnvironment

        return ToolEnvironment(rollout.tools, reward, rollout.mcp)
    made = environment.get(rollout.environment)
    if inspect.isclass(made):
        _check_methods(made, f"rollout.environment={rollout.environment}")
    return made


def _check_methods(made: type, setting: str) -> None:
    """Raise UserError if an environment's class lacks `reset` or `step`, or a method has wrong parameters.

    made: the environment's class.
    setting: configuration key and value that name the class, for the error message.
    """
    for name, arguments in _METHODS.items():
        method = inspect.getattr_static(made, name, None)
        if method is None and name != "close":
            raise UserError(
                f"{setting}: the environment has no method {name} (docs/plugins.md shows an example)"
            )
        if not inspect.isfunction(method):
            continue
        problem = Call(("self", *arguments), may_be_async=True).problem(method)
        if problem:
            raise UserError(
                f"{setting}: the environment's method {name} {problem} (docs/plugins.md shows an example)"
            )


def asks_reward_function(rollout: RolloutConfig, reward: RewardConfig) -> bool:
    """Return True if a run calls the reward functions of reward.function.

    This is the case if the run has no environment, or if the environment's class has the attribute
    `asks_reward_function` with the value True. Environments of verifiers have rewards of their own.

    Raises UserError if rollout.environment is unknown or cannot be used.
    """
    if rollout.task_set is not None:
        return False
    return rollout.environment is None or asks(resolve_environment(rollout, reward))


def asks(made: Callable[[Prompt], Environment]) -> bool:
    """Return True if reward.function scores the last turn of the episodes of an environment."""
    return bool(getattr(made, "asks_reward_function", False))


def offered_tools(rollout: RolloutConfig, reward: RewardConfig) -> list[dict[str, Any]]:
    """Return the JSON schemas of the functions that the environment lets the model call; [] if none.

    Agents of verifiers have none here, because they offer their tools in their requests.

    Raises UserError if rollout.environment is unknown or cannot be used.
    """
    if rollout.environment is None or rollout.task_set is not None:
        return []
    return list(getattr(resolve_environment(rollout, reward), "tools", ()))

"""Environments made from gymnasium tasks: observations become text, and the model's turns become actions."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.rollout import GymnasiumConfig, InvalidAction
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry, import_module
from grpo_megatron.rollout.environments import StepResult

observation_text = Registry("function", "rollout.gymnasium.text", call=Call(("task", "observation")))


class GymnasiumEnvironment:
    """One episode of a gymnasium task with a Discrete action space, in which the model chooses the actions.

    The reward of a turn is the task's reward. If a turn names no action, its reward is
    rollout.gymnasium.invalid_reward. The environment then answers with the list of actions, or ends the
    episode (rollout.gymnasium.invalid_action). The reward component `invalid_actions` counts the turns that
    name no action.
    """

    def __init__(self, options: GymnasiumConfig, text: Callable[[Any, Any], str], prompt: Prompt):
        import gymnasium

        self._options, self._text = options, text
        missing = [name for name in options.record_args if name not in prompt.fields]
        if missing:
            raise UserError(
                f"the record has no field {missing[0]!r}, which rollout.gymnasium.record_args lists; add it "
                "to the data, or remove it from the setting"
            )
        arguments = options.args | {name: prompt.fields[name] for name in options.record_args}
        self._task = gymnasium.make(options.id, disable_env_checker=True, **arguments)
        space = self._task.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise UserError(
                f"rollout.gymnasium.id={options.id} has the action space {space}, but only Discrete action "
                "spaces are supported; choose another environment"
            )
        actions = range(int(space.start), int(space.start + space.n))
        words = options.actions or [str(action) for action in actions]
        if len(words) != len(actions):
            raise UserError(
                f"rollout.gymnasium.actions has {len(words)} words, but {options.id} has {len(actions)} "
                "actions; give one word for each action"
            )
        self._actions = dict(zip(words, actions, strict=True))
        self._seen = ""

    def reset(self, seed: int) -> list[dict[str, Any]]:
        observation, _ = self._task.reset(seed=seed)
        return self._show(observation)

    def step(self, response: str) -> StepResult:
        action = self._actions.get(self._word(response))
        if action is None:
            words = ", ".join(self._actions)
            again = [{"role": "user", "content": f"not one of {words}\n{self._seen}"}]
            done = self._options.invalid_action == InvalidAction.end
            return StepResult(again, self._options.invalid_reward, done, {"invalid_actions": 1})
        observation, reward, terminated, truncated, _ = self._task.step(action)
        return StepResult(
            self._show(observation), float(reward), bool(terminated or truncated), {"invalid_actions": 0}
        )

    def close(self) -> None:
        self._task.close()

    def _show(self, observation: Any) -> list[dict[str, Any]]:
        """Return an observation of the task as a list with one chat message of the role `user`.

        The text of the observation is also stored in `_seen`. If a turn of the model names no action, the
        answer repeats this text.
        """
        self._seen = self._text(self._task, observation)
        return [{"role": "user", "content": self._seen}]

    def _word(self, response: str) -> str | None:
        """Return the word in a turn of the model that should name an action, or None if there is none.

        The word is the last match of rollout.gymnasium.action_pattern, or group 1 of this match if the
        pattern has groups. Without a pattern, the word is the whole turn.

        response: text of the turn.
        """
        if self._options.action_pattern is None:
            return response.strip()
        found = list(re.finditer(self._options.action_pattern, response))
        return found[-1].group(min(1, found[-1].re.groups)) if found else None


def gymnasium_environment(options: GymnasiumConfig) -> Callable[[Prompt], GymnasiumEnvironment]:
    """Return a function that makes a GymnasiumEnvironment for a prompt.

    options: the section rollout.gymnasium of the configuration.

    Raises UserError if gymnasium is not installed or does not know the task rollout.gymnasium.id, or if
    rollout.gymnasium.text names no usable function. The returned function raises UserError if other settings
    of the section do not fit the task or the prompt's record.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise UserError(
            "rollout.environment=gymnasium requires the gymnasium package; run `pip install gymnasium`"
        ) from error
    text = observation_text.get(options.text) if options.text else _plain
    setting = f"rollout.gymnasium.id={options.id}"
    module, _, name = options.id.rpartition(":")
    if module:
        import_module(module, setting)
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise UserError(f"{setting}: {error}") from error
    return partial(GymnasiumEnvironment, options, text)


def _plain(task: Any, observation: Any) -> str:
    return str(observation)

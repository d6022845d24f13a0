"""Lookup of the reward functions that a configuration names, and checks of whether they can be called."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import MODEL, RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Call, Registry, is_async
from grpo_megatron.rewards import compare, form, groups, other_stacks, remote
from grpo_megatron.rewards.code import code
from grpo_megatron.rewards.terms import Setup, Term, terms_of

# Each entry makes its reward function from a Setup. The function may have three attributes. `needs` lists
# terms whose values the function reads. `secrets` lists environment variables that it reads.
# `check_record(answer, record)` raises an error for a record that the function cannot score; it is called
# before a run starts.
_OF_RESPONSES = {
    "exact_match": compare.exact_match,
    "math": compare.math,
    "choice": compare.choice,
    "code": code,
    "regex": form.regex,
    "format": form.tags,
    "cosine_length": form.cosine_length,
    "linear_length": form.linear_length,
    "http": remote.Http.make,
}
_OF_GROUPS = {"rank": groups.rank, "group_length": groups.group_length}

# The registry holds rewards from plugins. The built-in ones are made from the configuration.
reward_function = Registry("reward", "reward.function", built_in=(*_OF_RESPONSES, *_OF_GROUPS, MODEL))

# Optional arguments of a reward function. It gets each argument for which it has a parameter.
_OPTIONAL = ("args", "tokens", "components")


def group_reward(name: str) -> Callable[[Callable], Callable]:
    """Return a decorator that registers a reward function which scores all responses to a prompt together.

    After `@group_reward("name")`, the name can be used as reward.function. The function is called with the
    keyword arguments prompt, responses (a list), answer and record, and must return one number per response.
    """

    def register(function: Callable) -> Callable:
        function.of_group = True
        return reward_function(name)(function)

    return register


@dataclass(frozen=True)
class Reward:
    """A reward function, together with the term (summand) of the configured reward that it computes."""

    term: Term
    function: Callable[..., Any]
    of_group: bool
    """True if the function scores all responses to a prompt together."""
    wants: frozenset[str]
    """Names of the optional arguments that the function takes, out of `args`, `tokens` and `components`."""

    @property
    def waits(self) -> bool:
        """True if this reward may have to wait: its function is async, or reads the values of other rewards.

        A function reads the values of the rewards computed before it if it has the parameter `components`.
        Those rewards may be async. `resolve_rewards` puts rewards that may wait behind the others.
        """
        return is_async(self.function) or "components" in self.wants

    @property
    def check_record(self) -> Callable[[str | list[str], dict], Any] | None:
        """Function that checks whether this reward can score a record, or None if there is no check.

        The function is called with the record's reference answer and its other fields. It raises an error if
        the reward cannot score the record.
        """
        return getattr(self.function, "check_record", None)

    @property
    def name(self) -> str:
        """Name of the reward in messages, such as `math of reward.terms.right`."""
        return self.term.function if self.term.is_whole else f"{self.term.function} of {self.term.key}"


def resolve_rewards(config: RewardConfig, secrets: Mapping[str, str] | None = None) -> list[Reward]:
    """Look up the reward functions that the configuration names. Return one Reward per term of the reward.

    The term of a reward model is left out, because reward workers do not compute it. The list is in the order
    of computation: rewards of single responses come before rewards of groups. Within both kinds, async
    rewards and rewards that read the values of earlier rewards come last.

    secrets: {environment variable that a reward reads: its value}. Not needed if no reward is called.

    Raises UserError for a function that is unknown or does not take the arguments of a reward function, for
    an invalid term or option, and for a built-in reward that reads a term that is not computed before it.
    """
    found = [
        _resolve(Setup(config, term, secrets or {})) for term in terms_of(config) if term.function != MODEL
    ]
    # A worker awaits the async rewards of many responses at once, so they may all end at the same moment. If
    # a reward that keeps the processor busy followed each of them, all the busy ones would start at that
    # moment and run one by one, and the last of them would have no time left.
    found.sort(key=lambda reward: (reward.of_group, reward.waits))
    computed: list[str] = []
    for reward in found:
        for name in getattr(reward.function, "needs", ()):
            if name not in computed:
                before = ", ".join(computed) or "none"
                raise UserError(
                    f"{reward.term.key} uses the term {name!r}, which must be computed before it (terms "
                    f"computed before it: {before}); add or reorder the terms in reward.terms"
                )
        computed.append(reward.term.name)
    return found


def resolve_reward(config: RewardConfig) -> Callable[..., Any]:
    """Return the function that reward.function names, to call it directly instead of in a reward worker.

    If reward.terms is set, the function of the term that is computed first is returned. A run whose only
    reward is a reward model has no such function, so do not call this for it.

    Raises UserError as `resolve_rewards` does.
    """
    return resolve_rewards(config)[0].function


def check_record(rewards: Sequence[Reward], prompt: Prompt, where: str) -> None:
    """Check that all rewards can score the record that `prompt` was made from.

    rewards: rewards whose `check_record` is not None.
    where: place of the record, such as file and line, for the message.

    Raises UserError, naming the reward, if one of them cannot score the record.
    """
    for reward in rewards:
        try:
            reward.check_record(prompt.answer, prompt.fields)
        except Exception as error:
            raise UserError(
                f"{where}: reward {reward.name} cannot score this record: {type(error).__name__}: {error}; "
                "correct or remove the record, or set reward.on_failure=value (its samples get "
                "reward.failure_value) or reward.on_failure=leave_out (its samples are not used)"
            ) from error


def read_secrets(rewards: Sequence[Reward]) -> dict[str, str]:
    """Read the secrets that the rewards need, such as server tokens, from this process's environment.

    Returns {environment variable: its value}. White space around a value is removed, such as the newline at
    the end of a file with a token.

    Raises UserError if a variable is not set, or if its value cannot be part of an HTTP header.
    """
    names = [name for reward in rewards for name in getattr(reward.function, "secrets", ())]
    return read_variables(names, "a reward of this run")


def read_variables(names: Sequence[str], whose: str) -> dict[str, str]:
    """Read environment variables with tokens for HTTP headers, and return {environment variable: its value}.

    whose: what needs the variables, for messages.

    Raises UserError if a variable is not set, or if its value cannot be part of an HTTP header.
    """
    found = {}
    for name in names:
        value = os.environ.get(name, "").strip()
        if not value:
            raise UserError(
                f"the environment variable {name}, which {whose} needs, is not set; set it "
                "before you start the run"
            )
        if not (value.isascii() and value.isprintable()):
            raise UserError(
                f"the environment variable {name}, which {whose} needs, contains a line break "
                "or another character that is not printable ASCII, so it cannot be sent in an HTTP header; "
                "set the variable to the token alone"
            )
        found[name] = value
    return found


def _resolve(setup: Setup) -> Reward:
    """Return the Reward of a term: look up or make its function, and check that it can be called.

    Raises UserError if the function is unknown, does not take the arguments of a reward function, or has
    wrong options.
    """
    name = setup.term.function
    make = _OF_RESPONSES.get(name) or _OF_GROUPS.get(name)
    function = make(setup) if make else reward_function.get(name)
    of_group = name in _OF_GROUPS or getattr(function, "of_group", False)
    if not make:
        _check_call(setup.term, function, of_group)
    parameters = _parameters(function)
    everything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wants = frozenset(option for option in _OPTIONAL if everything or option in parameters)
    if setup.term.args and not make and "args" not in wants:
        raise UserError(
            f"{setup.term.key}: {name} does not accept the options {', '.join(setup.term.args)}, because it "
            "has no parameter `args`; remove the options, or add the parameter"
        )
    return Reward(setup.term, function, of_group, wants)


def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name.

    The result is empty if Python knows no signature, as for some functions written in C.
    """
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _check_call(term: Term, function: Callable, of_group: bool) -> None:
    """Check that a user's function takes the arguments of a reward function.

    term: term that names the function, for the message.
    of_group: True if the function scores all responses to a prompt together.

    Raises UserError, with advice, if `function` does not take these arguments, or if it is a class.
    """
    if inspect.isclass(function):
        raise UserError(
            f"{_setting_of(term)} is a class, but a reward must be a function; specify a function, or a "
            "callable object of the class"
        )
    known = _parameters(function)
    named = [
        option for option in _OPTIONAL if option in known
    ]  # a parameter taken only by `**others` is in no signature
    responses = "responses" if of_group else "response"
    problem = Call(keywords=("prompt", responses, "answer", "record", *named), may_be_async=True).problem(
        function
    )
    if problem is None:
        return
    advice = other_stacks.hint(function.__name__ if hasattr(function, "__name__") else "theirs", known)
    if not advice and not of_group and "responses" in known:
        advice = ". If it scores all responses to a prompt together, register it with @group_reward"
    raise UserError(f"{_setting_of(term)}: the reward {problem} (docs/plugins.md shows an example){advice}")


def _setting_of(term: Term) -> str:
    """Return the setting that names the term's function, such as `reward.function=math`, for messages."""
    return f"reward.function={term.function}" if term.is_whole else f"{term.key}.function={term.function}"

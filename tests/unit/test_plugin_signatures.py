"""Plugins that cannot be called in this project's way are refused when the configuration is checked."""

import asyncio
import functools
import inspect
import re

import pytest

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.plugins import Call, Registry
from grpo_megatron.preflight.check import check
from grpo_megatron.rewards import group_reward, resolve_reward, resolve_rewards
from grpo_megatron.rollout.environments import StepResult

HERE = "tests.unit.test_plugin_signatures"


# -- reward functions of other stacks, as their documentation has them


def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(solution_str == ground_truth and data_source == "s" and extra_info == {"index": 1})


def verl_of_one_data_set(solution_str, ground_truth, method="strict"):
    return float(solution_str == ground_truth)


def trl(prompts, completions, **kwargs):
    return [float(one == right) for one, right in zip(completions, kwargs["answer"], strict=True)]


def trl_without_prompts(completions, answer, **kwargs):
    return trl(None, completions, answer=answer)


def openrlhf(queries, prompts, labels):
    return {
        "rewards": [
            float(query == prompt + label)
            for query, prompt, label in zip(queries, prompts, labels, strict=True)
        ]
    }


def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return float(completions == answer)


async def slime(args, sample, **kwargs):
    return float(sample.response == sample.label)


class Sample:
    def __init__(self, prompt, response, label):
        self.prompt, self.response, self.label = prompt, response, label


STACKS = {
    "verl": "verl",
    "verl_of_one_data_set": "verl",
    "trl": "TRL",
    "trl_without_prompts": "TRL",
    "openrlhf": "OpenRLHF",
    "areal": "AReaL",
    "slime": "slime",
}


@pytest.mark.parametrize(("function", "stack"), STACKS.items())
def test_a_function_of_another_stack_is_recognised_and_the_advice_works(function, stack):
    """A function of another stack used to pass `config check` and to fail at the first response, minutes
    later.
    """
    (sentence,) = violations(f"reward.function={HERE}:{function}")
    assert "the reward is called with (prompt=..., response=..., answer=..., record=..." in sentence
    assert (
        f"It has the parameters of a reward function for {stack}; use a function that calls it instead: "
        in sentence
    )
    names = dict(globals())
    definition = sentence.partition("instead: ")[2]
    exec(definition, names)
    given = {"prompt": "p", "answer": "a", "record": {"data_source": "s", "extra_info": {"index": 1}}}
    for response, reward in (("a", 1.0), ("b", 0.0)):
        found = names["reward"](response=response, **given)
        assert (asyncio.run(found) if asyncio.iscoroutine(found) else found) == reward


# -- functions of no stack


def of_two(response, answer):
    return 1.0


def asks_for_more(prompt, response, answer, record, tokenizer):
    return 1.0


def by_position(prompt, response, answer, record, /):
    return 1.0


def all_together(prompt, responses, answer, record):
    return [1.0] * len(responses)


@group_reward("signatures_of_one")
def registered_for_groups(prompt, response, answer, record):
    return 1.0


class Judge:
    def __init__(self, prompt, response, answer, record):
        pass

    def __call__(self, prompt, response, answer):
        return 1.0


judge = Judge("", "", "", {})


def takes_nothing():
    return None


def of_three(inputs, options, more):
    return None


async def waits(inputs, options):
    return None


async def waits_for_groups(groups):
    return groups


class WithoutStep:
    def __init__(self, prompt):
        pass

    def reset(self, seed):
        return None


class Gymnastics:
    """An environment with the methods of a gymnasium environment."""

    def __init__(self, prompt):
        pass

    def reset(self, *, seed=None, options=None):
        return None

    def step(self, action):
        return StepResult()


class OfNothing(Gymnastics):
    def __init__(self):
        pass


def twice(number: int, /) -> int:
    """Double a number.

    Args:
        number: The number.
    """
    return 2 * number


async def searches(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    return query


half = functools.partial(of_two, 1)

REFUSED = [
    (
        "algorithm.adv_estimator=os:getcwd",
        r"the advantage estimator is called with \(inputs, options\), but its signature \(\)",
    ),
    (
        "algorithm.adv_estimator=HERE:of_three",
        "does not accept these arguments: missing a required argument: 'more'",
    ),
    (
        "algorithm.adv_estimator=HERE:waits",
        "the advantage estimator must be a normal function, not an async one, because its result is not "
        "awaited",
    ),
    (
        "algorithm.surrogate=os:getcwd",
        r"the surrogate is called with \(terms, options\), but its signature \(\)",
    ),
    ("algorithm.surrogate=HERE:waits", "the surrogate must be a normal function"),
    ("algorithm.filters=[os:getcwd]", r"algorithm.filters=os:getcwd: the filter is called with \(groups\)"),
    ("algorithm.filters=[nonzero_variance,HERE:of_two]", "missing a required argument: 'answer'"),
    ("algorithm.filters=[HERE:waits_for_groups]", "the filter must be a normal function"),
    (
        "reward.function=os:getcwd",
        "but its signature .* does not accept these arguments: got an unexpected keyword argument 'prompt'",
    ),
    ("reward.function=HERE:of_two", "got an unexpected keyword argument 'prompt'"),
    ("reward.function=HERE:asks_for_more", "missing a required argument: 'tokenizer'"),
    (
        "reward.function=HERE:by_position",
        "'prompt' parameter is positional only, but was passed as a keyword",
    ),
    (
        "reward.function=HERE:all_together",
        "If it scores all responses to a prompt together, register it with @group_reward",
    ),
    (
        "reward.function=HERE:registered_for_groups",
        r"is called with \(prompt=..., responses=..., answer=..., record=...\)",
    ),
    (
        "reward.function=HERE:Judge",
        "is a class, but a reward must be a function; specify a function, or a callable object of the class",
    ),
    ("reward.function=HERE:judge", "got an unexpected keyword argument 'record'"),
    (
        "reward.terms={own: {function: 'HERE:of_two'}}",
        "reward.terms.own.function=HERE:of_two: the reward is called with",
    ),
    ("rollout.environment=os:getcwd", r"the environment is called with \(prompt\), but its signature \(\)"),
    ("rollout.environment=collections:OrderedDict", "the environment has no method reset"),
    ("rollout.environment=HERE:WithoutStep", "the environment has no method step"),
    (
        "rollout.environment=HERE:Gymnastics",
        r"method reset is called with \(self, seed\), but its signature \(self, \*, seed=None, ",
    ),
    ("rollout.environment=HERE:OfNothing", r"the environment is called with \(prompt\)"),
    ("rollout.tools=[HERE:twice]", "rollout.tools=HERE:twice: the tool is called with "),
    ("rollout.tools=[HERE:searches]", "rollout.tools=HERE:searches: the tool must be a normal function"),
    ("rollout.tools=[HERE:half]", "rollout.tools=HERE:half: .* has no name by which the model could call it"),
]  # fmt: skip


def violations(*overrides: str) -> list[str]:
    return check(None, ["model.path=m", "data.train=d.jsonl", *overrides]).violations


@pytest.mark.parametrize(("overrides", "says"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_a_plugin_that_cannot_be_called_is_refused(overrides, says):
    given = ["rollout.environment=tools"] if "rollout.tools" in overrides else []
    (sentence,) = violations(*given, overrides.replace("HERE", HERE))
    assert re.search(says.replace("HERE", HERE), sentence)


# -- what can be called


def everything(**given):
    return float(sorted(given) == ["answer", "args", "components", "prompt", "record", "response", "tokens"])


def with_defaults(prompt, response, answer, record, threshold=0.5, *, tokens, **others):
    return 1.0


class Object:
    def __call__(self, prompt, response, answer, record):
        return 1.0


an_object = Object()
a_partial = functools.partial(asks_for_more, tokenizer=None)


@pytest.mark.parametrize("name", ["everything", "with_defaults", "an_object", "a_partial"])
def test_other_ways_to_take_the_arguments_are_fine(name):
    assert violations(f"reward.function={HERE}:{name}") == []
    assert resolve_rewards(RewardConfig(function=f"{HERE}:{name}"))


def test_what_has_no_signature_is_let_through():
    """Some functions that are written in C have no signature."""
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(max)
    assert resolve_reward(RewardConfig(function="builtins:max")) is max
    registry = Registry("thing", "section.thing", call=Call(("one", "two", "three")))
    assert registry.get("builtins:max") is max

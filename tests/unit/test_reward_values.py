"""Results of reward functions, environments and programs, as numbers or as a failure with its reason."""

import itertools
import json
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.config.sandbox import CodeConfig, CodeScore, SandboxLimits
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.rewards.scoring import Failed, GroupTask, RewardTask, Scorer
from grpo_megatron.rollout.environment_host import EnvironmentHost
from grpo_megatron.rollout.environments import EnvironmentFailed, StepResult
from tests.unit.toy_environments import decode, encode

HERE = "tests.unit.test_reward_values"
RETURNED = []


def returns(prompt, response, answer, record):
    if isinstance(RETURNED[-1], Exception):
        raise RETURNED[-1]
    return RETURNED[-1]


def returns_of_group(prompt, responses, answer, record):
    return RETURNED[-1]


returns_of_group.of_group = True


class Returns:
    def __init__(self, prompt):
        pass

    def reset(self, seed):
        return None

    def step(self, response):
        return returns("", response, "", {})


class Hostile:
    """An object that is neither a number nor can be shown."""

    def __float__(self):
        raise RuntimeError("planted")

    def __repr__(self):
        raise RuntimeError("planted")


class Rewrites(Hostile):
    def __repr__(self):
        return "\x1b[2J\nall is well"


def scored(value):
    RETURNED.append(value)
    task = RewardTask(7, "p", encode("text"), "a", {})
    return Scorer(RewardConfig(function=f"{HERE}:returns"), decode).work([task], 100.0)[0]


def scored_as_group(value):
    RETURNED.append(value)
    task = GroupTask(7, "p", ["a", "b"], "a", {}, [1, 1], [{}, {}])
    return Scorer(RewardConfig(function=f"{HERE}:returns_of_group"), decode).work([task], 100.0)[0]


def stepped(value):
    RETURNED.append(value)
    host = EnvironmentHost(RolloutConfig(environment=f"{HERE}:Returns"), RewardConfig(), decode)
    calls = [("reset", 0, (Prompt(7, encode("p"), "p", "a"), 0)), ("step", 0, (encode("text"),))]
    _, stepped = host.work(calls, 100.0)
    if isinstance(stepped, EnvironmentFailed):
        raise stepped
    return stepped[1]


NUMBERS = [
    (3, 3.0),
    (-0.5, -0.5),
    (True, 1.0),
    (np.bool_(False), 0.0),
    (np.float32(0.25), 0.25),
    (np.int64(7), 7.0),
    (np.array(0.5), 0.5),
    (np.array([0.5]), 0.5),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([2]), 2.0),
    (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
    (Decimal("0.125"), 0.125),
    (Fraction(1, 4), 0.25),
    (1e30, 1e30),
]


@pytest.mark.parametrize(("value", "number"), NUMBERS, ids=repr)
def test_every_kind_of_number_is_one(value, number):
    assert scored(value).components == {"reward": number}
    assert scored({"reward": value, "part": value}).components == {"reward": number, "part": number}
    assert scored_as_group([value, 0]).values["reward"] == [number, 0.0]
    assert stepped(StepResult(reward=value, components={"part": value})) == StepResult(
        "", number, False, {"part": number}
    )
    assert type(scored(value).components["reward"]) is float


NO_NUMBERS = [
    ("1.0", "must be a number, but is '1.0' of type str"),
    (np.str_("1.0"), "must be a number, but is .*'1.0'"),
    (np.array("1.0"), "must be a number"),
    (b"1", "must be a number, but is b'1' of type bytes"),
    (None, "must be a number, but is None of type NoneType"),
    (1j, "must be a number"),
    (np.complex64(1), "must be a number"),
    ([1.0], "must be a number"),
    (np.zeros(2), "must be a number"),
    (torch.zeros(2), "must be a number"),
    (Hostile(), "must be a number, but is <Hostile instance at"),
    (Rewrites(), r"must be a number, but is '\\x1b\[2J\\nall is well'"),
    (10**400, "must be finite, and at most 1e\\+30 in absolute value"),
    (-(10**400), "must be finite"),
    (10**5000, "must be finite"),  # Python does not even write it
    (Fraction(10**400), "must be finite"),
    (Decimal("1e400"), "must be finite"),
    (math.nan, "must be finite"),
    (-math.inf, "must be finite"),
    (np.float32("inf"), "must be finite"),
    (torch.tensor(math.nan), "must be finite"),
    (1e300, "must be finite, and at most 1e\\+30"),
]


@pytest.mark.parametrize(("value", "says"), NO_NUMBERS, ids=lambda value: type(value).__name__)
def test_what_is_no_number_is_a_failure_that_says_why(value, says):
    """A number of 400 digits used to raise OverflowError in the worker, even with reward.on_failure=value."""
    for found in (
        scored(value),
        scored({"reward": value}),
        scored({"reward": 1, "part": value}),
        scored_as_group([1, value]),
    ):
        assert isinstance(found, Failed)
        assert re.search(says, found.why)
        assert found.why.isprintable()
        assert len(found.why) < 700
    for step in (StepResult(reward=value), StepResult(components={"part": value})):
        with pytest.raises(EnvironmentFailed, match=says):
            stepped(step)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "it must return a number, or a dict with 'reward'"),
        ({"reward": {"reward": 1}}, "the reward must be a number, but is {'reward': 1} of type dict"),
        ({"reward": 1, 2: 3}, "must be 1 to 100 printable characters, but is 2"),
        ({"reward": 1, "": 3}, "must be 1 to 100 printable characters, but is ''"),
        ({"reward": 1, "a\nb": 3}, r"must be 1 to 100 printable characters, but is 'a\\nb'"),
        ({"reward": 1, "\x1b[2J": 3}, r"must be 1 to 100 printable characters, but is '\\x1b\[2J'"),
        ({"reward": 1, "\u202eabc": 3}, r"must be 1 to 100 printable characters, but is '\\u202eabc'"),
        ({"reward": 1, "x" * 101: 3}, "must be 1 to 100 printable characters, but is 'xxx"),
        (
            {"reward": 1} | dict.fromkeys(map(str, range(101)), 1.0),
            "at most 100 numbers in addition to the reward, not 101",
        ),
    ],
)
def test_what_is_no_component(value, says):
    found = scored(value)
    assert isinstance(found, Failed)
    assert re.search(says, found.why)
    if isinstance(value.get("reward"), int):
        others = {name: number for name, number in value.items() if name != "reward"}
        with pytest.raises(EnvironmentFailed, match=says):
            stepped(StepResult(components=others))


NO_LISTS = [None, 5, "12", {1: 1, 2: 2}, [1], [1, 2, 3], itertools.count(), np.zeros((2, 2)), Hostile()]


@pytest.mark.parametrize("value", NO_LISTS, ids=lambda value: type(value).__name__)
def test_what_is_no_list_of_numbers(value):
    found = scored_as_group(value)
    assert isinstance(found, Failed)
    assert "must " in found.why


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError(10**5000), "ValueError: its text cannot be shown"),
        (ValueError("\x1b[31mred"), "ValueError: \ufffd\\[31mred"),
        (KeyError("x" * 10**6), "KeyError: 'xxx.*x…"),
    ],
    ids=["endless", "red", "long"],
)
def test_an_error_of_any_text_can_be_shown(error, says):
    found = scored(error)
    assert isinstance(found, Failed)
    assert re.search(says, found.why)
    assert found.why.isprintable()
    assert len(found.why) < 3000
    with pytest.raises(EnvironmentFailed, match=says):
        stepped(error)


def test_lists_of_every_kind():
    for value in (
        [1, 0],
        (1, 0),
        np.array([1, 0]),
        torch.tensor([1.0, 0.0]),
        iter([1, 0]),
        [np.float32(1), Fraction(0)],
    ):
        assert scored_as_group(value).values["reward"] == [1.0, 0.0]


@pytest.mark.parametrize(
    "written",
    [
        f'["float", {10**400}]',
        f'["complex", {10**400}]',
        '["float", "many"]',
        '["bytes", 5]',
        '["set", [["list", []]]]',
        '["unknown", 0]',
        "[[], []]",
        "[1]",
        "1" * 5000,
        "[" * 100_000,
        "not JSON",
    ],
    ids=lambda text: text[:20],
)
def test_what_a_program_writes_for_its_result_is_no_failure_of_the_reward(written):
    """A program that wrote a number of 400 digits to the channel of its result used to end the run."""
    reward = resolve_reward(
        RewardConfig(
            function="code", code=CodeConfig(score=CodeScore.share, limits=SandboxLimits(seconds=20))
        )
    )
    program = f"import os\ndef f(x):\n    os.write(3, {written!r}.encode())\n    os._exit(0)"
    answer = json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [1]})
    found = reward(prompt="", response=f"```python\n{program}\n```", answer=answer, record={})
    assert found == {"reward": 0.0, "passed": 0.0, "timed_out": 0.0, "no_code": 0.0}

import math
import os
import time

import pytest

from grpo_megatron.config.schema import RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import RewardWorkers, resolve_reward
from grpo_megatron.rewards.workers import RewardTask


def score(reward, response, answer):
    return reward(prompt="", response=response, answer=answer, record={})


@pytest.mark.parametrize(
    ("response", "expected"),
    [("7+5=12 #12", 1.0), ("#3 #12", 1.0), ("#12 #3", 0.0), ("12", 0.0), ("#12x", 0.0), ("", 0.0)],
)
def test_exact_match_takes_the_last_match(response, expected):
    assert score(resolve_reward("exact_match", r"#(\d+)(?!\w)"), response, "12") == expected


def test_exact_match_without_pattern():
    reward = resolve_reward("exact_match")
    assert score(reward, " yes\n", "yes") == 1.0
    assert score(reward, "yes, it is", "yes") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 1,234.", "1234", 1.0),
        ("x = 3", "4", 0.0),
        ("no idea", "4", 0.0),
        (r"$\sqrt{4}$", "2", 1.0),
    ],
)
def test_math(response, answer, expected):
    assert score(resolve_reward("math"), response, answer) == expected


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("exactmatch", "unknown"),
        ("no_such_module:f", "cannot be imported"),
        ("math:no_such", "cannot be imported"),
        ("math:pi", "not a function"),
    ],
)
def test_names_that_cannot_be_resolved(name, complaint):
    with pytest.raises(UserError, match=complaint):
        resolve_reward(name)


def test_a_broken_pattern():
    with pytest.raises(UserError, match="not a regular expression"):
        resolve_reward("exact_match", "(")


# -- in the worker processes; one function that does what the response says --------------------


def obey(prompt, response, answer, record):
    if response == "raise":
        raise ZeroDivisionError("planted")
    if response == "die":
        os._exit(1)
    if response == "sleep":
        time.sleep(30)
    return {
        "nan": math.nan,
        "text": "good",
        "parts": {"reward": 0.5, "length": 3},
        "record": record.get("bonus"),
        "nothing": {"score": 1},
    }.get(response, 1.0)


@pytest.fixture(scope="module")
def workers():
    pool = RewardWorkers(RewardConfig(function="tests.unit.test_rewards:obey", workers=1, timeout=1.0))
    yield pool
    pool.close()


def run(pool, *responses, record=None):
    tasks = [RewardTask(7, "p", response, "a", record or {}) for response in responses]
    return pool.result(pool.submit(tasks))


def test_numbers_and_components(workers):
    assert run(workers, "fine", "parts") == [(1.0, {}), (0.5, {"length": 3.0})]
    assert run(workers, "record", record={"bonus": 2}) == [(2.0, {})]


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("raise", "failed on record 7.*'raise'.*ZeroDivisionError: planted"),
        ("nan", "returned nan for record 7.*must be finite"),
        ("text", "must return a number"),
        ("nothing", "must return a number, or a dict with 'reward'"),
        ("sleep", "took longer than reward.timeout=1.0 s"),
    ],
)
def test_rewards_that_fail(workers, response, complaint):
    with pytest.raises(UserError, match=complaint):
        run(workers, "fine", response)
    assert run(workers, "fine") == [(1.0, {})]  # the worker lives on


def test_a_worker_that_dies():
    pool = RewardWorkers(RewardConfig(function="tests.unit.test_rewards:obey", workers=1))
    with pytest.raises(UserError, match="a reward process died"):
        run(pool, "die")
    pool.close()

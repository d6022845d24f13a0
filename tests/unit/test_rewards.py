import asyncio
import math
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.data import read_records
from grpo_megatron.errors import UserError
from grpo_megatron.rewards import resolve_reward
from grpo_megatron.rewards.answers import find_answer, hashes, normalise_answer
from grpo_megatron.rewards.limits import time_limit
from grpo_megatron.rewards.scoring import Failed, RewardTask, Scored, Scorer, _limited, _TooLong
from tests.unit.toy_environments import decode, encode


def score(reward, response, answer):
    return reward(prompt="", response=response, answer=answer, record={})


@pytest.mark.parametrize(
    ("response", "expected"),
    [("7+5=12 #12", 1.0), ("#3 #12", 1.0), ("#12 #3", 0.0), ("12", 0.0), ("#12x", 0.0), ("", 0.0)],
)
def test_exact_match_takes_the_last_match(response, expected):
    assert score(resolve_reward(RewardConfig(extract=r"#(\d+)(?!\w)")), response, "12") == expected


def test_exact_match_without_pattern():
    reward = resolve_reward(RewardConfig())
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
    assert score(resolve_reward(RewardConfig(function="math")), response, answer) == expected


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("exactmatch", "unknown"),
        ("no_such_module:f", "cannot be imported"),
        ("math:no_such", "math has no function no_such"),
        ("math:pi", "math has no function pi"),
    ],
)
def test_names_that_cannot_be_resolved(name, complaint):
    with pytest.raises(UserError, match=complaint):
        resolve_reward(RewardConfig(function=name))


def test_a_broken_pattern():
    with pytest.raises(ValidationError, match="must be a regular expression"):
        RewardConfig(extract="(")


@pytest.mark.parametrize(
    ("way", "text", "answer"),
    [
        ("hashes", "so 5+5=10\n#### 10\n", "10"),
        ("hashes", "#### 1\n#### 1,234", "1,234"),
        ("hashes", "no answer", None),
        ("boxed", r"first \boxed{3}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{3", None),
        ("last_number", "from 3 to $1,250.50.", "$1,250.50"),
        ("last_number", "it is -5.", "-5"),
        ("last_number", "none", None),
        ("whole", "  yes ", "yes"),
    ],
)
def test_finding_answers(way, text, answer):
    assert find_answer(text, [way]) == answer


def test_ways_are_tried_in_order():
    ways = ["boxed", "hashes", "last_number"]
    assert find_answer(r"\boxed{1} #### 2, 3", ways) == "1"
    assert find_answer("#### 2\n3", ways) == "2"
    assert find_answer("about 3", ways) == "3"
    assert find_answer("none", ways) is None


GSM8K = RewardConfig(
    function="math", answer_from=["hashes"], response_from=["boxed", "hashes", "last_number"]
)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("#### 1234", 1.0),
        (r"The total is \boxed{\$1,234.00}", 1.0),
        ("She has 1,234 in the end.", 1.0),
        ("#### 1235", 0.0),
        (r"1234, so \boxed{12}", 0.0),
        ("no number", 0.0),
    ],
)
def test_math_on_gsm8k_answers(response, expected):
    assert score(resolve_reward(GSM8K), response, "<<1200+34=1234>>1234.\n#### 1,234") == expected


@pytest.mark.parametrize(
    ("config", "answers", "right"),
    [
        (RewardConfig(), ["1234", "1/2"], ["1234", "1/2"]),
        (RewardConfig(extract="[^ ]+$"), ["1234", "1/2"], ["is 1234", "is 1/2"]),
        (RewardConfig(function="math"), ["1234", "1/2"], ["$1,234$", "0.5"]),
        (GSM8K, ["2 + 5 #### 7", "#### 1,234"], ["\\boxed{7.0}", "#### 1234"]),
    ],
)
def test_any_of_several_reference_answers_is_right(config, answers, right):
    reward = resolve_reward(config)
    assert [score(reward, response, answers) for response in right] == [1.0, 1.0]
    assert score(reward, "5", answers) == 0.0


def test_a_reference_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match=r"no answer found by reward\.answer_from"):
        score(resolve_reward(GSM8K), "5", "five")


def test_all_gold_answers_of_gsm8k_are_accepted_and_perturbed_ones_rejected():
    path = Path("../shared/data/gsm8k/test.jsonl")
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    reward = resolve_reward(GSM8K)
    records = read_records(str(path), ["question", "answer"])
    assert len(records) == 1319
    for record in records:
        gold = normalise_answer(hashes(record["answer"]))
        assert score(reward, record["answer"], record["answer"]) == 1.0
        assert score(reward, f"It is \\boxed{{{gold}}}.", record["answer"]) == 1.0
        wrong = record["answer"].rsplit("####", 1)[0] + f"#### {float(gold) + 1}"
        assert score(reward, wrong, record["answer"]) == 0.0


# -- in the workers, without their processes: tests/integration/test_reward_workers.py has these


def obey(prompt, response, answer, record):
    """Do what the response says, as a reward function."""
    if response == "raise":
        raise ZeroDivisionError("planted")
    if response == "exit":
        sys.exit(3)
    if response == "sleep":
        time.sleep(30)
    if response in ("late", "soon"):
        return asyncio.sleep(30 if response == "late" else 0.1, 0.25)
    return {
        "nan": math.nan,
        "text": "good",
        "parts": {"reward": 0.5, "length": 3},
        "record": record.get("bonus"),
        "nothing": {"score": 1},
    }.get(response, 1.0)


def scored(*responses, record=None, seconds=100.0, timeout=3.0):
    scorer = Scorer(RewardConfig(function="tests.unit.test_rewards:obey", timeout=timeout), decode)
    return scorer.work(
        [RewardTask(7, "p", encode(response), "a", record or {}) for response in responses], seconds
    )


def test_numbers_and_components():
    assert scored("fine", "parts") == [
        Scored("fine", {"reward": 1.0}),
        Scored("parts", {"reward": 0.5, "length": 3.0}),
    ]
    assert scored("record", record={"bonus": 2}) == [Scored("record", {"reward": 2.0})]


@pytest.mark.slow_when(lambda response: response == "late")
@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        ("raise", "failed on record 7 .*'raise'.*ZeroDivisionError: planted"),
        ("exit", "failed on record 7 .*SystemExit: 3"),
        ("nan", "returned nan for record 7.*must be finite"),
        ("text", "the reward must be a number, but is 'good' of type str"),
        ("nothing", "must return a number, or a dict with 'reward'"),
        ("sleep", "took longer than reward.timeout=3.0 s"),
        ("late", "took longer than reward.timeout=3.0 s"),
    ],
)
def test_rewards_that_fail(response, complaint):
    before, failed, after = scored("fine", response, "soon")
    assert (before.components, after.components) == ({"reward": 1.0}, {"reward": 0.25})
    assert isinstance(failed, Failed)
    assert failed.text == response
    assert re.search(complaint, failed.why)


def test_async_rewards_are_computed_at_once():
    start = time.monotonic()
    assert [one.components["reward"] for one in scored(*["soon"] * 200, timeout=60)] == [0.25] * 200
    assert time.monotonic() - start < 200 * 0.1


@pytest.mark.slow
def test_what_cannot_be_begun_in_time_is_left():
    assert len(scored("sleep", "fine", "fine", seconds=2.0)) == 1
    assert len(scored("fine", "sleep", "fine", seconds=2.0)) == 2


def test_what_has_no_time_left_is_not_begun():
    with pytest.raises(_TooLong):
        asyncio.run(_limited(time.monotonic() - 1, pytest.fail, {"reason": "it was begun"}))


def test_an_alarm_before_or_behind_its_block_does_not_leave_it():
    """An alarm can come while its block is entered or left, on a machine that is slow or paused for a
    moment.
    """
    reached, until = 0, time.monotonic() + 2
    while time.monotonic() < until:
        with time_limit(2e-5) as limit:  # about as long as entering, the block and leaving take
            for _ in range(100):
                pass
        reached += limit.reached
    assert reached
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0  # the test's own limit is running again


def test_a_time_limit_that_libraries_cannot_swallow():
    start = time.monotonic()
    with time_limit(0.2) as limit:
        for _ in range(3):  # as math-verify does: every Exception is "not equal", and on to the next
            try:
                time.sleep(20)
            except Exception:
                continue
    assert limit.reached
    assert time.monotonic() - start < 15
    with time_limit(5) as limit:
        pass
    assert not limit.reached

"""Terms, their weights and options, rewards of whole groups, and the arguments of reward functions."""

import asyncio
import time

import numpy as np
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Sample
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rewards import RewardWorkers, group_reward, resolve_rewards
from grpo_megatron.rewards.scoring import Failed, GroupScored, GroupTask, RewardTask, Scorer
from grpo_megatron.rewards.terms import terms_of, total
from tests.unit.toy_environments import decode, encode

HERE = "tests.unit.test_reward_terms"


def everything(prompt, response, answer, record, args, tokens, components):
    return {"reward": tokens * args.get("factor", 1), "seen": len(components)}


@group_reward("shortest")
def the_shortest(prompt, responses, answer, record, tokens):
    if "fail" in responses:
        return [1.0]
    return [float(count == min(tokens)) for count in tokens]


def score(prompt, response, answer, record):
    if response == "x":
        raise ZeroDivisionError("planted")
    return 0


def configured(**terms):
    return RewardConfig(terms=terms)


def scored(config, *responses):
    return Scorer(config, decode).work(
        [RewardTask(7, "p", encode(one), "yes", {}) for one in responses], 100.0
    )


RIGHT = {"function": "exact_match"}


def test_the_reward_is_the_weighted_sum():
    config = configured(
        right=RIGHT | {"weight": 2},
        form={"function": "regex", "pattern": "[a-z]+", "weight": -0.5},
        own={"function": f"{HERE}:everything", "factor": 10, "weight": 0.1},
    )
    (found,) = scored(config, "yes")
    assert found.components == {"right": 1.0, "form": 1.0, "own": 30.0, "own/seen": 2.0}
    assert total(terms_of(config), found.components) == pytest.approx(2 - 0.5 + 3)
    with pytest.raises(KeyError):
        total(terms_of(config), {"right": 1.0})  # the others are yet to come


async def judge(prompt, response, answer, record):
    await asyncio.sleep(0.1)
    return 1.0


def slow(prompt, response, answer, record):
    time.sleep(0.4)
    return 1.0


def test_one_that_computes_does_not_use_up_the_time_of_those_that_waited():
    """All requests of a worker are answered at about the same time."""
    config = configured(
        judge={"function": f"{HERE}:judge"},
        length={"function": "cosine_length", "right": "judge", "longest": 9},
        slow={"function": f"{HERE}:slow"},
    )
    assert [reward.term.name for reward in resolve_rewards(config)] == ["slow", "judge", "length"]
    config.timeout = 5.0
    tasks = [RewardTask(7, "p", encode("a"), "yes", {})] * 16
    assert not [found.why for found in Scorer(config, decode).work(tasks, 0.1) if isinstance(found, Failed)]


def test_one_function_with_options():
    config = RewardConfig(function=f"{HERE}:everything", args={"factor": 2})
    (found,) = scored(config, "four")
    assert found.components == {"reward": 8.0, "seen": 0.0}
    assert total(terms_of(config), found.components) == 8.0


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"right": {"weight": 1}}, r"reward.terms.right must specify a function"),
        ({"right": "math"}, r"reward.terms.right must specify a function"),
        (
            {"right": RIGHT | {"wieght": 1}},
            r"reward.terms.right: unknown option 'wieght'; did you mean 'weight'\?",
        ),
        (
            {"form": {"function": "regex", "patern": "x"}},
            r"reward.terms.form: unknown option 'patern'; did you mean 'pattern'\?",
        ),
        (
            {"form": {"function": "regex", "pattern": "("}},
            r"reward.terms.form.pattern must be a regular expression",
        ),
        ({"form": {"function": "regex"}}, r"reward.terms.form.pattern must be a regular expression"),
        ({"right": RIGHT | {"weight": "much"}}, r"reward.terms.right.weight: expected number, got much"),
        ({"right": RIGHT | {"weight": float("inf")}}, r"reward.terms.right.weight must be a finite number"),
        (
            {"right": RIGHT | {"response_from": ["box"]}},
            r"reward.terms.right.response_from: expected .*, got box",
        ),
        ({"reward": RIGHT}, r"reward.terms.reward: the name of a term"),
        ({"a b": RIGHT}, r"the name of a term must consist of letters"),
        (
            {"right": {"function": "exactly"}},
            r"reward.function=exactly is unknown; choose one of exact_match, math",
        ),
        (
            {"a": {"function": f"{HERE}:score", "x": 1}},
            r"reward.terms.a: .*:score does not accept the options x, because it has no parameter `args`",
        ),
        ({"a": {"function": "cosine_length"}}, r"reward.terms.a: cosine_length requires the options right"),
        (
            {"a": {"function": "cosine_length", "right": "b", "longest": 9}},
            r"uses the term 'b', which must be computed before it \(terms computed before it: none\)",
        ),
        ({"a": {"function": "group_length"}}, r"reward.terms.a: group_length requires the option right"),
        ({"a": {"function": "rank", "by": "b"}}, r"reward.terms.a uses the term 'b'"),
        ({"form": {"function": "format", "tags": []}}, r"reward.terms.form.tags is empty"),
        ({"a": {"function": "linear_length"}}, r"linear_length requires the options target and width"),
        (
            {"a": {"function": "http", "url": "ftp://x"}},
            r"reward.terms.a.url must have the form http://HOST",
        ),
        (
            {"a": {"function": "http", "url": "http://me:secret@x/"}},
            r"reward.terms.a.url must not contain a user name or password",
        ),
        (
            {"a": {"function": "http", "url": "htp//me:secret@x/"}},
            r"reward.terms.a.url must not contain a user name or password",
        ),
        (
            {"a": {"function": "http", "url": "me:secret@x"}},
            r"reward.terms.a.url must not contain a user name or password",
        ),
        (
            {"a": {"function": "http", "url": "http://x:99999/@?key=secret"}},
            r"form http://HOST:PORT/PATH, but is 'http://x:99999/@'",
        ),
        ({"a": {"function": "http", "url": "http://x:port/"}}, r"reward.terms.a.url must have the form"),
        ({"a": {"function": "http", "url": "http://[x/"}}, r"reward.terms.a.url must have the form"),
    ],
)
def test_what_is_no_term(terms, says):
    with pytest.raises(UserError, match=says) as error:
        resolve_rewards(configured(**terms))
    assert "secret" not in str(error.value)


def test_from_the_command_line():
    given = [
        "model.path=m",
        "data.train=d",
        "reward.terms.right.function=math",
        "reward.terms.right.weight=1e-1",
    ]
    config = load_config(None, [*given, "reward.terms.short={function: rank, among: right, weight: 0.2}"])
    assert [(term.name, term.weight) for term in terms_of(config.reward)] == [("right", 0.1), ("short", 0.2)]
    with pytest.raises(UserError, match=r"reward.terms.right: unknown option 'wight'"):
        load_config(None, [*given, "reward.terms.right.wight=2"])


def test_options_of_one_function_need_a_parameter():
    with pytest.raises(
        UserError,
        match=r"reward.args: .*:score does not accept the options factor, because it has no parameter",
    ):
        resolve_rewards(RewardConfig(function=f"{HERE}:score", args={"factor": 1}))


# -- groups: the workers' side alone, and the whole with the process replaced by a Scorer


class InThisProcess(RewardWorkers):
    """The driver's side, with a Scorer instead of processes, which
    tests/integration/test_reward_workers.py has.
    """

    def __init__(self, config):
        scorer = Scorer(config, decode)

        class Pool:
            async def call(self, task):
                return (await scorer._score_all([task], np.inf))[0]

        self._config, self._decode, self._pool, self._terms = config, decode, Pool(), terms_of(config)
        self._of_groups = self._is_whole = True
        self.said = []
        self._warn = self.said.append


def scored_group(config, *responses):
    prompt, workers = Prompt(7, encode("p"), "p", "yes"), InThisProcess(config)

    def sample(text):
        ids = encode(text)
        return Sample.of(
            0, 0, prompt.ids, ids, np.ones(len(ids), bool), np.zeros(len(ids), np.float32), "stop"
        )

    async def score_all():
        samples = [await workers.score(prompt, sample(text)) for text in responses]
        assert all(one.reward is None or one.reward_failed for one in samples)
        return await workers.score_group(prompt, samples)

    return asyncio.run(score_all()), workers.said


GROUP = {
    "short": {"function": f"{HERE}:shortest", "weight": 0.5},
    "right": RIGHT,
    "best": {"function": "rank", "by": "short", "largest_first": True, "weight": 0},
}


def test_a_group_is_scored_together():
    found, said = scored_group(configured(**GROUP), "yes", "no", "yes ")
    assert [one.reward for one in found] == [1.0, 0.5, 1.0]
    assert [one.response_text for one in found] == ["yes", "no", "yes "]
    assert found[1].reward_components == {"right": 0.0, "short": 1.0, "best": 1.0}
    assert [one.reward_components["best"] for one in found] == [0.25, 1.0, 0.25]
    assert not said


def test_a_group_reward_alone():
    found, _ = scored_group(RewardConfig(function=f"{HERE}:shortest"), "a", "bc")
    assert [one.reward for one in found] == [1.0, 0.0]
    assert [one.reward_components for one in found] == [{}, {}]


def test_who_failed_before_is_not_compared():
    config = configured(**GROUP, own={"function": f"{HERE}:score"})
    config.on_failure, config.failure_value = OnFailure.value, -1.0
    found, said = scored_group(config, "no", "x", "yes")
    assert [one.reward for one in found] == [0.5, -1.0, 1.0]
    assert [one.reward_failed for one in found] == [False, True, False]
    assert len(said) == 1


def test_a_group_reward_that_fails_costs_its_group():
    config = configured(**GROUP)
    with pytest.raises(UserError, match="must return 2 finite numbers"):
        scored_group(config, "fail", "yes")
    config.on_failure, config.failure_value = OnFailure.value, -1.0
    found, said = scored_group(config, "fail", "yes")
    assert [(one.reward, one.reward_failed) for one in found] == [(-1.0, True)] * 2
    assert "the reward of this group is" in said[0]


def test_groups_in_the_worker():
    scorer = Scorer(configured(**GROUP), decode)
    task = GroupTask(7, "p", ["a", "bc"], "yes", {}, [1, 2], [{"right": 1.0}, {"right": 0.0}])
    assert scorer.work([task], 1.0) == [GroupScored({"short": [1.0, 0.0], "best": [1.0, 0.0]})]
    (failed,) = scorer.work([GroupTask(7, "p", ["fail", "a"], "yes", {}, [4, 1], [{}, {}])], 1.0)
    assert isinstance(failed, Failed)

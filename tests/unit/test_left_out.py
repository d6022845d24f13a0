"""reward.on_failure=leave_out removes a response or an episode that fails from its group."""

import asyncio
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.algorithm.advantages import GROUP_RELATIVE
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.load import read_config
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.rules import violations
from grpo_megatron.rewards import group_reward
from grpo_megatron.rollout.environments import EnvironmentFailed
from grpo_megatron.rollout.episodes import MultiTurn, SingleTurn
from grpo_megatron.rollout.evaluation import Evaluation
from grpo_megatron.rollout.recording.replay import Replay
from grpo_megatron.rollout.source import EngineRollouts, Rollout
from grpo_megatron.rollout.statistics import group_statistics, pass_rates, step_statistics
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import Ledger, read_books
from grpo_megatron.sglang.request import Completion
from tests.rollouts import FakeEngines, manager_of
from tests.unit.credits import Tokens
from tests.unit.test_reward_terms import InThisProcess
from tests.unit.toy_environments import encode

HERE = "tests.unit.test_left_out"
LEFT_OUT = {"on_failure": OnFailure.leave_out}


def score(prompt, response, answer, record):
    """Return the number that the response consists of. Others fail."""
    return float(response)


@group_reward("left_out_group")
def score_group(prompt, responses, answer, record):
    if "9" in responses:
        raise ZeroDivisionError("planted")
    return [float(response) for response in responses]


class Engine(FakeEngines):
    """Answers each prompt with its words, one for each member of the group."""

    def __init__(self, prompts):
        super().__init__()
        self._words = [prompt.text.split() for prompt in prompts]

    async def generate(self, request, listener=None):
        number, member = request.key
        ids = encode(self._words[number][member])
        spans = (WeightSpan(0, 0, len(ids)),)
        return Completion(request.key, ids, np.zeros(len(ids), np.float32), "stop", spans)


def prompts(*texts):
    return [Prompt(uid, encode("p"), text, "a", {}) for uid, text in enumerate(texts)]


def generated(episodes, *texts, n=3):
    asked = prompts(*texts)
    return manager_of(Engine(asked), episodes).generate(asked, RolloutConfig(n=n, max_response_length=9))


def single_turns(function="score", **options):
    return SingleTurn(InThisProcess(RewardConfig(function=f"{HERE}:{function}", **LEFT_OUT | options)))


def test_a_response_whose_reward_fails_is_not_in_its_group():
    episodes = single_turns()
    groups = generated(episodes, "1 x 3", "1 2 3", "x x x", "x 2 x")
    assert [group.rewards for group in groups] == [[1, 3], [1, 2, 3], [], [2]]
    assert [group.failed for group in groups] == [1, 0, 3, 2]
    assert [sample.trajectory_id for sample in groups[0].samples] == [0, 2]
    said = episodes._rewards.said
    assert (
        "could not convert string to float: 'x'; this sample is left out (reward.on_failure=leave_out)"
        in said[0]
    )
    assert len(said) == 6


def test_the_other_choices_are_as_they_were():
    (group,) = generated(single_turns(on_failure=OnFailure.value, failure_value=-1.0), "1 x 3")
    assert (group.rewards, group.failed) == ([1, -1, 3], 0)
    with pytest.raises(UserError, match="could not convert string to float: 'x'"):
        generated(single_turns(on_failure=OnFailure.error), "1 x 3")


def test_a_group_reward_that_fails_leaves_its_group_out():
    groups = generated(single_turns("score_group"), "1 9 3", "1 2 3")
    assert [(group.rewards, group.failed) for group in groups] == [([], 3), ([1, 2, 3], 0)]


# -- episodes


class World:
    """An environment in this process that fails at the start for the record `0`, and in a step for a turn
    `x`.
    """

    def __init__(self, error):
        self._error = error

    def episode(self, prompt):
        self._prompt = prompt
        return self

    async def reset(self, seed):
        if self._prompt.text.startswith("0"):
            raise self._error
        return ""

    async def step(self, ids):
        text = await self.text(ids)
        if text == "x":
            raise self._error
        return text, SimpleNamespace(observation="", reward=float(text), done=True, components={})

    async def text(self, ids):
        return "".join(map(chr, ids))

    async def close(self):
        pass


class Tokenizer:
    encode = staticmethod(encode)
    decode = staticmethod(lambda ids: "".join(map(chr, ids)))


def multi_turns(world, rewards=None, episode_timeout=None, **options):
    """Return the episodes of a world, of at most three turns.

    rewards: scores the last turn; None if only the world gives rewards.
    options: settings of the section `reward`.
    """
    rollout = RolloutConfig(max_turns=3, episode_timeout=episode_timeout)
    return MultiTurn(world, Tokenizer, rollout, RewardConfig(**options), 0, rewards)


def test_an_episode_that_fails_is_not_in_its_group(capsys):
    world = World(EnvironmentFailed("planted"))
    groups = generated(multi_turns(world, **LEFT_OUT), "1 x 3", "0 1 2", n=3)
    assert [(group.rewards, group.failed) for group in groups] == [([1, 3], 1), ([], 3)]
    assert "planted; this episode is left out (reward.on_failure=leave_out)" in capsys.readouterr().out
    with pytest.raises(UserError, match="planted"):
        generated(multi_turns(world), "1 x 3")


class Straggler(World):
    """Takes a minute in a step for a turn `x`."""

    async def step(self, ids):
        if await self.text(ids) == "x":
            await asyncio.sleep(60)
        return await super().step(ids)


@pytest.mark.parametrize(("on_failure", "rewards"), [("leave_out", [1, 3]), ("value", [1, -1, 3])])
def test_an_episode_that_takes_too_long_fails(on_failure, rewards, capsys):
    """Rule R7: an episode has a time limit. In another stack, a straggler blocked the step again and again.

    The group is normalised with the number of samples that it has.
    """
    how = {"on_failure": OnFailure(on_failure), "failure_value": -1.0, "episode_timeout": 0.2}
    (group,) = generated(multi_turns(Straggler(None), **how), "1 x 3")
    assert group.rewards == rewards
    assert group.failed == 3 - len(rewards)
    assert "took longer than rollout.episode_timeout=0.2 s" in capsys.readouterr().out


def test_an_episode_that_takes_too_long_before_its_first_turn_is_left_out(capsys):
    """Its engine may be lost. There is nothing to train on."""

    class Slow(World):
        async def reset(self, seed):
            await asyncio.sleep(60)

    how = {"on_failure": OnFailure.value, "episode_timeout": 0.1}
    (group,) = generated(multi_turns(Slow(None), **how), "1 2 3")
    assert (group.samples, group.failed) == ((), 3)
    assert "this episode is left out, because it has no turn" in capsys.readouterr().out


def test_the_turn_of_an_episode_that_failed_at_once_has_the_episodes_time(capsys):
    class SlowEngine(Engine):
        async def generate(self, request, listener=None):
            await asyncio.sleep(60)

    asked = prompts("0")
    how = {"on_failure": OnFailure.value, "episode_timeout": 0.1}
    episodes = multi_turns(World(EnvironmentFailed("planted")), **how)
    engines = manager_of(SlowEngine(asked), episodes)
    (group,) = engines.generate(asked, RolloutConfig(n=2, max_response_length=9))
    assert (group.samples, group.failed) == ((), 2)
    assert "this episode is left out, because it has no turn" in capsys.readouterr().out


def test_a_sequence_that_waits_for_its_turn_is_no_sample():
    """It is there when an episode takes too long. It used to end the run: "the response has no tokens"."""
    trajectory = Trajectory(Episode(Prompt(0, np.array([1, 2]), "", ""), 0, 0, 9, (0, 0)))
    turn = Completion((0, 0), np.array([3]), np.zeros(1, np.float32), "stop", (WeightSpan(0, 0, 1),))
    trajectory.write(turn)
    assert trajectory.read([1, 4])  # the model no longer reads what it wrote, so that a sequence begins
    (sample,) = trajectory.samples("stop")
    assert sample.arrays.response_ids.tolist() == [3]


def test_a_time_limit_of_the_environment_is_not_taken_for_the_episodes():
    with pytest.raises(TimeoutError, match="its own"):
        generated(multi_turns(World(TimeoutError("its own")), episode_timeout=60), "x", n=1)


def test_an_episode_whose_last_turn_cannot_be_scored_is_not_in_its_group():
    rewards = InThisProcess(RewardConfig(function=f"{HERE}:only_one", **LEFT_OUT))
    rewards._of_groups = False
    (group,) = generated(multi_turns(World(None), rewards, **LEFT_OUT), "1 2 1")
    assert (group.rewards, group.failed) == ([2, 2], 1)


def only_one(prompt, response, answer, record):
    return {"1": 1.0}[response]


# -- what a step trains on


def configured(*overrides):
    return read_config(
        None, ["model.path=m", "data.train=d", "rollout.n=3", "reward.on_failure=leave_out", *overrides]
    )


class Source:
    def __init__(self, drawn):
        self._left, self.settled = list(drawn), []

    def next(self, count):
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    def settle(self, prompts):
        self.settled += prompts

    def take_back(self, prompts):
        assert not prompts


class Numbers:
    """Rewards in any thread: the number that a response consists of. Others fail."""

    async def score(self, prompt, sample):
        text = "".join(map(chr, sample.arrays.response_ids))
        value = float(text) if text.isdigit() else None
        return replace(sample.with_texts(text).scored(value, {}), reward_failed=value is None)

    async def score_group(self, prompt, samples):
        return tuple(samples)


def sampled(config, *texts) -> Rollout:
    asked = prompts(*texts)
    manager = manager_of(Engine(asked), SingleTurn(Numbers()))
    with closing(EngineRollouts(manager, config, Source(asked))) as source:
        return source.take(1)


@pytest.mark.parametrize("estimator", [*GROUP_RELATIVE, "reinforce_plus_plus"])
def test_a_group_with_too_few_for_the_estimator_is_left_out(estimator, tmp_path):
    record = tmp_path / "r.jsonl"
    config = configured(
        f"algorithm.adv_estimator={estimator}", "data.train_batch_size=4", f"rollout.record={record}"
    )
    found = sampled(config, "1 x 3", "x 2 x", "x x x", "1 2 3")
    alone = [] if estimator in GROUP_RELATIVE else [1]
    assert [group.prompt.uid for group in found.groups] == [0, *alone, 3]
    assert [group.prompt.uid for group in found.failed] == ([2] if alone else [1, 2])
    ledger = Ledger(str(tmp_path))
    ledger.taken(1, found.groups, found.left_out)
    counts = read_books(tmp_path / LEDGER)[0].totals()
    # The one sample that is left of prompt 1 counts as failed, unless the estimator can train on it.
    failed, waiting = (6, 6) if alone else (7, 5)
    assert {name: counts[name] for name in ("admitted", "failed", "waiting", "prompts")} == {
        "admitted": 12,
        "failed": failed,
        "waiting": waiting,
        "prompts": 4,
    }
    scalars = step_statistics(found.groups, found, 1.0, None)
    assert scalars["reward/failed"] == 6
    assert scalars["rollout/failed_groups"] == len(found.failed)
    assert scalars["reward/filtered_groups"] == 0
    replayed = Replay(str(record)).read(1)
    assert [(group.rewards, group.failed) for group in replayed] == [
        (group.rewards, group.failed) for group in found.groups
    ]


def test_a_step_without_any_group_is_an_error():
    with pytest.raises(UserError, match=r"step 1: none of the 2 groups is left"):
        sampled(configured("data.train_batch_size=2"), "x x x", "1 x x")


def test_dynamic_sampling_replaces_groups_that_are_too_small():
    given = [
        "data.train_batch_size=2",
        "rollout.dynamic_sampling.enabled=true",
        "algorithm.filters=[nonzero_variance]",
    ]
    found = sampled(
        configured(*given, "rollout.dynamic_sampling.over_sampling=1"),
        "x x x",
        "1 1 x",
        "1 2 x",
        "1 x x",
        "1 2 3",
        "1 2 2",
    )
    assert [group.prompt.uid for group in found.groups] == [2, 4]
    assert sorted(group.prompt.uid for group in found.failed) == [0, 3]
    assert found.dropped == 1
    with pytest.raises(
        UserError,
        match=r"left only 1 of the 2 groups .*, and failed rewards left too few samples of 3 groups; use",
    ):
        sampled(
            configured(*given, "rollout.dynamic_sampling.max_batches=2"), "x x x", "1 2 x", "x x x", "x x x"
        )


@pytest.mark.parametrize("estimator", [*GROUP_RELATIVE, "reinforce_plus_plus"])
def test_advantages_are_those_of_the_smaller_groups(estimator):
    """They equal those of a group that was drawn with this number of members."""
    config = configured(f"algorithm.adv_estimator={estimator}", "data.train_batch_size=2")
    groups = sampled(config, "1 x 4", "1 2 6").groups
    batch = TrainBatch.from_samples([sample for group in groups for sample in group.samples])
    given = Tokens(batch.reward, batch.group_id, batch.lengths, batch.trajectory_id, batch.loss_mask)
    expected = Tokens([1.0, 4, 1, 2, 6], [0, 0, 1, 1, 1], [1] * 5)
    found = given.advantages(config.algorithm)[batch.loss_mask]
    assert found.tolist() == expected.advantages(config.algorithm).tolist()
    assert found.any()


# -- evaluation


def evaluated(tmp_path, *texts, **options):
    config = configured(
        "eval.n=3", "eval.greedy=true", "eval.save_samples=false", *(f"{k}={v}" for k, v in options.items())
    )
    asked = prompts(*texts)
    manager = manager_of(Engine(asked), single_turns())
    return Evaluation(manager, {"held_out": asked}, config, str(tmp_path), lambda *_: None).scores(1)[
        "held_out"
    ]


def test_an_evaluation_counts_what_is_left(tmp_path):
    """Each prompt counts once, and pass@k is over the prompts with k samples."""
    scores = evaluated(tmp_path, "1 x 0", "x 1 1", "0 0 1", "x x x")
    assert scores == pytest.approx(
        {"mean@3": (1 / 2 + 1 + 1 / 3) / 3, "pass@2": (1 + 1 + 2 / 3) / 3, "greedy": 0.5, "failed": 7}
    )


def test_an_evaluation_of_nothing_is_an_error(tmp_path):
    with pytest.raises(
        UserError,
        match=r"the evaluation of held_out has no samples left, .* failed for all samples of its 1 prompts",
    ):
        evaluated(tmp_path, "x x x")


def test_statistics_of_groups_of_several_sizes():
    groups = generated(single_turns(), "1 x 0 1", "x x 1 1", "0 0 1 0", n=4)
    assert pass_rates(groups, 1.0) == pytest.approx({"pass@2": (1 + 1 + 0.5) / 3, "pass@4": 1.0})
    assert group_statistics(groups, 1.0)["reward/mean"] == pytest.approx(5 / 9)


def test_what_it_goes_with():
    assert violations(configured()) == []
    (sentence,) = violations(configured("reward.failure_value=-1"))
    assert "only with reward.on_failure=value (reward.failure_value=-1.0)" in sentence
    two = ["megatron.data_parallel=2", "train.packing=false"]
    assert [
        "groups then have any size" in sentence for sentence in violations(configured(*two, "rollout.n=4"))
    ] == [True]
    assert violations(configured(two[0])) == violations(configured(two[1])) == []

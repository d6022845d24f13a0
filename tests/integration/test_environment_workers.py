"""Episodes against environments in real processes. The model's turns are given.

test_environment_closing.py tests how environments are closed.
"""

import asyncio
import time

import numpy as np
import pytest

from grpo_megatron.batch.sample import Group, WeightSpan
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.rollout.environment_host import EnvironmentHost
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.statistics import group_statistics
from grpo_megatron.rollout.trajectory import Episode
from tests.integration.scripted_episodes import LETTERS, Script, joined, letters, of, play, prompt
from tests.unit.toy_environments import AB, decode, encode


@pytest.fixture(scope="module")
def counting(places):
    environments = of("counting", places(2))
    yield environments
    environments.close()


@pytest.fixture(scope="module")
def obedient(places):
    environments = of("Obedient", places(1), timeout=1.0)
    yield environments
    environments.close()


def test_the_transcript_is_exact_to_the_token(counting):
    script = Script("cab", "x", "ab end")
    sample = play(counting, script)
    observations = [[*letters("1:"), AB, ord(";")], [*letters("2:"), AB, ord(";")]]
    parts = [letters("cab"), observations[0], letters("x"), observations[1], letters("ab end")]
    assert sample.arrays.response_ids.tolist() == joined(parts)
    assert sample.arrays.response_ids.dtype == np.int32
    # Every request is the one before, the model's own tokens, and the observation.
    assert script.asked == [letters("ask:") + joined(parts[:end]) for end in (0, 2, 4)]
    assert script.allowed == [100, 93, 88]
    assert sample.arrays.loss_mask.tolist() == [True] * 3 + [False] * 4 + [True] + [False] * 4 + [True] * 6
    logprobs = [-101, -102, -103, 0, 0, 0, 0, -201, 0, 0, 0, 0, *range(-301, -307, -1)]
    assert sample.arrays.rollout_logprobs.tolist() == logprobs
    assert sample.arrays.rollout_logprobs.dtype == np.float32
    assert sample.weight_spans == (WeightSpan(3, 0, 3), WeightSpan(3, 7, 8), WeightSpan(3, 12, 18))
    assert (sample.finish_reason, sample.turns, sample.reward) == ("stop", 3, 1.5)
    assert sample.response_text == "cab1:ab;x2:ab;ab end"
    assert (sample.group_id, sample.trajectory_id, sample.arrays.prompt_ids.tolist()) == (
        2,
        5,
        letters("ask:"),
    )
    assert sample.reward_components["one"] == 3


def test_in_the_flat_batch_the_model_is_trained_on_its_own_tokens(counting):
    sample = play(counting, Script("xy", "end"))
    batch = TrainBatch.from_samples([sample])
    assert decode(batch.target[batch.loss_mask]) == "xyend"
    assert batch.rollout_logp[batch.loss_mask].tolist() == [-101, -102, -201, -202, -203]
    assert not batch.rollout_logp[~batch.loss_mask].any()


def test_a_first_observation_follows_the_prompt(counting):
    script = Script("end")
    sample = play(counting, script, prompt(first="ab?"))
    assert script.asked == [[*letters("ask:"), AB, ord("?")]]
    assert sample.arrays.response_ids.tolist() == [AB, ord("?"), *letters("end")]
    assert sample.arrays.loss_mask.tolist() == [False, False, True, True, True]
    assert sample.weight_spans == (WeightSpan(3, 2, 5),)
    with pytest.raises(
        UserError,
        match=r"record 7: .*first observation has 3 tokens, which leaves none of the 3 tokens of",
    ):
        play(counting, Script(), prompt(first="abc?"), limit=3)


@pytest.mark.parametrize(
    ("turns", "limit", "max_turns", "text", "reason"),
    [
        (("a", "end"), 8, 8, "a1:ab;end", "stop"),
        (("a", "end"), 7, 8, "a1:ab;en", "length"),  # the turn is cut off
        (("a",), 6, 8, "a1:ab;.", "length"),  # one token is left, for the model
        (("a",), 5, 8, "a", "length"),  # the observation would leave none
        (("a",), 3, 8, "a", "length"),  # it would not even fit
        (("end",), 3, 8, "end", "stop"),  # done with the last token
        (("axe",), 3, 8, "axe", "length"),  # all used up by whole turns
        (("a", "b"), 100, 2, "a1:ab;b", "max_turns"),
        (("a", "end"), 100, 2, "a1:ab;end", "stop"),
        (("a",), 100, 1, "a", "max_turns"),
    ],
)
def test_how_episodes_end(counting, turns, limit, max_turns, text, reason):
    sample = play(counting, Script(*turns, "......"), limit=limit, max_turns=max_turns)
    assert (sample.response_text, sample.finish_reason) == (text, reason)
    assert len(sample.arrays.response_ids) <= limit
    assert sample.arrays.loss_mask[-1]
    assert sample.reward == 0.5 * sample.turns  # of the cut-off turn, too


def test_a_group_begins_in_one_state_and_episodes_stay_in_their_process(counting):
    def starts(**how):
        samples = [play(counting, Script("a", "b", "end"), **how) for _ in range(2)]
        assert [sample.reward for sample in samples] == [1.5, 1.5]
        return [(s.reward_components["state"] / 3, s.reward_components["pid"] / 3) for s in samples]

    (state, pid), (same, other_pid) = starts()
    assert state == same
    assert pid != other_pid  # two workers take turns
    assert {pid, other_pid} == {float(int(pid)), float(int(other_pid))}  # the same one in all three steps
    assert state not in {starts(state=(0, 1))[0][0], starts(state=(1, 0))[0][0], starts(seed=1)[0][0]}


def test_many_episodes_at_once(counting):
    async def both():
        turns = MultiTurn(counting, LETTERS, RolloutConfig(), RewardConfig(), 0)
        episodes = [Episode(prompt(), i, i, 100, (0, i)) for i in range(20)]
        return await asyncio.gather(
            *(turns.play(e, Script(*"x" * (e.group_id % 5), "end")) for e in episodes)
        )

    samples = [sample for (sample,) in asyncio.run(both())]
    assert [sample.turns for sample in samples] == [1, 2, 3, 4, 5] * 4
    groups = [Group(i, prompt(), (sample,)) for i, sample in enumerate(samples)]
    scalars = group_statistics(groups, pass_reward=1.0)
    assert scalars["response/turns_mean"] == 3
    assert scalars["response/out_of_turns"] == scalars["response/truncated"] == 0
    assert scalars["reward/component/one"] == 3
    capped = [Group(0, prompt(), (play(counting, Script("a", "b"), max_turns=2),))]
    assert group_statistics(capped, pass_reward=1.0)["response/out_of_turns"] == 1


STEP = r"environment tests.unit.toy_environments:Obedient: step\('{}'\) on record 7 "


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ("raise", "failed: ZeroDivisionError: planted"),
        ("exit", "failed: SystemExit: 3"),
        ("text", "returned 'good'; it must return a StepResult"),
        ("nothing", "returned None; it must return a StepResult"),
        ("bad observation", "returned .*observation must be text or chat messages"),
        ("bad reward", "returned .*the reward must be a number, but is 'high' of type str"),
        ("nan", "returned .*the reward must be finite"),
        ("bad done", "returned .*done must be true or false"),
        ("bad component", "returned .*'x' must be a number"),
        ("sleep", "took longer than reward.timeout=1.0 s"),
        ("await", "took longer than reward.timeout=1.0 s"),
        ("spin", "took longer than reward.timeout=1.0 s"),
    ],
)
def test_a_step_that_fails_is_one_clear_error(obedient, order, complaint):
    start = time.monotonic()
    with pytest.raises(UserError, match=STEP.format(order) + complaint):
        play(obedient, Script("fine", order))
    assert time.monotonic() - start < 60
    # The process lives on, and so do its other episodes.
    assert play(obedient, Script("fine"), max_turns=1).reward == 1


@pytest.mark.parametrize(
    ("order", "complaint"),
    [
        ("made to raise", "failed: ZeroDivisionError: planted"),
        ("reset and raise", "failed: ZeroDivisionError: planted"),
        ("reset number", "returned 7; it must return text, chat messages with role and content, or None"),
    ],
)
def test_a_start_that_fails(obedient, order, complaint):
    with pytest.raises(
        UserError,
        match=r"environment tests.unit.toy_environments:Obedient: reset\(\) on record 7 " + complaint,
    ):
        play(obedient, Script("fine"), prompt(do=order))


@pytest.mark.slow
def test_a_process_that_dies(places):
    environments = of("Obedient", places(1))
    try:
        for _ in range(2):  # another process in its place
            with pytest.raises(
                UserError, match=r"environment tests.unit.toy_environments:Obedient: its process .* died"
            ):
                play(environments, Script("die"))
    finally:
        environments.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "asked", "played"),
    [
        ("raise", {}, "finefineraise"),
        ("bad reward", {}, "finefinebad reward"),
        ("spin", {}, "finefinespin"),
        ("die", {}, "finefinedie"),
        ("fine", {"do": "reset and raise"}, "fine"),
    ],
)
def test_a_failure_costs_its_episode_where_it_may(obedient, capsys, order, asked, played):
    """The turns that were played are kept, and there is something to train on even if there was none."""
    turns = ["fine"] if asked else ["fine", order]
    sample = play(obedient, Script(*turns), prompt(**asked), failure_value=-0.5)
    assert (sample.reward, sample.reward_failed, sample.reward_components) == (-0.5, True, {})
    assert sample.response_text == decode(sample.arrays.response_ids) == played
    assert sample.arrays.loss_mask.sum() == sum(map(len, turns))
    assert "; the reward of this episode is reward.failure_value=-0.5" in capsys.readouterr().out
    fine = play(obedient, Script("fine"), max_turns=1, failure_value=-0.5)
    assert (fine.reward, fine.reward_failed) == (1, False)


def test_an_episode_whose_process_was_replaced_is_lost():
    """This is no error of the program: the run repeats its step."""
    rollout = RolloutConfig(environment="tests.unit.toy_environments:Obedient")
    (lost,) = EnvironmentHost(rollout, RewardConfig(), decode).work([("step", 3, (encode("fine"),))], 1.0)
    assert isinstance(lost, ProcessLost)
    assert "the process of an episode died" in str(lost)


@pytest.mark.slow
def test_one_that_cannot_be_interrupted(places):
    """A C extension may never return. Nothing in its process can end it, so that the process is ended."""
    environments = of("Obedient", places(1), timeout=1.0)
    try:
        with pytest.raises(
            UserError, match=r"did not return within reward.timeout=1.0 s and cannot be interrupted"
        ):
            play(environments, Script("deaf"))
    finally:
        environments.close()

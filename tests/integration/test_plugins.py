"""The examples of docs/plugins.md, run like a user would."""

import asyncio
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo_megatron.algorithm.filters import apply_filters
from grpo_megatron.algorithm.kl import KLController
from grpo_megatron.algorithm.losses import PolicyLoss
from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample
from grpo_megatron.batch.train_batch import TrainBatch
from grpo_megatron.errors import UserError
from grpo_megatron.plugins import Registry
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rewards import RewardWorkers
from grpo_megatron.rollout.environment_workers import Environments
from grpo_megatron.rollout.episodes import MultiTurn
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sglang.request import Completion
from tests.coefficients import set_coefficients
from tests.unit.credits import Tokens
from tests.unit.test_losses import inputs as loss_inputs
from tests.unit.toy_environments import decode, encode

EXAMPLES = re.findall(r"```python\n(.*?)```", Path("docs/plugins.md").read_text(encoding="utf-8"), re.DOTALL)

# What the page only describes: an asynchronous reward function, and an estimator that asks for a column.
FURTHER = [
    """\
import asyncio

from grpo_megatron.rewards import reward_function


@reward_function("asks_a_judge")
async def asks_a_judge(prompt, response, answer, record, args, tokens):
    await asyncio.sleep(args["pause"])
    return float(tokens <= 10)
""",
    """\
from grpo_megatron.algorithm.columns import needs_columns


@advantage_estimator("surprised")
@needs_columns("rollout_logp")
def surprised(inputs, options):
    found = inputs.trajectories
    return found.score * -inputs.column("rollout_logp") / found.tokens
""",
]


@pytest.fixture
def my_plugins(tmp_path, monkeypatch):
    """All examples in one file, in the working directory, and FURTHER."""
    (tmp_path / "my_plugins.py").write_text("\n\n".join(EXAMPLES + FURTHER), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_plugins", None)


def configured(*overrides):
    return load_config(None, ["model.path=m", "data.train=d.jsonl", *overrides])


def groups(*rewards):
    def sample(number, reward):
        ids = np.array([1, 2], dtype=np.int32)
        return Sample.of(
            0, number, ids, ids, np.ones(2, bool), np.zeros(2, np.float32), "stop", reward=reward
        )

    prompt = Prompt(0, np.array([1, 2], dtype=np.int32), "", "")
    return [
        Group(i, prompt, tuple(sample(*one) for one in enumerate(values))) for i, values in enumerate(rewards)
    ]


def test_each_is_short():
    assert len(EXAMPLES) == 6
    assert all(len([line for line in text.splitlines() if line]) <= 15 for text in EXAMPLES)


@pytest.mark.parametrize("attribute", ["best_of_group"])
def test_advantage(my_plugins, attribute):
    options = configured(f"algorithm.adv_estimator=my_plugins:{attribute}").algorithm
    assert Tokens([1.0, 3.0, 2.0], [5, 5, 6], [1, 1, 1]).advantages(options).tolist() == [-1, 1, 1]


def test_an_estimator_that_asks_for_a_column(my_plugins):
    config = configured("algorithm.adv_estimator=my_plugins:surprised")
    batch = TrainBatch.from_samples([sample for group in groups([1, 2]) for sample in group.samples])
    batch.rollout_logp = np.where(batch.loss_mask, -0.5, 3.0).astype(np.float32)
    set_coefficients([batch], config, None, KLController(0.0))
    assert batch.advantage[batch.loss_mask].tolist() == [0.5, 0.5, 1.0, 1.0]


def test_surrogate(my_plugins):
    config = configured("algorithm.surrogate=my_plugins:soft_clip", "algorithm.clip_ratio_high=0.5")
    loss = PolicyLoss.from_config(config.algorithm, config.mismatch, known_before=True)
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = logp.detach() - torch.tensor([1.0, 2.0]).log()
    value, _ = loss(logp, torch.zeros(2), loss_inputs([True, True], old, advantage=torch.tensor([2.0, 1.0])))
    assert value.tolist() == pytest.approx([-2.0, -(1 + 0.5 * np.tanh(2))])
    value.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2.0, -2 / np.cosh(2) ** 2])


def test_filter(my_plugins):
    config = configured("algorithm.filters=[nonzero_variance,my_plugins:not_too_easy]")
    left = apply_filters(groups([1, 1], [1, 0], [0, 0], [0, 1]), config.algorithm)
    assert [group.group_id for group in left.groups] == [1, 3]


def rewarded(config, places, *responses):
    """Return a group of these responses with their rewards."""
    workers = RewardWorkers(config.reward, decode, places(1))
    prompt = Prompt(0, encode("1+1"), "1+1", "2")

    def sample(text):
        ids = encode(text)
        return Sample.of(
            0, 0, prompt.ids, ids, np.ones(len(ids), bool), np.zeros(len(ids), np.float32), "stop"
        )

    async def score_all():
        return await workers.score_group(
            prompt, [await workers.score(prompt, sample(text)) for text in responses]
        )

    try:
        return asyncio.run(score_all())
    finally:
        workers.close()


@pytest.mark.slow
def test_reward(my_plugins, places):
    (scored,) = rewarded(configured("reward.function=my_plugins:short_and_right"), places, "it is 2")
    assert (scored.response_text, scored.reward) == ("it is 2", pytest.approx(0.994))
    assert scored.reward_components == {"right": 1.0}


@pytest.mark.slow
def test_several_rewards(my_plugins, places):
    right = "reward.terms.right={function: my_plugins:short_and_right}"
    judge = "reward.terms.judge={function: my_plugins:asks_a_judge, pause: 0.01, weight: 2}"
    new = "reward.terms.new={function: my_plugins:unlike_the_others, weight: 10}"
    scored = rewarded(configured(right, judge, new), places, "2", "3", "2")
    assert [one.reward for one in scored] == pytest.approx([3, 12, 3])
    assert [one.reward_components["new"] for one in scored] == [0, 1, 0]
    assert scored[0].reward_components["right/right"] == 1


@pytest.mark.slow
def test_environment(my_plugins, places):
    """Halving the range finds a number from 0 to 9 within four guesses. A whole group has the same number."""
    config = configured("rollout.environment=my_plugins:guess_the_number")
    environments = Environments(config.rollout, config.reward, decode, places(1))
    play = MultiTurn(environments, Characters, config.rollout, config.reward, 0).play
    prompt = Prompt(0, np.array([1], dtype=np.int32), "", "9")
    try:
        samples = [asyncio.run(play(Episode(prompt, 0, i, 200, (0, 0)), halving_model))[0] for i in range(2)]
    finally:
        environments.close()
    for sample in samples:
        assert (sample.reward, sample.finish_reason) == (1, "stop")
        assert sample.turns <= 4
    assert samples[0].response_text == samples[1].response_text
    *hints, last = samples[0].response_text.split()
    assert set(hints[1::2]) <= {"higher", "lower"}
    assert last.isdecimal()


class Characters:
    encode = staticmethod(encode)


async def halving_model(ids, most, routed=0):
    """Return the middle of the remaining numbers, after a transcript such as `4 higher `."""
    low, high = 0, 9
    words = decode(ids[1:]).split()
    for guess, hint in zip(words[::2], words[1::2], strict=True):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    answer = encode(str((low + high) // 2))
    return Completion((0, 0), answer, np.zeros(len(answer), np.float32), "stop", ())


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.adv_estimator=grop", "choose one of grpo, rloo"),
        ("algorithm.surrogate=clipp", "choose one of clip, cispo, reinforce"),
        ("algorithm.surrogate=no_such_module:f", "cannot be imported"),
        ("algorithm.filters=[my_plugins:nothing]", "has no function nothing"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_starts(my_plugins, override, says):
    with pytest.raises(UserError, match=says):
        configured(override)


def test_a_name_is_registered_once():
    registry = Registry("thing", "section.thing")
    registry("a")(test_each_is_short)
    registry("a")(test_each_is_short)  # a module loaded anew
    with pytest.raises(ValueError, match="twice"):
        registry("a")(groups)


def test_a_decorated_name_other_than_the_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    registry = Registry("thing", "section.thing")
    monkeypatch.setitem(sys.modules, "made_up", SimpleNamespace())
    registry("special")(groups)
    assert registry.get("made_up:special") is groups


# --- built-in filters, and what happens to rewards


def test_a_filter_that_leaves_nothing():
    with pytest.raises(UserError, match=r"'nonzero_variance'\] removed all 2 groups of the step"):
        apply_filters(
            groups([1, 1], [0.1, 0.1]), configured("algorithm.filters=[nonzero_variance]").algorithm
        )


def test_truncated_responses_are_not_trained_on():
    from dataclasses import replace

    (group,) = groups([1, 0])
    cut = replace(group, samples=(group.samples[0], replace(group.samples[1], finish_reason="length")))
    (left,) = apply_filters([cut], configured("algorithm.overlong_filter=true").algorithm).groups
    assert [sample.num_trained > 0 for sample in left.samples] == [True, False]
    (plain,) = apply_filters([cut], configured().algorithm).groups
    assert all(sample.num_trained == sample.num_response for sample in plain.samples)


@pytest.mark.parametrize(
    ("length", "expected"), [(60, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)]
)
def test_soft_overlong_punishment(length, expected):
    """arXiv:2503.14476 eq. 13 with L_max 100 and L_cache 20."""
    from grpo_megatron.rewards.shaping import overlong_penalty

    assert overlong_penalty(length, longest=100, buffer=20, penalty=1.0) == pytest.approx(expected)
    assert overlong_penalty(length, longest=100, buffer=20, penalty=0.5) == pytest.approx(expected / 2)


def test_overlong_shaping_of_groups():
    from grpo_megatron.rewards.shaping import shape_overlong

    config = configured(
        "rollout.max_response_length=4", "reward.overlong_buffer.length=4"
    ).reward.overlong_buffer
    (group,) = shape_overlong(groups([1, 0]), 4, config)
    assert group.rewards == [0.5, -0.5]
    assert group.samples[0].reward_components == {"overlong_penalty": -0.5}
    config.length = 0
    assert shape_overlong(groups([1, 0]), 4, config)[0].rewards == [1, 0]

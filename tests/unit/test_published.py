"""Published environments: episodes that verifiers' real environment server plays. The model's turns are given."""

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest

from grpo_megatron.cli import main
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig, VerifiersConfig
from grpo_megatron.errors import ProcessLost
from grpo_megatron.rollout.agent_task import AgentUnusable
from grpo_megatron.rollout.agents import AgentFailed
from grpo_megatron.rollout.published.episodes import PublishedEpisodes
from grpo_megatron.rollout.trajectory import Episode
from tests.published import PYTHON, TASK_SETS, needs_verifiers, on_this_machine
from tests.unit.test_gateway import Model, tokenizer  # noqa: F401 - a fixture
from tests.unit.test_trajectories import prompt_of

pytestmark = [pytest.mark.slow, needs_verifiers]


def rollout_of(**options) -> RolloutConfig:
    verifiers = VerifiersConfig(python=str(PYTHON), env=on_this_machine("agent"))
    return RolloutConfig(environment="verifiers:sums_tasks", verifiers=verifiers, **options)


@pytest.fixture(autouse=True)
def in_the_folder_of_the_task_set(monkeypatch):
    monkeypatch.chdir(TASK_SETS)


def episode_of(tokenizer, number=1):  # noqa: F811
    task = {"idx": number, "prompt": f"{number}+1=", "answer": str(number + 1)}
    own = replace(prompt_of(tokenizer, task["prompt"]), fields={"verifiers": task})
    return Episode(own, 3, number, 400, (0, 0))


def played(tokenizer, tmp_path, act, rollout=None, **reward):  # noqa: F811
    """Start an environment server, and return the result of act(its episodes)."""
    episodes = PublishedEpisodes(
        rollout or rollout_of(), RewardConfig(**reward), tokenizer, str(tmp_path / "verifiers.log")
    )

    async def main():
        try:
            return await act(episodes)
        finally:
            if episodes._gateway:
                await episodes._gateway.stop()

    try:
        return asyncio.run(main())
    finally:
        episodes.close()


def test_episodes_at_once_have_their_own_tokens_and_rewards(tokenizer, tmp_path):  # noqa: F811
    models = [Model(tokenizer, "it is 1<eos>"), Model(tokenizer, "it is 2<eos>"), Model(tokenizer, "no<eos>")]

    async def act(episodes):
        return await asyncio.gather(
            *(
                episodes.play(episode_of(tokenizer, number), model)
                for number, model in enumerate(models)
            )
        )

    samples = [sample for (sample,) in played(tokenizer, tmp_path, act)]
    assert [sample.reward for sample in samples] == [2.0, 2.0, 0.0]
    assert samples[0].reward_components == {"right": 1.0, "letters": 7.0}
    for number, (sample, model) in enumerate(zip(samples, models, strict=True)):
        read, wrote = model.requests[0]
        assert tokenizer.decode_all(sample.arrays.prompt_ids) == f"<user>{number}+1=<assistant>"
        assert sample.arrays.prompt_ids.tolist() == list(read)
        assert sample.arrays.response_ids.tolist() == list(wrote)
        assert sample.arrays.loss_mask.all()

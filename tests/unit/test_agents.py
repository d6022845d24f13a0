"""Agents: what they get, their rewards, and what happens if they fail. The model's turns are given."""

import asyncio
import os
import time

import httpx
import openai
import pytest

from grpo_megatron.config.agent import AgentConfig
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.rollout import agents
from grpo_megatron.rollout.agents import AgentEpisodes, AgentFailed
from grpo_megatron.rollout.trajectory import Episode
from tests.unit.test_gateway import Model, tokenizer, user  # noqa: F401 - a fixture
from tests.unit.test_trajectories import prompt_of

HERE = "tests.unit.test_agents"


def say(task, *texts):
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0)
    return [
        client.chat.completions.create(model=task.model, messages=[user(text)]).choices[0].message.content
        for text in texts
    ]


def counts(task):
    assert task.messages == [user("ask")]
    return {"reward": len(say(task, "a", "b")), "asked": 2}


async def counts_async(task):
    client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
    asked = [client.chat.completions.create(model=task.model, messages=[user(text)]) for text in "ab"]
    return len(await asyncio.gather(*asked))


async def blocks(task):
    """Use a client that blocks the event loop, in an async function."""
    client = openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0, timeout=20)
    return len(client.chat.completions.create(model=task.model, messages=[user("a")]).choices)


def ends_its_session(task):
    say(task, "a")
    body, key = {"reward": 0.25, "steps": 2}, {"x-api-key": task.api_key}
    httpx.post(f"{task.base_url}/complete", json=body, headers=key).raise_for_status()


def leaves_the_reward_to_the_run(task):
    say(task, "a")


def raises(task):
    say(task, "a")
    raise ValueError("planted")


def asks_nothing(task):
    return 1.0


def gives_no_number(task):
    say(task, "a")
    return "much"


def leaves_itself_out(task):
    url = task.base_url.replace("/v1", "/complete")
    httpx.post(url, json={"leave_out": True}, headers={"x-api-key": task.api_key}).raise_for_status()


def exits(task):
    say(task, "a")
    raise SystemExit("planted")


async def exits_async(task):
    exits(task)


def runs_out(task):
    say(task, "a")
    return next(iter([]))


def waits(task):
    say(task, "a")
    time.sleep(3)


class Rewards:
    """Scores a response with its number of tokens."""

    async def score(self, prompt, sample):
        return sample.scored(float(sample.num_response), {"long": 1.0})

    def close(self):
        pass


def play(tokenizer, name, turns=("one<eos>", "two<eos>"), timeout=None, agent=None, **reward):  # noqa: F811
    chosen = AgentConfig(function=f"{HERE}:{name}", **agent or {})
    rollout = RolloutConfig(agent=chosen, episode_timeout=timeout)
    episodes = AgentEpisodes(rollout, RewardConfig(**reward), tokenizer, Rewards())

    async def main():
        try:
            return await episodes.play(
                Episode(prompt_of(tokenizer), 3, 0, 400, (0, 0)), Model(tokenizer, *turns)
            )
        finally:
            await episodes._gateway.stop()
            episodes.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "rewards", "components"),
    [
        ("counts", [2.0, 2.0], {"asked": 2.0}),
        ("counts_async", [2.0, 2.0], {}),
        ("blocks", [1.0], {}),
        ("leaves_itself_out", [], {}),
        ("ends_its_session", [0.25], {"steps": 2.0}),
        ("leaves_the_reward_to_the_run", [4.0], {"long": 1.0}),
    ],
)
def test_the_reward_is_what_the_agent_says(tokenizer, name, rewards, components):  # noqa: F811
    samples = play(tokenizer, name)
    assert [sample.reward for sample in samples] == rewards
    assert all(sample.reward_components == components for sample in samples)
    assert {sample.response_text for sample in samples} <= {"one", "two"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", "record 7: ValueError: planted"),
        ("exits", "record 7: SystemExit: planted"),
        ("exits_async", "record 7: SystemExit: planted"),
        ("runs_out", "record 7: StopIteration: "),
        ("asks_nothing", "returned without a request to http"),
        ("gives_no_number", "much"),
        ("waits", r"took longer than rollout\.episode_timeout=1\.5 s"),
    ],
)
def test_an_agent_that_fails(tokenizer, name, says, capsys):  # noqa: F811
    timeout = 1.5 if name == "waits" else None
    with pytest.raises(AgentFailed, match=says):
        play(tokenizer, name, timeout=timeout)
    assert play(tokenizer, name, timeout=timeout, on_failure="leave_out") == ()
    samples = play(tokenizer, name, timeout=timeout, on_failure="value", failure_value=-1.0)
    assert [(sample.reward, sample.reward_failed) for sample in samples] == (
        [] if name == "asks_nothing" else [(-1.0, True)]
    )


def test_an_agent_that_may_hang_is_told(tokenizer, monkeypatch, capsys):  # noqa: F811
    """The run would wait for it forever without a time limit, and say nothing."""
    monkeypatch.setattr(agents, "_QUIET_SECONDS", 0.8)
    assert len(play(tokenizer, "waits")) == 1
    said = capsys.readouterr().out
    assert "record 7: no request for 0.8 s, and the run waits for this agent; set rollout.episode_" in said
    assert play(tokenizer, "waits", timeout=1.5, on_failure="leave_out") == ()
    assert "no request for" not in capsys.readouterr().out


def has_no_room(task):
    say(task, "a")
    with pytest.raises(openai.BadRequestError, match="leaves none"):
        say(task, "x" * 500)
    return 1.0


def test_a_sample_says_that_its_episode_had_no_room(tokenizer):  # noqa: F811
    """Each episode of an agent ended with "stop", so that filters of truncated samples did not see it."""
    assert [sample.finish_reason for sample in play(tokenizer, "has_no_room")] == ["length"]
    assert [sample.finish_reason for sample in play(tokenizer, "ends_its_session")] == ["stop"]


def says_where(task):
    return {"reward": len(say(task, "a")), "here": "127.0.0.2" in task.base_url}


def test_agents_reach_the_endpoint_by_the_address_of_the_node(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (sample,) = play(tokenizer, "says_where", agent={"address": "node"})
    assert sample.reward_components == {"here": 1.0}


def test_no_proxy_is_asked_for_the_endpoint(tokenizer, monkeypatch):  # noqa: F811
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for known in ("no_proxy", "NO_PROXY"):
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(known, "example.org")
        assert len(play(tokenizer, "counts")) == 2
        assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,127.0.0.1,localhost"


def test_an_error_of_the_engine_ends_the_run_whatever_the_agent_does(tokenizer):  # noqa: F811
    """An agent that catches errors would otherwise train on what an engine with wrong weights says."""
    for name in ("raises", "catches"):
        with pytest.raises(RuntimeError, match="planted in the engine"):
            play(
                tokenizer,
                name,
                turns=[RuntimeError("planted in the engine"), "x<eos>"],
                on_failure="leave_out",
            )


def catches(task):
    with pytest.raises(openai.InternalServerError):
        say(task, "a")
    return float(len(say(task, "b")))

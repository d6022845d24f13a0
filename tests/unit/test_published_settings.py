"""Published environments without verifiers: settings, sessions under one key, and an incomplete account."""

import asyncio
import sys

import httpx
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.rollout import RolloutConfig, VerifiersConfig
from grpo_megatron.errors import UserError
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.published.server import settings_of
from grpo_megatron.rollout.published.tasks import must_have_task
from grpo_megatron.rollout.published.wire import AgentTrace, EpisodeFailed, _whole
from tests.unit.test_gateway import Model, served, tokenizer, user  # noqa: F401 - a fixture

GIVEN = ["model.path=m", "data.train=d.jsonl"]
HERE = f"rollout.verifiers.python={sys.executable}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["rollout.environment=verifiers:x", "rollout.verifiers.python=/no/bin/python"],
            "run `python -m venv",
        ),
        # The environment of the tests has another openai.
        (["rollout.environment=verifiers:x", HERE], "has no package verifiers"),
        ([HERE], "rollout.verifiers has an effect only with"),
        (
            ["rollout.environment=verifiers:x", HERE, "rollout.history=template"],
            "needs rollout.history=append",
        ),
        (["rollout.environment=verifiers:x", HERE, "data.chat_template=none"], "and a data.chat_template"),
        (["rollout.environment='verifiers:'", HERE], "must name a task set"),
        (["rollout.environment=verifiers:x", HERE, "reward.function=math"], "rewards the model itself"),
        (
            ["rollout.environment=verifiers:x", HERE, "rollout.verifiers.env={taskset: {id: y}}"],
            "has the task set 'y'",
        ),
        (
            ["rollout.environment=verifiers:x", HERE, "rollout.verifiers.env={agent: {harness: {id: null}}}"],
            'write "null" in quotes',
        ),
    ],
)
def test_settings_that_cannot_be_meant(overrides, says):
    with pytest.raises(UserError, match=says):
        load_config(None, [*GIVEN, *overrides])


def test_settings_of_the_server():
    verifiers = VerifiersConfig(env={"taskset": {"game": "Wordle-v0"}, "timeout": {"episode": 5}})
    rollout = RolloutConfig(environment="verifiers:owner/games@1", verifiers=verifiers, max_turns=3)
    assert settings_of(rollout, address="ipc:///a") == (
        '{"env": {"taskset": {"game": "Wordle-v0", "id": "owner/games@1"}, "timeout": {"episode": 5}}, '
        '"max_turns": 3, "address": "ipc:///a"}'
    )


def test_a_record_without_a_task_is_refused_when_data_is_loaded():
    must_have_task(Prompt(0, None, "", "", {"verifiers": {"idx": 0}}), "f:1")
    with pytest.raises(UserError, match=r"f:1 has no field 'verifiers'.*grpo-megatron tasks"):
        must_have_task(Prompt(0, None, "", ""), "f:1")


def test_a_client_with_one_key_for_all_sessions_reaches_only_those_that_it_has_named(tokenizer):  # noqa: F811
    async def main():
        async with served(tokenizer, Model(tokenizer, "one<eos>")) as (_, session, ticket, gateway):
            shared = gateway.shared

            async def ask(key, name):
                headers = {"authorization": f"Bearer {key}"} | ({"x-session-id": name} if name else {})
                async with httpx.AsyncClient(timeout=60) as client:
                    answer = await client.post(
                        f"{gateway.shared_url}/chat/completions",
                        json={"messages": [user("ask")]},
                        headers=headers,
                    )
                return answer.status_code

            early = asyncio.create_task(ask(shared.key, "trace"))  # before its name is known
            await asyncio.sleep(0.3)
            shared.name("trace", ticket.key)
            assert await early == 200
            assert await ask("wrong", "trace") == await ask(shared.key, None) == 401
            shared.forget(ticket.key)
            return session.trajectory.turns

    assert asyncio.run(main()) == 1


def test_an_account_with_a_gap_is_no_episode():
    trace = AgentTrace("a", {"ok": True}, counts={"nodes": 2, "calls": 1})
    reply = {"success": True, "head": {"ok": True}, "traces": [{"id": "a", "nodes": 2, "calls": 1}]}
    assert _whole(reply, {"a": trace}) == [trace]
    trace.counts["nodes"] = 1
    for traces in ({"a": trace}, {}):
        with pytest.raises(EpisodeFailed, match="incomplete"):
            _whole(reply, traces)
    with pytest.raises(EpisodeFailed, match="X: why"):
        _whole({"success": True, "head": {"ok": False, "errors": [{"type": "X", "message": "why"}]}}, {})
    with pytest.raises(EpisodeFailed, match="went wrong"):
        _whole({"success": False, "error": "went wrong"}, {})

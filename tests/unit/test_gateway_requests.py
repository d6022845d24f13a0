"""Unusual requests of OpenAI's clients: each is answered as its client expects, or refused with a reason."""

import asyncio

import httpx
import numpy as np
import openai
import pytest

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptTokenizer
from tests.unit.gateway_clients import ChatClient, MessagesClient
from tests.unit.test_gateway import (
    ADD,
    CALL,
    TOOL_FORGETFUL,
    Model,
    ask,
    served,
    tokenizer,  # noqa: F401 - a fixture
    user,
)
from tests.unit.test_gateway_protocols import PAIR, both
from tests.unit.test_trajectories import ids_of


def played(tokenizer, model, conversation, **options):  # noqa: F811
    """Return (what the model read for each turn, samples) of a session.

    conversation: async function that gets the official client and makes the requests.
    """

    async def main():
        async with served(tokenizer, model, **options) as (client, session, *_):
            await conversation(client)
            return session.trajectory.samples(session.finish_reason)

    samples = asyncio.run(main())
    return [tokenizer.decode_all(np.array(read)) for read, *_ in model.requests], samples


def said(text, **more):
    return {"role": "assistant", "content": text} | more


@pytest.mark.parametrize("knows", [False, True])
def test_instructions_of_a_developer_are_read(tmp_path, tokenizer, knows):  # noqa: F811
    """Templates such as Qwen3's leave out messages with the role developer, so the model never read them."""
    if knows:
        tokenizer.tokenizer.save_pretrained(tmp_path)
        path = tmp_path / "template.jinja"
        path.write_text(TOOL_FORGETFUL + "{# developer #}")
        tokenizer = PromptTokenizer(str(tmp_path), DataConfig(chat_template=str(path)))
    model = Model(tokenizer, "one<eos>", "two<eos>")
    begin = [{"role": "developer", "content": "be short"}, user("ask")]

    async def conversation(client):
        await ask(client, begin)
        await ask(client, [*begin, said("one"), {"role": "developer", "content": "now"}])

    role = "developer" if knows else "system"
    (first, second), (sample,) = played(tokenizer, model, conversation)
    assert first == f"<{role}>be short<user>ask<assistant>"
    assert second == f"{first}one<eos><{role}>now<assistant>"
    assert sample.turns == 2


def test_results_have_the_order_of_the_calls(tokenizer):  # noqa: F811
    """Tools may run at the same time. A template without ids tells by the order whose result is whose."""
    model = Model(tokenizer, f"{PAIR}<eos>", "done<eos>")

    async def conversation(client):
        first = (await ask(client, [user("ask")], tools=[ADD])).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(first.tool_calls, ("3", "7"), strict=True)
        ]
        await ask(client, [user("ask"), first.model_dump(exclude_none=True), *reversed(results)], tools=[ADD])

    (_, second), (sample,) = played(tokenizer, model, conversation)
    assert second.endswith("<tool>3<tool>7<assistant>")
    assert sample.turns == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {"content": message["content"].strip()},
        lambda message: {"name": "helper", "refusal": None, "annotations": []},
        lambda message: {"content": [{"type": "text", "text": message["content"]}]},
    ],
)
def test_a_turn_that_comes_back_in_another_form_is_continued(tokenizer, change):  # noqa: F811
    """Clients strip answers and add fields. Such histories were rendered again: each turn was a sample."""
    model = Model(tokenizer, " one\n\n<eos>", "two<eos>")

    async def conversation(client):
        message = (await ask(client, [user("ask")])).choices[0].message.model_dump(exclude_none=True)
        await ask(client, [user("ask"), message | change(message), user("b")])

    (_, second), (sample,) = played(tokenizer, model, conversation)
    assert second == "<user>ask<assistant> one\n\n<eos><user>b<assistant>"
    assert sample.turns == 2


def test_arguments_that_a_client_writes_anew_are_the_same(tokenizer):  # noqa: F811
    """A client in JavaScript that reads the arguments sends 1 for 1.0."""
    model = Model(tokenizer, CALL.replace('"a": 1', '"a": 1.0') + "<eos>", "two<eos>")

    async def conversation(client):
        message = (await ask(client, [user("ask")], tools=[ADD])).choices[0].message
        history = [user("ask"), message.model_dump(exclude_none=True)]
        history[1]["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        await ask(client, [*history, result], tools=[ADD])

    _, (sample,) = played(tokenizer, model, conversation)
    assert sample.turns == 2


def test_an_answer_without_a_word_may_come_back_as_null(tokenizer):  # noqa: F811
    model = Model(tokenizer, "<eos>", "two<eos>")

    async def conversation(client):
        assert (await ask(client, [user("ask")])).choices[0].message.content == ""
        await ask(client, [user("ask"), said(None), user("b")])

    _, (sample,) = played(tokenizer, model, conversation)
    assert sample.turns == 2


def test_ids_and_names_of_any_kind_continue_a_turn(tokenizer):  # noqa: F811
    """Some clients number their calls, and send names as objects. Both are told apart and never fail."""
    model = Model(tokenizer, "one<eos>", "two<eos>", "three<eos>", "four<eos>")

    def result(id):
        return {"role": "tool", "tool_call_id": id, "content": "3", "name": {"of": ["x"]}}

    async def conversation(client):
        for id in (["a"], ["b"]):
            message = (await ask(client, [user("ask"), result(id)])).choices[0].message.content
            await ask(client, [user("ask"), result(id), said(message), user("b")])

    texts, samples = played(tokenizer, model, conversation)
    assert [sample.turns for sample in samples] == [2, 2]
    assert texts[1].endswith("<tool>3<assistant>one<eos><user>b<assistant>")
    assert texts[3].endswith("<tool>3<assistant>three<eos><user>b<assistant>")


def test_each_answer_is_a_message_of_its_own(tokenizer):  # noqa: F811
    """Rule: after a message of the assistant, the model begins another one, whatever the session knows."""
    model = Model(tokenizer, "<think>1</think>one<eos>", "two<eos>", "three<eos>")

    async def conversation(client):
        await ask(client, [user("ask"), said("mine")])
        await ask(client, [user("ask"), said("mine"), said("one"), said("more")])
        await ask(client, [user("ask"), said("mine"), said("one")])

    (first, second, third), _ = played(tokenizer, model, conversation)
    assert first == "<user>ask<assistant>mine<eos><assistant>"
    assert second == f"{first}<think>1</think>one<eos><assistant>more<eos><assistant>"
    assert third == f"{first}<think>1</think>one<eos><assistant>"


@both
def test_a_stop_string_of_the_run_ends_the_message(tokenizer, protocol):  # noqa: F811
    """Agents send their own stop strings, and expect answers without them. Other stop strings are refused."""
    model = Model(tokenizer, "act\nResult:", "done<eos>")

    async def main():
        async with (
            served(tokenizer, model, stops=["Result:"]) as (_, session, ticket, gateway),
            protocol(gateway.url(ticket), ticket.key) as client,
        ):
            name = "stop" if protocol is ChatClient else "stop_sequences"
            with pytest.raises(protocol.errors.BadRequestError, match=r"add \['x'\] to rollout\.stop"):
                await client.ask([user("ask")], **{name: ["x"]})
            first = await client.ask([user("ask")], **{name: ["Result:"]})
            assert (first.text, first.reason) == (
                "act\n",
                "stop" if protocol is ChatClient else "stop_sequence",
            )
            await client.ask([user("ask"), first.message, user("3")], **{name: ["Result:"]})
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert tokenizer.decode_all(sample.arrays.response_ids) == (
        "act\nResult:<eos><user>3<assistant>done<eos>"
    )
    assert sample.turns == 2


def test_logprobs_are_those_of_the_sampled_tokens(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")

    async def conversation(client):
        answer = await ask(client, [user("ask")], logprobs=True, top_logprobs=0)
        stream = await ask(client, [user("ask")], logprobs=True, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        for choice in (answer.choices[0], chunks[0]):
            content = choice.logprobs.content
            assert [one.token for one in content] == ["o", "n", "e", "<eos>"]
            assert [one.logprob for one in content] == model.requests[0][2].tolist()
        assert chunks[1].logprobs is None
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await ask(client, [user("b")], logprobs=True, top_logprobs=2)

    played(tokenizer, model, conversation)


def test_a_stream_has_the_token_ids_that_are_asked_for(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")

    async def conversation(client):
        stream = await ask(client, [user("ask")], stream=True, extra_body={"return_token_ids": True})
        first, last = [chunk async for chunk in stream]
        assert first.model_extra["prompt_token_ids"] == ids_of(tokenizer, "<user>ask<assistant>")
        assert first.choices[0].model_extra["token_ids"] == ids_of(tokenizer, "one<eos>")
        assert (last.model_extra, last.choices[0].model_extra) == ({}, {})

    played(tokenizer, model, conversation)


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
WRONG = [
    ({"messages": []}, "messages"),
    ({"messages": [user(IMAGE)]}, "image_url"),
    ({"messages": [user(None)]}, "no content"),
    ({"messages": [{"role": "function", "name": "add", "content": "3"}]}, "role 'function'"),
    ({"messages": "ask"}, "messages"),
    ({"n": 2, "stream": True}, "Idempotency-Key"),
    ({"tools": [{"type": "web_search"}]}, "not a function"),
    ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"functions": [{"name": "add"}]}, "use tools"),
    ({"response_format": {"type": "json_object"}}, "only text"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "data.chat_template_args"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


def test_what_the_gateway_cannot_do_is_refused(tokenizer):  # noqa: F811
    """Rule: the reason names the field, and nothing that would change the answer is left out in silence."""

    async def main():
        async with (
            served(tokenizer, Model(tokenizer)) as (_, session, ticket, gateway),
            httpx.AsyncClient(headers={"x-api-key": ticket.key}) as client,
        ):
            for change, says in WRONG:
                answer = await client.post(
                    f"{gateway.url(ticket)}/chat/completions", json=ChatClient.body("ask") | change
                )
                assert (answer.status_code, says in answer.text) == (400, True), answer.text
                assert "pydantic" not in answer.text
            answer = await client.post(f"{gateway.url(ticket)}/responses", json={"input": "ask"})
            assert (answer.status_code, "/v1/chat/completions" in answer.text) == (404, True)
            assert session.trajectory.turns == 0

    asyncio.run(main())


def test_fields_that_change_nothing_are_accepted(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")

    async def conversation(client):
        await ask(
            client,
            [user("ask")],
            n=1,
            stop=[],
            temperature=0.1,
            seed=3,
            user="me",
            store=False,
            metadata={"a": "b"},
            max_completion_tokens=50,
            response_format={"type": "text"},
            parallel_tool_calls=True,
            tool_choice="auto",
            extra_body={"chat_template_kwargs": {}, "functions": None},
        )

    played(tokenizer, model, conversation)


@pytest.mark.parametrize("known", [False, True])
def test_tokens_are_counted_as_the_engine_will_read_them(tokenizer, known):  # noqa: F811
    """Rule: the count includes the thinking that a known turn brings, and adds no turn."""
    model = Model(tokenizer, "<think>hm</think>one<eos>", "two<eos>")
    history = [user("ask"), said("one"), user("b")]

    async def main():
        async with (
            served(tokenizer, model) as (_, session, ticket, gateway),
            MessagesClient(gateway.url(ticket), ticket.key) as client,
        ):
            messages = client.client.messages
            if known:
                await client.ask(history[:1])
            counted = await messages.count_tokens(
                model="m", messages=history, system="s" if not known else ""
            )
            turns = session.trajectory.turns
            if known:
                await client.ask(history)
            return counted.input_tokens, turns, session.trajectory.turns

    counted, before, after = asyncio.run(main())
    if known:
        assert (counted, before, after) == (len(model.requests[1][0]), 1, 2)
    else:
        text = "<system>s<user>ask<assistant>one<eos><user>b<assistant>"
        assert (counted, before, after) == (len(ids_of(tokenizer, text)), 0, 0)


def test_a_call_with_half_of_a_character_stays_in_the_text(tokenizer):  # noqa: F811
    """JSON can say what no text can have. The answer could not be sent, but its turn was trained."""
    broken = CALL.replace('"a": 1', '"a": "\\ud83d"')
    model = Model(tokenizer, f"{broken}<eos>")

    async def conversation(client):
        message = (await ask(client, [user("ask")], tools=[ADD])).choices[0].message
        assert (message.content, message.tool_calls) == (broken, None)

    _, (sample,) = played(tokenizer, model, conversation)
    assert sample.turns == 1

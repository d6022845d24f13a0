"""Anthropic's messages at the gateway, with the official client: what differs from OpenAI's protocol."""

import asyncio
import json

import anthropic
import httpx
import numpy as np
import pytest

from tests.unit.gateway_clients import ChatClient, MessagesClient
from tests.unit.test_gateway import CALL, Model, served, tokenizer, user  # noqa: F401 - a fixture
from tests.unit.test_gateway_protocols import talking, wrote
from tests.unit.test_trajectories import ids_of

ADD = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}


@pytest.mark.parametrize("kept", [True, False])
def test_thinking_may_come_back_or_not(tokenizer, kept):  # noqa: F811
    """Rule: a history continues its turn, whether or not the client sends the blocks of thinking back."""
    model = Model(tokenizer, f"<think>hm</think>so {CALL}<eos>", "<think>3</think>three<eos>", "bye<eos>")
    system = [{"type": "text", "text": "be "}, {"type": "text", "text": "short"}]

    async def main():
        async with talking(tokenizer, MessagesClient, model) as (said, session, _, _):
            client, history = said.client, [user("ask")]
            for _ in range(3):
                done = await client.messages.create(
                    model="m", max_tokens=99, messages=history, system=system, tools=[ADD]
                )
                assert (done.type, done.role, done.model) == ("message", "assistant", "m")
                wanted = len(model.requests[-1][0]), len(model.requests[-1][1])
                assert (done.usage.input_tokens, done.usage.output_tokens) == wanted
                blocks = [block for block in done.content if kept or block.type != "thinking"]
                history.append({"role": "assistant", "content": blocks})
                calls = [block.id for block in done.content if block.type == "tool_use"]
                result = {"type": "tool_result", "content": [{"type": "text", "text": "3"}]}
                history.append(
                    {"role": "user", "content": [result | {"tool_use_id": one} for one in calls] or "b"}
                )
            return done, session.trajectory.samples("stop")

    done, (sample,) = asyncio.run(main())
    assert (done.stop_reason, [block.text for block in done.content]) == ("end_turn", ["bye"])
    assert tokenizer.decode_all(sample.arrays.prompt_ids) == "(add)<system>be short<user>ask<assistant>"
    assert wrote(tokenizer, sample) == [
        (f"<think>hm</think>so {CALL}<eos>", True),
        ("<tool>3<assistant>", False),
        ("<think>3</think>three<eos>", True),
        ("<user>b<assistant>", False),
        ("bye<eos>", True),
    ]


def test_a_stream_adds_up_to_the_message(tokenizer):  # noqa: F811
    model = Model(tokenizer, f"<think>hm</think>so {CALL}<eos>", "two<eos>")
    asked = {"model": "m", "max_tokens": 99, "messages": [user("ask")], "tools": [ADD]}

    async def main():
        async with talking(tokenizer, MessagesClient, model) as (said, session, _, _):
            whole = await said.client.messages.create(**asked)
            async with said.client.messages.stream(**asked) as stream:
                kinds = [event.type async for event in stream]
                added = await stream.get_final_message()
            raw = await said.client.messages.create(**asked, stream=True)
            names = [event.type async for event in raw]
            assert (names[0], names[-1]) == ("message_start", "message_stop")
            assert session.trajectory.turns == 1
            return whole, added, kinds

    whole, added, kinds = asyncio.run(main())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    kept = {"content", "stop_reason", "usage"}
    assert added.model_dump(include=kept) == whole.model_dump(include=kept)
    assert whole.content[2].input == {"a": 1, "b": 2}
    assert {"thinking", "signature", "text", "input_json"} <= set(kinds)


def test_the_client_without_asyncio(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>", "two<eos>")

    def talk(url, key):
        # A key as a bearer, at the address without the session's id.
        with anthropic.Anthropic(base_url=url.partition("/sessions")[0], auth_token=key) as client:
            done = client.messages.create(model="m", max_tokens=9, messages=[user("ask")])
            history = [user("ask"), {"role": "assistant", "content": done.content}, user("b")]
            with client.messages.stream(model="m", max_tokens=9, messages=history) as stream:
                return done.content[0].text, "".join(stream.text_stream)

    async def main():
        async with served(tokenizer, model) as (_, session, ticket, gateway):
            said = await asyncio.to_thread(talk, gateway.url(ticket), ticket.key)
            return said, session.trajectory.samples("stop")

    said, (sample,) = asyncio.run(main())
    assert (said, sample.turns) == (("one", "two"), 2)


def test_a_conversation_may_change_its_protocol(tokenizer):  # noqa: F811
    """Rule: what one client began, a client of the other protocol continues in the same path."""
    model = Model(tokenizer, f"<think>hm</think>so {CALL}<eos>", "three<eos>", "bye<eos>")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def main():
        async with (
            talking(tokenizer, ChatClient, model) as (chat, session, ticket, gateway),
            MessagesClient(gateway.url(ticket), ticket.key) as messages,
        ):
            first = await chat.ask([user("ask")], tools=[tool])
            [(call_id, name, arguments)] = first.calls
            use = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
            history = [
                user("ask"),
                {"role": "assistant", "content": [{"type": "text", "text": first.text}, use]},
                *messages.results({call_id: "3"}),
            ]
            second = await messages.ask(history, tools=[messages.tool("add")])
            history = [user("ask"), first.message, *chat.results({call_id: "3"})]
            said = {"role": "assistant", "content": second.text}
            await chat.ask([*history, said, user("b")], tools=[tool])
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert [text for text, is_trained in wrote(tokenizer, sample) if not is_trained] == [
        "<tool>3<assistant>",
        "<user>b<assistant>",
    ]


WRONG = [
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": ["x"]}, "rollout.stop"),
    ({"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "input_schema"),
    ({"messages": [user("a"), {"role": "assistant", "content": "I"}]}, "prefilled"),
    ({"messages": [user([{"type": "image", "source": {}}])]}, "image"),
    ({"messages": [user([{"type": "thinking", "thinking": "a"}])]}, "thinking"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "input"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "only text"),
]


def test_what_the_gateway_cannot_do_is_refused(tokenizer):  # noqa: F811
    async def main():
        async with (
            served(tokenizer, Model(tokenizer)) as (_, session, ticket, gateway),
            httpx.AsyncClient(headers={"x-api-key": ticket.key}) as client,
        ):
            url = f"http://127.0.0.1:{gateway.port}/v1/messages"
            for change, says in WRONG:
                answer = await client.post(url, json=MessagesClient.body("ask") | change)
                body = answer.json()
                assert (answer.status_code, body["type"]) == (400, "error"), change
                assert body["error"]["type"] == "invalid_request_error"
                assert says in body["error"]["message"], body
            answer = await client.post(url, content=b"{")
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
            answer = await client.get(f"{url}/nothing")
            assert answer.status_code == 404
            assert session.trajectory.turns == 0

    asyncio.run(main())


def test_a_tool_choice_of_none_hides_the_tools(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")

    async def main():
        async with talking(tokenizer, MessagesClient, model) as (client, _, _, _):
            mark = {"cache_control": {"type": "ephemeral"}}
            await client.ask([user("ask")], tools=[ADD | mark], tool_choice={"type": "none"})

    asyncio.run(main())
    assert tokenizer.decode_all(np.array(model.requests[0][0])) == "<user>ask<assistant>"


def test_the_events_of_a_stream_have_names(tokenizer):  # noqa: F811
    """Rule: each event has a name and a type, as clients other than the official one read them."""

    async def main():
        async with (
            served(tokenizer, Model(tokenizer, "one<eos>")) as (_, _, ticket, gateway),
            httpx.AsyncClient(headers={"x-api-key": ticket.key}) as client,
        ):
            url = f"{gateway.url(ticket)}/messages"
            return (await client.post(url, json=MessagesClient.body("ask", stream=True))).text

    events = [event.split("\n") for event in asyncio.run(main()).split("\n\n") if event]
    names = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(data.removeprefix("data: ")) for _, data in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, "message_delta", "message_stop"]
    assert [each["type"] for each in data] == names
    assert (data[0]["message"]["content"], data[0]["message"]["stop_reason"]) == ([], None)
    assert data[2]["delta"] == {"type": "text_delta", "text": "one"}
    assert data[4]["delta"]["stop_reason"] == "end_turn"


def test_the_number_of_tokens_is_that_of_the_engine(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")

    async def main():
        async with (
            talking(tokenizer, MessagesClient, model) as (said, _, _, _),
            said.client.messages.stream(model="m", max_tokens=9, messages=[user("ask")]) as stream,
        ):
            return (await stream.get_final_message()).usage

    usage = asyncio.run(main())
    read, written = ids_of(tokenizer, "<user>ask<assistant>"), ids_of(tokenizer, "one<eos>")
    assert (usage.input_tokens, usage.output_tokens) == (len(read), len(written))

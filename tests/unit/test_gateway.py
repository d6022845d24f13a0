"""The gateway with the official client of OpenAI: what the model read and wrote is exact to the token."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import openai
import pytest

from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.gateway.server import Gateway
from grpo_megatron.rollout.gateway.session import AgentSession
from grpo_megatron.rollout.trajectory import Episode
from tests.unit.test_trajectories import FORGETFUL, Writer, ids_of, prompt_of

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
TOOL_FORGETFUL = FORGETFUL.replace("tool.name", "tool.function.name")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer("bytes").save_pretrained(folder)
    (folder / "template.jinja").write_text(TOOL_FORGETFUL)
    return PromptTokenizer(str(folder), DataConfig(chat_template=str(folder / "template.jinja")))


class Model(Writer):
    """Writes given turns, each after the time in `seconds`, or fails with the error in their place."""

    def __init__(self, tokenizer, *turns, seconds=0.0):
        super().__init__([turn if isinstance(turn, Exception) else ids_of(tokenizer, turn) for turn in turns])
        self.seconds, self.cancelled = seconds, 0

    async def __call__(self, ids, most, routed=0, part=0):
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.turns[0], Exception):
            raise self.turns.pop(0)
        return await super().__call__(ids, most, routed)


@asynccontextmanager
async def served(tokenizer, model, limit=400, max_turns=8, stops=()):
    """Yield (official client, session, ticket, gateway)."""
    gateway = Gateway()
    await gateway.start()
    episode = Episode(prompt_of(tokenizer), 3, 0, limit, (0, 0))
    session = AgentSession(episode, tokenizer, model, max_turns, stops)
    ticket = gateway.open(session)
    client = openai.AsyncOpenAI(base_url=gateway.url(ticket), api_key=ticket.key, max_retries=0)
    try:
        yield client, session, ticket, gateway
    finally:
        await client.close()
        await gateway.close(ticket)
        await gateway.stop()


def ask(client, messages, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


def tokens_of(sample):
    return [*sample.arrays.prompt_ids.tolist(), *sample.arrays.response_ids.tolist()]


def test_a_tool_turn_is_appended_to_what_the_model_wrote(tokenizer):
    """Another stack rendered the history again, without what was thought: each turn became a sample."""
    model = Model(tokenizer, f"<think>hm</think>so {CALL}<eos>", "<think>3</think>it is 3<eos>")

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            first = await ask(client, [user("ask")], tools=[ADD])
            message = first.choices[0].message
            assert first.choices[0].finish_reason == "tool_calls"
            assert message.content == "so"  # what stands before a call is kept
            assert message.tool_calls[0].function.name == "add"
            assert message.model_extra["reasoning_content"] == "hm"
            history = [user("ask"), message.model_dump(exclude={"reasoning_content"}, exclude_none=True)]
            answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
            second = await ask(client, [*history, answer], tools=[ADD])
            assert second.choices[0].message.content == "it is 3"
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    read = "(add)<user>ask<assistant>"
    assert tokenizer.decode_all(sample.arrays.prompt_ids) == read
    wrote = f"<think>hm</think>so {CALL}<eos>", "<tool>3<assistant>", "<think>3</think>it is 3<eos>"
    assert tokenizer.decode_all(sample.arrays.response_ids) == "".join(wrote)
    lengths = [len(ids_of(tokenizer, part)) for part in wrote]
    mask = [True] * lengths[0] + [False] * lengths[1] + [True] * lengths[2]
    assert sample.arrays.loss_mask.tolist() == mask


def test_a_stream_has_the_same_turn_as_an_answer(tokenizer):
    """Another stack answered JSON to a client that wanted a stream, which took it for an empty response."""
    model = Model(tokenizer, f"a{CALL}<eos>")

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            stream = await ask(
                client, [user("ask")], tools=[ADD], stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "a"
            calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
            assert [call.function.name for call in calls] == ["add"]
            assert chunks[-1].usage.completion_tokens == len(model.requests[0][1])
            again = await ask(client, [user("ask")], tools=[ADD])  # the same request in another form
            assert again.choices[0].message.tool_calls[0].id == calls[0].id
            return session.trajectory.samples("stop")

    assert len(asyncio.run(main())) == len(model.requests) == 1


def test_histories_that_differ_are_branches(tokenizer):
    model = Model(tokenizer, "one<eos>", "two<eos>", "three<eos>")

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            await ask(client, [user("ask")])
            one = {"role": "assistant", "content": "one"}
            await ask(client, [user("ask"), one, user("b")])
            await ask(client, [user("ask"), {"role": "assistant", "content": "edited"}, user("b")])
            return session.trajectory.samples("stop")

    first, second = asyncio.run(main())
    assert tokenizer.decode_all(np.array(tokens_of(first))) == (
        "<user>ask<assistant>one<eos><user>b<assistant>two<eos>"
    )
    assert tokenizer.decode_all(np.array(tokens_of(second))) == (
        "<user>ask<assistant>edited<eos><user>b<assistant>three<eos>"
    )
    assert (first.turns, second.turns) == (2, 1)
    assert tokenizer.decode_all(second.arrays.response_ids) == "three<eos>"


def test_retries_get_the_first_answer_and_failures_leave_nothing(tokenizer):
    """Another stack trained a retried request twice, and a failed one as an empty response."""
    model = Model(tokenizer, RuntimeError("planted"), "one<eos>", "two<eos>", seconds=0.05)

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            with pytest.raises(openai.InternalServerError):
                await ask(client, [user("ask")])
            assert session.trajectory.samples("stop") == ()
            asked = [ask(client, [user("ask")]) for _ in range(3)]  # two of them while the first runs
            found = await asyncio.gather(*asked)
            assert {answer.choices[0].message.content for answer in found} == {"one"}
            headers = {"Idempotency-Key": "7"}
            other = [await ask(client, [user("b")], extra_headers=headers) for _ in range(2)]
            assert {answer.choices[0].message.content for answer in other} == {"two"}
            return session.trajectory.samples("stop")

    assert [sample.turns for sample in asyncio.run(main())] == [1, 1]
    assert len(model.requests) == 2


def test_a_client_that_goes_away_ends_its_request_and_leaves_no_node(tokenizer):
    model = Model(tokenizer, "never<eos>", seconds=60)

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            with pytest.raises(openai.APITimeoutError):
                await ask(client.with_options(timeout=0.3), [user("ask")])
            for _ in range(100):
                if model.cancelled:
                    break
                await asyncio.sleep(0.05)
            assert (model.cancelled, session.trajectory.samples("stop"), session._answers) == (1, (), {})

    asyncio.run(main())


def test_a_turn_that_is_cut_in_its_thinking_is_the_last_of_its_path(tokenizer):
    model = Model(tokenizer, "<think>for long", "b<eos>")

    async def main():
        async with served(tokenizer, model) as (client, session, _, _):
            first = await ask(client, [user("ask")], max_tokens=12)
            assert first.choices[0].finish_reason == "length"
            assert first.choices[0].message.content == ""
            said = first.choices[0].message.model_dump(exclude_none=True)
            await ask(client, [user("ask"), said, user("go on")])
            return session.trajectory.samples("stop")

    first, second = asyncio.run(main())
    assert len(tokens_of(first)) == len(prompt_of(tokenizer).ids) + 12
    assert second.turns == 1


def test_limits_are_said_in_the_words_of_the_api(tokenizer):
    model = Model(tokenizer, "one<eos>")

    async def main():
        async with served(tokenizer, model, limit=30, max_turns=1) as (client, _, _, _):
            with pytest.raises(openai.BadRequestError, match="leaves none") as caught:
                await ask(client, [user("x" * 60)])
            assert caught.value.code == "context_length_exceeded"
            for wrong in ({"n": 2}, {"stop": "x"}, {"tool_choice": "required"}):
                with pytest.raises(openai.BadRequestError):
                    await ask(client, [user("a")], **wrong)
            with pytest.raises(openai.BadRequestError, match="has no role"):
                await ask(client, [{"content": "a"}])
            await ask(client, [user("a")])
            with pytest.raises(openai.BadRequestError, match="max_turns=1"):
                await ask(client, [user("b")])

    asyncio.run(main())
    assert len(model.requests) == 1


def test_only_the_key_of_a_session_opens_it(tokenizer):
    async def main():
        async with served(tokenizer, Model(tokenizer)) as (client, _, ticket, gateway):
            other = gateway.open(
                AgentSession(Episode(prompt_of(tokenizer), 3, 1, 9, (0, 0)), tokenizer, Model(tokenizer), 8)
            )
            for key in ("", "wrong", other.key):
                with pytest.raises(openai.AuthenticationError):
                    await ask(client.with_options(api_key=key or "none"), [user("a")])
                with pytest.raises(openai.AuthenticationError):
                    await client.with_options(api_key=key or "none").models.list()
            assert [model.id async for model in client.models.list()] == ["policy"]
            plain = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key=ticket.key)
            assert [model.id async for model in plain.models.list()] == ["policy"]
            done = await client.post(
                f"http://127.0.0.1:{gateway.port}/sessions/{ticket.id}/complete",
                body={"reward": 1.0},
                cast_to=object,
            )
            assert (done["turns"], ticket.ended.result()) == (0, {"reward": 1.0})
            await gateway.close(other)

    asyncio.run(main())

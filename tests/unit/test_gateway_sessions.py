"""Sessions of the gateway: their end, requests that come twice, and turns that cannot be read."""

import asyncio
import socket

import httpx
import openai
import pytest

from grpo_megatron.errors import UserError
from grpo_megatron.rollout.gateway.server import Gateway
from grpo_megatron.rollout.gateway.session import AgentSession, RequestRefused
from grpo_megatron.rollout.trajectory import Episode, Trajectory
from tests.unit.test_gateway import ADD, Model, ask, served, tokenizer, user  # noqa: F401 - a fixture
from tests.unit.test_gateway_tokens import tokenizer as qwen3  # noqa: F401 - a fixture
from tests.unit.test_trajectories import Writer, ids_of, prompt_of


def session_of(tokenizer, model, **limits):  # noqa: F811
    episode = Episode(prompt_of(tokenizer), 3, 0, limits.pop("limit", 400), (0, 0))
    return AgentSession(episode, tokenizer, model, **({"max_turns": 8} | limits))


def test_a_client_that_leaves_when_its_answer_is_complete_gets_it_again(tokenizer):  # noqa: F811
    """Rule: a turn that is in the trajectory answers all requests that ask for it.

    Bug: the client left in the moment in which its answer was complete. The answer was dropped, but not its
    turn, so that the retried request was trained twice.
    """
    model = Model(tokenizer, "one<eos>", "two<eos>")

    async def main():
        session = session_of(tokenizer, model)
        asked = asyncio.create_task(session.chat("key", [user("ask")]))
        while not session.trajectory.turns:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        again = await session.chat("key", [user("ask")])
        return again.message["content"], session.trajectory.turns

    assert asyncio.run(main()) == ("one", 1)


def test_a_turn_follows_what_was_known_when_the_engine_was_asked(tokenizer):  # noqa: F811
    """Rule: a turn has the experts of exactly those tokens that its request left open.

    Bug: a turn was added after another one that had been completed meanwhile and has the same tokens. Its
    path had the experts of these tokens twice.
    """
    writer = Writer([ids_of(tokenizer, "one<eos>"), ids_of(tokenizer, "two<eos>")])

    async def main():
        trajectory = Trajectory(Episode(prompt_of(tokenizer), 3, 0, 400, (0, 0)))
        first = trajectory.ids
        second = [*first, *ids_of(tokenizer, "one<eos><user>b<assistant>")]
        asked = [(ids, trajectory.known(ids)) for ids in (first, second)]
        for ids, known in asked:
            trajectory.add(ids, await writer(ids, 99, routed=known.routed), known)
        return trajectory.samples("stop")

    for sample in asyncio.run(main()):
        assert len(sample.arrays.routing) == len(sample.arrays.prompt_ids) + len(sample.arrays.response_ids)


def test_the_end_of_a_session_is_final(tokenizer):  # noqa: F811
    """Rule: after /complete, no turn is added to what the reward is for. A request twice does no harm.

    Bug: the session went on, and a second reward was dropped without a word.
    """
    model = Model(tokenizer, "one<eos>", "never<eos>", "two<eos>")

    async def main():
        async with (
            served(tokenizer, model) as (client, session, ticket, gateway),
            httpx.AsyncClient(headers={"x-api-key": ticket.key}) as plain,
        ):

            async def complete(**body):
                return (await plain.post(f"{gateway.url(ticket)}/complete", json=body)).status_code

            await ask(client, [user("ask")])
            model.seconds = 60
            late = asyncio.create_task(ask(client, [user("b")]))
            while not session._writing:
                await asyncio.sleep(0.01)
            wrong = [
                {},
                {"reward": "much"},
                {"reward": True},
                {"leave_out": False},
                {"failed": 1, "reward": 1},
            ]
            assert [await complete(**body) for body in wrong] == [400] * len(wrong)
            assert [await complete(reward=0.5, steps=3) for _ in range(2)] == [200, 200]
            assert await complete(reward=1) == 409
            assert ticket.ended.result() == {"reward": 0.5, "steps": 3}
            for asked in (late, ask(client, [user("c")])):
                with pytest.raises(openai.APIStatusError, match="the session has ended") as caught:
                    await asked
                assert caught.value.status_code == 410
            assert (await ask(client, [user("ask")])).choices[0].message.content == "one"  # sent again
            return session.trajectory.turns

    assert asyncio.run(main()) == 1
    assert model.cancelled == 1


def test_a_request_that_arrives_after_the_end_asks_no_engine(tokenizer):  # noqa: F811
    """Its body may have been on the way when the agent returned."""

    async def main():
        session = session_of(tokenizer, Model(tokenizer, "never<eos>"))
        await session.close()
        with pytest.raises(RequestRefused, match="the session has ended"):
            await session.chat("key", [user("ask")])
        return session.trajectory.turns

    assert asyncio.run(main()) == 0


def test_a_key_of_another_request_is_refused(tokenizer):  # noqa: F811
    """Rule: a header Idempotency-Key names one request. Another request with it got the first answer."""
    model = Model(tokenizer, "one<eos>", "two<eos>")

    async def main():
        async with served(tokenizer, model) as (client, session, *_):
            for _ in range(2):
                answer = await ask(client, [user("a")], extra_headers={"Idempotency-Key": "1"})
                assert answer.choices[0].message.content == "one"
            with pytest.raises(openai.UnprocessableEntityError, match="belongs to another request"):
                await ask(client, [user("b")], extra_headers={"Idempotency-Key": "1"})
            another = await ask(client, [user("a")], extra_headers={"Idempotency-Key": "2"})
            assert another.choices[0].message.content == "two"
            return session.trajectory.turns

    assert asyncio.run(main()) == 2


def test_the_trajectory_ends_as_the_last_request(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>", "two and more", "three and more", "four<eos>")

    async def main():
        session, found = session_of(tokenizer, model, limit=60, max_turns=4), []
        room = session.trajectory.room
        for text, limit in (("a", None), ("b", 3), ("x" * 100, None), ("y" * (room - 6), None), ("c", None)):
            try:
                await session.chat(text, [user(text)], max_tokens=limit)
            except RequestRefused as error:
                found.append(error.code)
            found.append(session.finish_reason)
        with pytest.raises(RequestRefused) as caught:
            await session.chat("d", [user("d")])
        return found, caught.value.code, session.finish_reason

    found, code, last = asyncio.run(main())
    # The second turn is as long as its client wanted; the fourth request leaves no room for its turn.
    assert found == ["stop", "stop", "context_length_exceeded", "length", "length", "stop"]
    assert (code, last) == ("max_turns_exceeded", "max_turns")


DEEP = "<tool_call>" + "[" * 3000


def test_a_turn_that_a_renderer_cannot_read_is_text(qwen3):  # noqa: F811
    """A model that repeats itself writes what no parser can read. The request failed, its turn stayed."""
    assert qwen3.turn_format.renderer
    model = Model(qwen3, f"{DEEP}<|im_end|>", "two<|im_end|>")

    async def main():
        async with served(qwen3, model, limit=8000) as (client, session, *_):
            message = (await ask(client, [user("ask")], tools=[ADD])).choices[0].message
            assert (message.content, message.tool_calls) == (DEEP, None)
            await ask(client, [user("ask"), message.model_dump(exclude_none=True), user("b")], tools=[ADD])
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert sample.turns == 2


@pytest.mark.parametrize("address", ["127.0.0.2", "::1"])
def test_the_gateway_listens_where_it_is_told(tokenizer, address):  # noqa: F811
    """Rule: it listens on one address, which is in the URL that agents get."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        pytest.skip(f"this machine has no {address}")

    async def main():
        gateway = Gateway(address=address)
        await gateway.start()
        ticket = gateway.open(session_of(tokenizer, Model(tokenizer, "one<eos>")))
        async with openai.AsyncOpenAI(base_url=gateway.url(ticket), api_key=ticket.key) as client:
            assert (await ask(client, [user("ask")])).choices[0].message.content == "one"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", gateway.port))
        await gateway.stop()

    asyncio.run(main())


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1 .* rollout\.agent\.address"):
        asyncio.run(Gateway(address="192.0.2.1").start())

"""OpenAI's and Anthropic's official clients at the gateway: the same rules hold for both."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from grpo_megatron.rollout.gateway.server import Gateway
from grpo_megatron.rollout.gateway.session import AgentSession
from grpo_megatron.rollout.trajectory import Episode
from tests.unit.gateway_clients import ChatClient, MessagesClient
from tests.unit.test_gateway import (
    CALL,
    Model,
    served,
    tokenizer,  # noqa: F401 - a fixture
    tokens_of,
    user,
)
from tests.unit.test_trajectories import ids_of, prompt_of

both = pytest.mark.parametrize("protocol", [ChatClient, MessagesClient])
PAIR = CALL + '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'


@asynccontextmanager
async def talking(tokenizer, protocol, model, max_turns=8, **options):  # noqa: F811
    """Yield (client, session, ticket, gateway). options: of the official client."""
    async with (
        served(tokenizer, model, max_turns=max_turns) as (_, session, ticket, gateway),
        protocol(gateway.url(ticket), ticket.key, **options) as client,
    ):
        yield client, session, ticket, gateway


def wrote(tokenizer, sample):  # noqa: F811
    """Return [(text, True if it is trained)] of consecutive parts of a sample."""
    ids, mask = sample.arrays.response_ids, sample.arrays.loss_mask
    parts, begin = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[begin]:
            parts.append((tokenizer.decode_all(ids[begin:end]), bool(mask[begin])))
            begin = end
    return parts


@both
@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_are_answered_in_one_path(tokenizer, protocol, stream):  # noqa: F811
    """Rule: a tool turn is appended to the tokens that the model wrote, thinking and text before it included.

    Bugs: the history is rendered anew, and the parser of calls drops the text before them.
    """
    model = Model(tokenizer, f"<think>hm</think>so {PAIR}<eos>", "<think>3</think>it is 3 and 7<eos>")

    async def main():
        async with talking(tokenizer, protocol, model) as (client, session, _, _):
            tools = [protocol.tool("add")]
            first = await client.ask([user("ask")], stream, tools=tools)
            assert (first.text, first.reason) == ("so", protocol.tool_reason)
            assert [call[1:] for call in first.calls] == [
                ("add", {"a": 1, "b": 2}),
                ("add", {"a": 3, "b": 4}),
            ]
            results = protocol.results({call[0]: text for call, text in zip(first.calls, "37")})
            second = await client.ask([user("ask"), first.message, *results], stream, tools=tools)
            assert second.text == "it is 3 and 7"
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert wrote(tokenizer, sample) == [
        (f"<think>hm</think>so {PAIR}<eos>", True),
        ("<tool>3<tool>7<assistant>", False),
        ("<think>3</think>it is 3 and 7<eos>", True),
    ]


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gets_the_form_that_it_asked_for(tokenizer, protocol, stream):  # noqa: F811
    """Rule: a client that asks for a stream gets events, and any other client gets JSON.

    Bug: JSON is answered to a client that reads events, which finds none and takes the turn for empty.
    """

    async def main():
        model = Model(tokenizer, "one<eos>")
        async with talking(tokenizer, protocol, model) as (client, session, ticket, gateway):
            url = f"http://127.0.0.1:{gateway.port}{protocol.path}"
            async with httpx.AsyncClient(headers={"x-api-key": ticket.key}) as plain:
                answer = await plain.post(url, json=protocol.body("ask", stream=stream))
            kind = "text/event-stream" if stream else "application/json"
            assert answer.headers["content-type"].partition(";")[0] == kind
            assert (await client.ask([user("ask")], stream)).text == "one"
            assert session.trajectory.turns == 1  # the form of the answer does not matter

    asyncio.run(main())


@both
def test_an_edited_history_is_a_branch(tokenizer, protocol):  # noqa: F811
    model = Model(tokenizer, "one<eos>", "two<eos>", "three<eos>")

    async def main():
        async with talking(tokenizer, protocol, model) as (client, session, _, _):
            first = await client.ask([user("ask")])
            await client.ask([user("ask"), first.message, user("b")])
            edited = {"role": "assistant", "content": "edited"}
            await client.ask([user("ask"), edited, user("b")])
            return session.trajectory.samples("stop")

    first, second = asyncio.run(main())
    assert tokens_of(first) == ids_of(tokenizer, "<user>ask<assistant>one<eos><user>b<assistant>two<eos>")
    assert tokens_of(second) == ids_of(
        tokenizer, "<user>ask<assistant>edited<eos><user>b<assistant>three<eos>"
    )
    assert wrote(tokenizer, second) == [("three<eos>", True)]


class LosesAnswers:
    """A transport of a client that loses the first answer after the server has sent it."""

    def __init__(self, package):
        self.package, self.lost = package, 0

    def transport(self):
        package, losses = self.package, self

        class Transport(package.AsyncHTTPTransport):
            async def handle_async_request(self, request):
                answer = await super().handle_async_request(request)
                if not losses.lost:
                    await answer.aread()
                    losses.lost += 1
                    raise package.ReadError("planted")
                return answer

        return Transport()


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_retries_gets_the_first_answer(tokenizer, protocol, stream):  # noqa: F811
    """Rule: a request that is sent again gets the first answer.

    Bug: a request that the client retries is trained twice.
    """
    model = Model(tokenizer, "one<eos>", "two<eos>")
    losses = LosesAnswers(protocol.httpx)

    async def main():
        async with (
            served(tokenizer, model) as (_, session, ticket, gateway),
            protocol.httpx.AsyncClient(transport=losses.transport()) as http,
        ):
            client = protocol(gateway.url(ticket), ticket.key, max_retries=2, http_client=http)
            said = await client.ask([user("ask")], stream)
            assert (said.text, losses.lost) == ("one", 1)
            for _ in range(2):
                said = await client.ask([user("b")], stream, extra_headers={"Idempotency-Key": "7"})
                assert said.text == "two"
            return session.trajectory.samples("stop")

    assert [sample.turns for sample in asyncio.run(main())] == [1, 1]
    assert len(model.requests) == 2


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_wait_leaves_no_node(tokenizer, protocol, stream):  # noqa: F811
    """Rule: a request whose client goes away ends, frees its slot, and leaves nothing in the trajectory.

    Bug: a cancelled request leaves a node.
    """
    model = Model(tokenizer, "one<eos>", seconds=2)

    async def main():
        async with talking(tokenizer, protocol, model, timeout=0.3) as (client, session, ticket, gateway):
            with pytest.raises(protocol.errors.APITimeoutError):
                await client.ask([user("ask")], stream)
            for _ in range(100):
                if model.cancelled:
                    break
                await asyncio.sleep(0.02)
            assert (model.cancelled, session._answers, session._writing) == (1, {}, 0)
            await asyncio.sleep(2.2)  # an engine that goes on would have written its turn by now
            assert session.trajectory.samples("stop") == ()
            model.seconds = 0.0
            async with protocol(gateway.url(ticket), ticket.key) as again:
                assert (await again.ask([user("ask")], stream)).text == "one"
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert sample.turns == 1


@both
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_is_no_turn(tokenizer, protocol, stream):  # noqa: F811
    """Rule: a request that fails leaves nothing, and its client gets an error.

    Bug: the error of a generation is committed as an empty response, with the reward of one.
    """
    model = Model(tokenizer, RuntimeError("planted in the engine"), "one<eos>")

    async def main():
        async with talking(tokenizer, protocol, model, max_retries=2) as (client, session, _, _):
            with pytest.raises(protocol.errors.InternalServerError, match="planted in the engine"):
                await client.ask([user("ask")], stream)
            assert len(model.turns) == 1  # the client has not tried again
            assert (session.trajectory.turns, session.trajectory.samples("stop")) == (0, ())
            assert str(session.error) == "planted in the engine"

    asyncio.run(main())


@both
def test_a_turn_that_is_cut_says_so(tokenizer, protocol):  # noqa: F811
    model = Model(tokenizer, "<think>for long", "b<eos>")

    async def main():
        async with talking(tokenizer, protocol, model) as (client, session, _, _):
            first = await client.ask([user("ask")], max_tokens=12)
            assert (first.text, first.reason) == ("", protocol.cut_reason)
            await client.ask([user("ask"), first.message, user("go on")])
            return session.trajectory.samples("stop")

    first, second = asyncio.run(main())
    assert len(tokens_of(first)) == len(prompt_of(tokenizer).ids) + 12
    assert second.turns == 1


@both
def test_a_key_opens_its_session_and_no_other(tokenizer, protocol):  # noqa: F811
    """Rule: a stranger gets the status 401 and nothing else, and no session's key can read another's."""

    async def main():
        async with talking(tokenizer, protocol, Model(tokenizer)) as (own, _, ticket, gateway):
            episode = Episode(prompt_of(tokenizer), 3, 1, 9, (0, 0))
            other = gateway.open(AgentSession(episode, tokenizer, Model(tokenizer), 8))
            for key in ("wrong", other.key):
                async with protocol(gateway.url(ticket), key) as client:
                    with pytest.raises(protocol.errors.AuthenticationError, match="the key is missing"):
                        await client.ask([user("a")])
                    with pytest.raises(protocol.errors.AuthenticationError):
                        await client.client.models.list()
            assert [model.id async for model in own.client.models.list()] == ["policy"]
            await gateway.close(other)

    asyncio.run(main())


def test_a_stranger_learns_nothing(tokenizer):  # noqa: F811
    paths = ["/", "/docs", "/openapi.json", "/nothing", "/v1/models", "/v1/messages", "/v1/chat/completions"]

    async def main():
        async with (
            served(tokenizer, Model(tokenizer)) as (_, _, ticket, gateway),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as client,
        ):
            own = [f"/sessions/{ticket.id}{path}" for path in ("", "/complete", "/v1/models", "/v1/messages")]
            for path in [*paths, *own, "/inference/v1/generate"]:
                for method in ("GET", "POST", "DELETE"):
                    answer = await client.request(method, path)
                    assert (answer.status_code, ticket.id in answer.text) == (401, False), path
            big = await client.post("/v1/messages", content=b"x" * (8 << 20))
            assert big.status_code == 401
            for key in ("", "Bearer", "Bearer x", f"Basic {ticket.key}"):
                answer = await client.get("/v1/models", headers={"Authorization": key})
                assert answer.status_code == 401, key
            known = {"x-api-key": ticket.key}
            assert (await client.get("/nothing", headers=known)).status_code == 404
            assert (await client.get("/v1/messages", headers=known)).status_code == 405

    asyncio.run(main())


@both
def test_a_body_above_the_limit_is_refused(tokenizer, protocol, monkeypatch):  # noqa: F811
    monkeypatch.setattr("grpo_megatron.rollout.gateway.connection.MOST_BYTES", 1 << 20)

    async def main():
        async with talking(tokenizer, protocol, Model(tokenizer)) as (client, _, _, _):
            for size in (1 << 20, 24 << 20):
                with pytest.raises(protocol.errors.APIStatusError) as caught:
                    await client.ask([user("x" * size)])
                assert caught.value.status_code == 413
            with pytest.raises(protocol.errors.BadRequestError, match="leaves none"):
                await client.ask([user("x" * ((1 << 20) - 1000))])

    asyncio.run(main())


def test_a_body_that_never_arrives_is_refused(tokenizer, monkeypatch):  # noqa: F811
    monkeypatch.setattr("grpo_megatron.rollout.gateway.connection.MOST_SECONDS", 0.2)

    async def main():
        async with served(tokenizer, Model(tokenizer)) as (_, _, ticket, gateway):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            head = ["POST /v1/messages HTTP/1.1", "Host: x", f"x-api-key: {ticket.key}", "Content-Length: 9"]
            writer.write("\r\n".join([*head, "", ""]).encode())
            assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
            writer.close()

    asyncio.run(main())


@both
def test_requests_at_the_same_time_do_not_exceed_the_turns(tokenizer, protocol):  # noqa: F811
    model = Model(tokenizer, *["one<eos>"] * 8, seconds=0.1)

    async def main():
        async with talking(tokenizer, protocol, model, max_turns=3) as (client, session, _, _):
            asked = [client.ask([user(f"ask {number}")]) for number in range(8)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [one for one in found if isinstance(one, protocol.errors.BadRequestError)]
            assert all("max_turns=3" in str(one) for one in refused)
            assert (len(refused), session.trajectory.turns) == (5, 3)

    asyncio.run(main())


@both
def test_the_end_of_a_session_ends_its_requests(tokenizer, protocol):  # noqa: F811
    model = Model(tokenizer, "never<eos>", seconds=60)

    async def main():
        async with served(tokenizer, model) as (_, _, _, gateway):
            session = AgentSession(Episode(prompt_of(tokenizer), 3, 1, 99, (0, 0)), tokenizer, model, 8)
            ticket = gateway.open(session)
            async with protocol(gateway.url(ticket), ticket.key) as client:
                asked = asyncio.create_task(client.ask([user("ask")]))
                while not session._writing:
                    await asyncio.sleep(0.01)
                await gateway.close(ticket)
                with pytest.raises(protocol.errors.APIStatusError, match="the session has ended") as caught:
                    await asked
                assert (caught.value.status_code, session.trajectory.turns) == (410, 0)
                with pytest.raises(protocol.errors.AuthenticationError):
                    await client.ask([user("ask")])

    asyncio.run(main())
    assert model.cancelled == 1


def test_many_sessions_at_once_are_exact(tokenizer):  # noqa: F811
    """Rule: 256 sessions at once, over connections that they share, mix no token.

    Each has three turns. All ask the same, and are told the same after other thoughts.

    Bug: sessions share their answers or the tokens of their turns.
    """
    sessions, turns = 256, 3

    async def play(number, gateway, http):
        protocol = (ChatClient, MessagesClient)[number % 2]
        said = [f"<think>{number}</think>{turn}<eos>" for turn in range(turns)]
        episode = Episode(prompt_of(tokenizer), number, number, 400, (0, 0))
        session = AgentSession(episode, tokenizer, Model(tokenizer, *said, seconds=0.2), turns)
        ticket = gateway.open(session)
        client = protocol(gateway.url(ticket), ticket.key, http_client=http[protocol])
        messages, expected = [], []
        for turn in range(turns):
            messages.append(user(f"ask {turn}"))
            answer = await client.ask(messages, stream=number % 3 == 0)
            assert answer.text == f"{turn}"
            messages.append(answer.message)
            expected += ids_of(tokenizer, f"<user>ask {turn}<assistant>{said[turn]}")
        (sample,) = session.trajectory.samples("stop")
        assert (sample.turns, tokens_of(sample)) == (turns, expected)
        assert sample.arrays.loss_mask.sum() == sum(len(ids_of(tokenizer, one)) for one in said)
        await gateway.close(ticket)

    async def main():
        gateway = Gateway()
        await gateway.start()
        http = {
            one: one.httpx.AsyncClient(limits=one.httpx.Limits(max_connections=None), timeout=300)
            for one in (ChatClient, MessagesClient)
        }
        await asyncio.gather(*(play(number, gateway, http) for number in range(sessions)))
        for one in http.values():
            await one.aclose()
        await gateway.stop()

    asyncio.run(main())

"""vLLM's token wire at the gateway: token ids in, token ids with log-probs out, in the session's tree."""

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from renderers.client import generate
from renderers.default import DefaultRenderer

from tests.unit.gateway_clients import ChatClient
from tests.unit.test_gateway import Model, served, tokenizer, tokens_of, user  # noqa: F401 - a fixture
from tests.unit.test_gateway_protocols import talking
from tests.unit.test_trajectories import ids_of


@asynccontextmanager
async def wire(tokenizer, model, **limits):  # noqa: F811
    """Yield (function that sends a request, session, ticket, gateway)."""
    async with (
        served(tokenizer, model, **limits) as (_, session, ticket, gateway),
        httpx.AsyncClient(headers={"Authorization": f"Bearer {ticket.key}"}, timeout=60) as client,
    ):

        async def generate(ids, headers=None, timeout=60, **more):
            asked = {"model": "m", "token_ids": ids, "sampling_params": more.pop("sampling_params", {})}
            url = gateway.url(ticket).removesuffix("/v1") + "/inference/v1/generate"
            return await client.post(url, json=asked | more, headers=headers, timeout=timeout)

        yield generate, session, ticket, gateway


def test_a_prompt_that_continues_a_path_continues_it(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>", "two<eos>", "three<eos>")
    first, between = ids_of(tokenizer, "<user>ask<assistant>"), ids_of(tokenizer, "<user>b<assistant>")

    async def main():
        async with wire(tokenizer, model) as (generate, session, _, _):
            one = (await generate(first, sampling_params={"logprobs": 1, "temperature": 0.1})).json()
            ids = one["choices"][0]["token_ids"]
            await generate([*first, *ids, *between], return_token_ids=True)
            changed = [*first, *ids[:-1], *between]
            await generate(changed)
            return one, session.trajectory.samples("stop")

    one, (path, branch) = asyncio.run(main())
    (choice,) = one["choices"]
    _, written, logprobs = model.requests[0]
    assert (choice["token_ids"], choice["finish_reason"]) == (written, "stop")
    content = choice["logprobs"]["content"]
    assert [each["token_id"] for each in content] == written
    assert [each["token"] for each in content] == [f"token_id:{token}" for token in written]
    assert [each["logprob"] for each in content] == logprobs.tolist()
    assert choice["weight_versions"] == [{"version": 0, "start": 0, "end": len(written)}]
    assert one["usage"] == {
        "prompt_tokens": len(first),
        "completion_tokens": len(written),
        "total_tokens": len(first) + len(written),
    }
    assert tokens_of(path) == [*first, *written, *between, *ids_of(tokenizer, "two<eos>")]
    assert (path.turns, branch.turns) == (2, 1)
    assert tokens_of(branch) == [*first, *written[:-1], *between, *ids_of(tokenizer, "three<eos>")]


def test_a_stream_has_the_same_tokens(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one<eos>")
    ids = ids_of(tokenizer, "<user>ask<assistant>")

    async def main():
        async with wire(tokenizer, model) as (generate, session, _, _):
            sampling = {"logprobs": 0}
            whole = await generate(ids, sampling_params=sampling)
            options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
            stream = await generate(ids, sampling_params=sampling, **options)
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert session.trajectory.turns == 1
            return whole.json(), [line[6:] for line in stream.text.splitlines() if line]

    whole, (tokens, usage, done) = asyncio.run(main())
    assert json.loads(tokens)["choices"] == whole["choices"]
    assert json.loads(tokens)["prompt_token_ids"] == ids
    assert (json.loads(usage)["usage"], done) == (whole["usage"], "[DONE]")


def test_retries_failures_and_lost_clients_follow_the_rules_of_a_chat(tokenizer):  # noqa: F811
    """Rules: a retried request is one turn; a failed request or one without a client is none."""
    model = Model(tokenizer, RuntimeError("planted"), "one<eos>", "two<eos>", seconds=0.5)
    ids = ids_of(tokenizer, "<user>ask<assistant>")

    async def main():
        async with wire(tokenizer, model) as (generate, session, _, _):
            failed = await generate(ids)
            assert (failed.status_code, "planted" in failed.text) == (500, True)
            with pytest.raises(httpx.ReadTimeout):
                await generate(ids, timeout=0.1)
            while not model.cancelled:
                await asyncio.sleep(0.01)
            assert session.trajectory.samples("stop") == ()
            found = await asyncio.gather(*(generate(ids) for _ in range(3)))
            assert {tuple(each.json()["choices"][0]["token_ids"]) for each in found} == {
                tuple(ids_of(tokenizer, "one<eos>"))
            }
            for _ in range(2):  # another sample of the same prompt
                other = await generate(ids, headers={"Idempotency-Key": "2"})
                assert other.json()["choices"][0]["token_ids"] == ids_of(tokenizer, "two<eos>")
            return session.trajectory.samples("stop")

    assert [tokens_of(sample) for sample in asyncio.run(main())] == [
        [*ids, *ids_of(tokenizer, "one<eos>")],
        [*ids, *ids_of(tokenizer, "two<eos>")],
    ]


WRONG = [
    ({"token_ids": []}, "token_ids"),
    ({"token_ids": [-1]}, "vocabulary"),
    ({"token_ids": [10**9]}, "vocabulary"),
    ({"sampling_params": {"n": 2}}, "n=2"),
    ({"sampling_params": {"stop": ["x"]}}, "rollout.stop"),
    ({"sampling_params": {"logprobs": 5}}, "logprobs"),
    ({"sampling_params": {"prompt_logprobs": 1}}, "logprobs"),
    ({"sampling_params": {"structured_outputs": {"regex": "x"}}}, "only text"),
    ({"features": {"mm_hashes": {}}}, "only text"),
    ({"output_mode": "text"}, "output_mode"),
    ({"sampling_params": None}, "sampling_params"),
]


def test_what_the_gateway_cannot_do_is_refused(tokenizer):  # noqa: F811
    model = Model(tokenizer, "one two<eos>")

    async def main():
        async with wire(tokenizer, model, limit=40, max_turns=1) as (generate, session, _, gateway):
            ids = ids_of(tokenizer, "<user>ask<assistant>")
            for change, says in WRONG:
                answer = await generate(**{"ids": ids, "token_ids": ids} | change)
                assert (answer.status_code, says in answer.text) == (400, True), answer.text
            assert session.error is None  # the engine has not seen them
            long = await generate(ids * 9)
            assert long.json()["error"]["code"] == "context_length_exceeded"
            cut = await generate(ids, sampling_params={"max_tokens": 3})
            (choice,) = cut.json()["choices"]
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
            assert "max_turns=1" in (await generate([*ids, 1])).text
            async with httpx.AsyncClient() as stranger:
                url = f"http://127.0.0.1:{gateway.port}/inference/v1/generate"
                assert (await stranger.post(url, json={"token_ids": ids})).status_code == 401

    asyncio.run(main())


def test_a_chat_goes_on_in_tokens(tokenizer):  # noqa: F811
    """Rule: the token ids that a chat returns are a prompt of the token wire, in the same path."""
    model = Model(tokenizer, "<think>hm</think>one<eos>", "two<eos>")

    async def main():
        async with talking(tokenizer, ChatClient, model) as (chat, session, ticket, gateway):
            done = await chat.client.chat.completions.create(
                model="m", messages=[user("ask")], extra_body={"return_token_ids": True}
            )
            extra = done.model_extra["prompt_token_ids"], done.choices[0].model_extra["token_ids"]
            ids = [*extra[0], *extra[1], *ids_of(tokenizer, "<user>b<assistant>")]
            async with httpx.AsyncClient(headers={"x-api-key": ticket.key}) as client:
                url = f"http://127.0.0.1:{gateway.port}/inference/v1/generate"
                answer = await client.post(url, json={"token_ids": ids, "sampling_params": {}})
            return ids + answer.json()["choices"][0]["token_ids"], session.trajectory.samples("stop")

    ids, (sample,) = asyncio.run(main())
    assert (sample.turns, tokens_of(sample)) == (2, ids)


def test_the_client_of_this_protocol_in_renderers(tokenizer):  # noqa: F811
    """Rule: the client that other trainers use reads what the engine sampled, in one path."""
    model = Model(tokenizer, "one<eos>", "two<eos>")
    renderer = DefaultRenderer(tokenizer.tokenizer)

    async def main():
        async with talking(tokenizer, ChatClient, model) as (chat, session, _, _):
            ids = ids_of(tokenizer, "<user>ask<assistant>")
            for _ in range(2):
                asked = {"client": chat.client, "renderer": renderer, "model": "m", "messages": []}
                done = await generate(**asked, prompt_ids=ids, sampling_params={"temperature": 1.0})
                _, written, logprobs = model.requests[-1]
                assert (done["completion_ids"], done["finish_reason"]) == (written, "stop")
                assert done["completion_logprobs"] == logprobs.tolist()
                ids = [*ids, *written, *ids_of(tokenizer, "<user>b<assistant>")]
            return session.trajectory.samples("stop")

    (sample,) = asyncio.run(main())
    assert sample.turns == 2

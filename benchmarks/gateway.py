"""Measure what the gateway adds to the requests of many agents at once.

    python benchmarks/gateway.py [--sessions N] [--turns N] [--seconds S] [--client plain|chat|messages]

Each of N sessions (256) is an agent with several turns (4), in which the model calls a tool and the agent
answers with 1,000 characters. A turn has 200 tokens and takes an engine S seconds (2), for which this program
sleeps. The gateway is the one of a run, over HTTP, in an event loop like those of Ray's actors. The agents
share one other process. Their first requests are spread over S seconds, so the requests of all sessions are
in progress at any time.

The client decides how many agents this process can play. `plain` only sends and reads JSON. `chat` is
OpenAI's official client and `messages` is Anthropic's: with 256 sessions they need more than a core, and
requests wait for the client instead of the gateway.

Prints a table and, as its last line, one JSON object:

    overhead_share          time that a client waits beside the engine's time, divided by S, mean of all
                            requests; it contains the rendering and the client's own work
    overhead_p99            the same, 99th percentile
    milliseconds_per_turn   processor time of the gateway for a request, without rendering the conversation;
                            it contains reading the turn
    rendering_milliseconds  processor time of rendering a conversation
    client_milliseconds     processor time of the client for a request
    sessions                number of sessions at once
"""

import argparse
import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make_tokenizer

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import WeightSpan
from grpo_megatron.config.data import DataConfig
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.files import json_text
from grpo_megatron.rollout.gateway.server import Gateway
from grpo_megatron.rollout.gateway.session import AgentSession
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sglang.request import Completion

TEMPLATE = (
    "{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURN = "{}" + '<tool_call>{{"name": "read", "arguments": {{"path": "file"}}}}</tool_call><eos>'
TURN_TOKENS, RESULT = 200, "line of a file\n" * 67
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


class Rendering:
    """Sums up the processor time of functions that render.

    seconds: processor time so far
    """

    seconds = 0.0

    def timed(self, render):
        """Return a function that does the same as `render`, and whose time counts."""

        def timed(*arguments):
            begin = time.thread_time()
            try:
                return render(*arguments)
            finally:
                self.seconds += time.thread_time() - begin

        return timed


class Engine:
    """An engine that needs a certain time for every turn.

    times: {session: seconds that each of its turns has taken}
    """

    def __init__(self, tokenizer: PromptTokenizer, seconds: float):
        self._seconds, self.times = seconds, {}
        fixed = len(tokenizer.encode(TURN.format("")))
        self._ids = tokenizer.encode(TURN.format("x" * (TURN_TOKENS - fixed)))
        self._logprobs = np.full(len(self._ids), -1.0, np.float32)

    def of(self, session: int):
        times = self.times[session] = []

        async def respond(ids, most, routed=0, part=0):
            begin = time.perf_counter()
            await asyncio.sleep(self._seconds)
            spans = (WeightSpan(0, 0, len(self._ids)),)
            turn = Completion((0, 0), self._ids, self._logprobs, "stop", spans)
            times.append(time.perf_counter() - begin)
            return turn

        return respond


async def serve(options: argparse.Namespace) -> dict[str, float]:
    """Serve all sessions until their agents are done. Return the figures."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer("bytes").save_pretrained(folder)
        Path(folder, "template.jinja").write_text(TEMPLATE, encoding="utf-8")
        tokenizer = PromptTokenizer(folder, DataConfig(chat_template=f"{folder}/template.jinja"))
    rendering = Rendering()
    tokenizer.chat = rendering.timed(tokenizer.chat)
    tokenizer.encode = rendering.timed(tokenizer.encode)
    tokenizer.turn_format.continued = rendering.timed(tokenizer.turn_format.continued)
    engine, gateway = Engine(tokenizer, options.seconds), Gateway()
    await gateway.start()
    rendered, ids = tokenizer.prompt("begin", "the benchmark")
    prompt = Prompt(0, ids, rendered, "", messages=tokenizer.messages("begin"))
    sessions = [
        AgentSession(Episode(prompt, number, 0, 1 << 20, (0, 0)), tokenizer, engine.of(number), options.turns)
        for number in range(options.sessions)
    ]
    tickets = [gateway.open(session) for session in sessions]
    plan = vars(options) | {"agents": [[gateway.url(ticket), ticket.key] for ticket in tickets]}
    first = AgentSession(Episode(prompt, 0, 0, 1 << 20, (0, 0)), tokenizer, Engine(tokenizer, 0.0).of(0), 8)
    warm_up = gateway.open(first)
    plan["warm_up"] = gateway.url(warm_up), warm_up.key
    agents = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--agents", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    agents.stdin.write(json.dumps(plan).encode() + b"\n")
    await agents.stdin.drain()
    await agents.stdout.readline()  # they are ready
    gc.freeze()  # as rollout workers do
    rendering.seconds, begin = 0.0, time.process_time()
    agents.stdin.write(b"go\n")
    found = json.loads(await agents.stdout.readline())
    used = time.process_time() - begin
    if await agents.wait():
        raise SystemExit("the agents have failed")
    for session in sessions:
        (sample,) = session.trajectory.samples("stop")
        assert sample.turns == options.turns
    await gateway.stop()
    waited = np.array(found["waited"])
    overhead = (waited - np.array([engine.times[number] for number in range(options.sessions)])).ravel()
    return {
        "overhead_share": overhead.mean() / options.seconds,
        "overhead_p99": np.percentile(overhead, 99) / options.seconds,
        "milliseconds_per_turn": 1e3 * (used - rendering.seconds) / waited.size,
        "rendering_milliseconds": 1e3 * rendering.seconds / waited.size,
        "client_milliseconds": 1e3 * found["used"] / waited.size,
        "sessions": options.sessions,
    }


async def asking(client: str, stack: contextlib.AsyncExitStack):
    """Return a function that makes an agent's request, and returns (its turn, its calls) as messages.

    Its arguments are the base URL, the key and the history. All agents share the connections, which `stack`
    closes.
    """
    connect = stack.enter_async_context
    if client == "messages":
        import anthropic
        import httpx2

        tool = {"name": "read", "input_schema": SCHEMA}
        limits = httpx2.Limits(max_connections=None)
        http = await connect(httpx2.AsyncClient(limits=limits, timeout=600))

        async def ask(url, key, history):
            client = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=http, max_retries=0)
            said = await client.messages.create(model="m", max_tokens=999, messages=history, tools=[tool])
            blocks = [block.model_dump(exclude_none=True) for block in said.content]
            results = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": RESULT}
                for block in blocks
                if block["type"] == "tool_use"
            ]
            return [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]

        return ask
    tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
    if client == "chat":
        import httpx
        import openai

        limits = httpx.Limits(max_connections=None)
        http = await connect(httpx.AsyncClient(limits=limits, timeout=600))

        async def answer(url, key, history):
            client = openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, max_retries=0)
            said = await client.chat.completions.create(model="m", messages=history, tools=tools)
            return said.choices[0].message.model_dump(exclude_none=True)
    else:
        import aiohttp

        plain = await connect(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def answer(url, key, history):
            body = {"model": "m", "messages": history, "tools": tools}
            headers = {"Authorization": f"Bearer {key}"}
            async with plain.post(f"{url}/chat/completions", json=body, headers=headers) as said:
                return (await said.json())["choices"][0]["message"]

    async def ask_chat(url, key, history):
        message = await answer(url, key, history)
        calls = message["tool_calls"]
        return [message, *({"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls)]

    return ask_chat


async def agents() -> None:
    """Read the other process's plan, and play its agents."""
    plan = json.loads(sys.stdin.readline())
    async with contextlib.AsyncExitStack() as stack:
        await play(plan, await asking(plan["client"], stack))


async def play(plan: dict, ask) -> None:
    """Play all agents of a plan at once, and print how long their requests took.

    ask: function that makes a request, from `asking`.
    """

    async def agent(url: str, key: str, turns: int, wait: float = 0.0) -> list[float]:
        history, waited = [{"role": "user", "content": "begin"}], []
        await asyncio.sleep(wait)
        for _ in range(turns):
            begin = time.perf_counter()
            history += await ask(url, key, history)
            waited.append(time.perf_counter() - begin)
        return waited

    await agent(*plan["warm_up"], turns=8)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    begin = time.process_time()
    pause = plan["seconds"] / len(plan["agents"])
    playing = [agent(*one, plan["turns"], number * pause) for number, one in enumerate(plan["agents"])]
    waited = await asyncio.gather(*playing)
    print(json.dumps({"waited": waited, "used": time.process_time() - begin}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=256, help="agents at once")
    parser.add_argument("--turns", type=int, default=4, help="requests of an agent")
    parser.add_argument("--seconds", type=float, default=2.0, help="the engine's time for a turn")
    parser.add_argument(
        "--client", choices=("plain", "chat", "messages"), default="plain", help="client of the agents"
    )
    parser.add_argument("--agents", action="store_true", help="be the process of the agents")
    options = parser.parse_args()
    if options.agents:
        asyncio.run(agents())
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(serve(options))
    for name, value in figures.items():
        print(f"{name:<24} {value:>10.4g}")
    print(json_text(figures))


if __name__ == "__main__":
    main()

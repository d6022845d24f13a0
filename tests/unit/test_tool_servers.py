"""Tools of MCP servers (rollout.tools=mcp:...): real servers of the official package, over stdio and HTTP."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout.environment_host import EnvironmentHost
from grpo_megatron.rollout.environments import EnvironmentFailed, offered_tools
from grpo_megatron.rollout.tool_environment import ToolEnvironment
from grpo_megatron.rollout.tool_servers.settings import server_variables
from tests.tools import wait_until
from tests.unit.toy_environments import decode, encode

pytest.importorskip("mcp")

TIMEOUT = 60.0  # reward.timeout: a call may take 24 s
PATHS = os.pathsep.join(filter(None, sys.path))
PROMPT = Prompt(7, [1], "", "")
ALL = ["add", "count", "wait", "fail", "refuse", "picture", "variable", "die"]


def program(*mode, **options):
    command = [sys.executable, "-m", "tests.unit.tool_server", *mode]
    return {"command": command, "env": {"PYTHONPATH": PATHS}, "start_timeout": 60} | options


@contextmanager
def http_server(mode="http", port=None):
    """Serve over HTTP, and yield the port. It ends with the context."""
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.unit.tool_server", mode, str(port)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PATHS})

    def listens():
        assert process.poll() is None
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(listens, 60)
        yield port
    finally:
        process.kill()
        process.wait()


def url(port, **options):
    return {"url": f"http://127.0.0.1:{port}/mcp"} | options


def tools(servers, *others):
    return ToolEnvironment(
        [*others, *(f"mcp:{name}" for name in servers)], RewardConfig(timeout=TIMEOUT), servers
    )


def started(servers, *others):
    environment = tools(servers, *others)
    environment.start(environment.tools)
    return environment


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answers(play, *calls):
    result = asyncio.run(play.step("".join(calls)))
    assert all(message["role"] == "tool" for message in result.observation)
    return [message["content"] for message in result.observation], result.components["failed_tool_calls"]


@pytest.fixture(scope="module")
def two():
    """Environment with a program, and with a server over HTTP, only some of whose tools are offered."""
    with http_server() as port:
        far = url(port, prefix="far_", tools=["add", "wait", "refuse"])
        yield started({"local": program(), "far": far})


@pytest.fixture
def play(two):
    return two(PROMPT)


def test_prompts_show_the_tools_of_all_servers(two, tmp_path):
    from make_tiny_model import make_tokenizer

    from grpo_megatron.config.data import DataConfig
    from grpo_megatron.data import PromptTokenizer

    assert [tool["function"]["name"] for tool in two.tools] == [*ALL, "far_add", "far_wait", "far_refuse"]
    shown = two.tools[0]["function"]
    assert shown["description"] == "Add two numbers."
    assert shown["parameters"]["required"] == ["a", "b"]
    assert shown["parameters"]["properties"]["a"]["type"] == "integer"
    make_tokenizer("bytes").save_pretrained(tmp_path)
    (tmp_path / "t.jinja").write_text(
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[-1].content }}"
    )
    tokenizer = PromptTokenizer(str(tmp_path), DataConfig(chat_template=f"{tmp_path}/t.jinja"), two.tools)
    text, _ = tokenizer.prompt("2+3?", "f:1")
    assert text.count("Add two numbers.") == 2
    assert '"name": "far_add"' in text


def test_calls_are_answered_in_their_order(play):
    calls = [call("add", a=1, b=2), call("far_add", a=40, b=2), call("picture")]
    assert answers(play, *calls) == (["3", "42", "a dot\n(image left out)"], 0)


def test_the_model_reads_what_went_wrong(play):
    calls = [call("fail", text="no such page"), call("add", a="x"), call("far_count"), call("add", a=1, b=1)]
    (failed, wrong, unknown, fine), count = answers(play, *calls)
    assert failed == "error: Error executing tool fail: no such page"
    assert wrong.startswith("error: ")
    assert "valid integer" in wrong
    assert unknown.startswith("error: there is no tool 'far_count'; the tools are add, count, ")
    assert (fine, count) == ("2", 3)


def test_a_request_that_a_server_calls_invalid_is_the_models_fault(play):
    """It also means that a server over HTTP has forgotten the session, so that is tried once more."""
    pid = answers(play, call("count"))[0][0].split()[1]
    calls = [call("refuse"), call("far_refuse"), call("count")]
    (near, far, counted), failed = answers(play, *calls)
    assert (near, far, failed) == ("error: no such page", "error: no such page", 2)
    assert counted.split()[1] == pid  # the server goes on


def test_a_server_may_write_to_stdout_before_it_begins(capsys):
    environment = tools({"x": program("chatty")})
    assert [one["function"]["name"] for one in environment.tools] == ALL
    out, err = capsys.readouterr()
    assert "has written to stdout what is no message of the protocol; it is ignored: listening " in out
    assert "Traceback" not in out + err
    assert "\x1b" not in out + err


def test_a_long_result_is_cut(play):
    ((answer,), _) = answers(play, call("fail", text="x" * 10000))
    assert len(answer) < 4060


@pytest.mark.parametrize("name", ["wait", "far_wait"])
def test_a_call_that_takes_too_long(two, play, name):
    server = next(one for one in two._shared if name in one.names)
    before, server._seconds = server._seconds, 0.5
    try:
        assert answers(play, call(name, seconds=60)) == (["error: wait took longer than 0.5 s"], 1)
    finally:
        server._seconds = before
    assert answers(play, call(name, seconds=0.01)) == (["waited 0.01"], 0)  # the same session


@pytest.mark.parametrize("name", ["wait", "far_wait"])
def test_episodes_wait_at_the_same_time(two, name):
    async def all_at_once():
        return await asyncio.gather(*(two(PROMPT).step(call(name, seconds=1)) for _ in range(10)))

    start = time.monotonic()
    assert all(found.observation[0]["content"] == "waited 1.0" for found in asyncio.run(all_at_once()))
    assert time.monotonic() - start < 5


def test_episodes_share_the_state_of_a_server(two):
    first, second = (answers(two(PROMPT), call("count"))[0][0].split() for _ in range(2))
    assert (int(second[0]), second[1:]) == (int(first[0]) + 1, first[1:])


def test_a_server_that_dies_is_started_again_once(two, tmp_path):
    pid = answers(two(PROMPT), call("count"))[0][0].split()[1]
    calls = [call("die", marker=f"{tmp_path}/died"), call("count")]
    (alive, counted), failed = answers(two(PROMPT), *calls)
    assert (alive, failed, counted.split()[0]) == ("alive", 0, "1")
    assert counted.split()[1] != pid
    with pytest.raises(
        UserError,
        match=r"mcp:local: the server was lost in a call of die, was started again, and was lost again",
    ):
        answers(two(PROMPT), call("die", marker=""))
    assert answers(two(PROMPT), call("add", a=1, b=1)) == (["2"], 0)


@pytest.mark.slow
def test_a_server_that_dies_costs_no_other_episode(two):
    async def all_at_once():
        turns = [call("wait", seconds=2), call("die", marker=""), call("wait", seconds=2)]
        return await asyncio.gather(*(two(PROMPT).step(turn) for turn in turns), return_exceptions=True)

    before, guilty, after = asyncio.run(all_at_once())
    assert isinstance(guilty, UserError)
    assert [found.observation[0]["content"] for found in (before, after)] == ["waited 2.0"] * 2


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mode", ["http", "old"])
def test_a_server_over_http_is_found_again(mode):
    """A server of 2025 has forgotten the session, about which it answers every call with an error."""
    with http_server(mode) as port:
        play = started({"far": url(port)})(PROMPT)
        first = answers(play, call("count"))[0][0]
    with http_server(mode, port):
        second = answers(play, call("count"))[0][0]
    with pytest.raises(UserError, match=r"mcp:far: the server http://.* could not be used: ConnectError"):
        answers(play, call("count"))
    with http_server(mode, port):
        third = answers(play, call("count"))[0][0]
    assert [text.split()[0] for text in (first, second, third)] == ["1", "1", "1"]
    assert len({first, second, third}) == 3


@pytest.mark.slow
def test_an_episode_may_have_a_server_of_its_own(tmp_path):
    environment = started({"mine": program(session="episode")})
    first, second = environment(PROMPT), environment(PROMPT)
    counts = [answers(episode, call("count"))[0][0].split() for episode in (first, second, first)]
    assert [count for count, *_ in counts] == ["1", "1", "2"]
    assert len({pid for _, pid, _ in counts}) == 2
    asyncio.run(first.close())
    wait_until(lambda: not psutil.pid_exists(int(counts[0][1])), 20)
    # What it knew is lost with it.
    with pytest.raises(UserError, match="the session of an episode was lost in a call of die"):
        answers(second, call("die", marker=f"{tmp_path}/died"))
    asyncio.run(second.close())


WORKER = """
import asyncio, json, sys, time
sys.path[:] = {path}
from tests.unit.test_tool_servers import PROMPT, answers, call, program, started
play = started({{"deaf": program("deaf")}})(PROMPT)
print(answers(play, call("count"))[0][0], flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
def test_no_process_of_a_server_outlives_its_worker():
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER.format(path=sys.path)], stdout=subprocess.PIPE, text=True
    )
    try:
        group = int(worker.stdout.readline().split()[2])
        members = [one for one in psutil.process_iter() if os.getpgid(one.pid) == group]
        assert len(members) == 3  # the one that watches, the server and its child
        assert os.getpgid(worker.pid) != group
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in members), 20)


@pytest.mark.slow
def test_a_server_gets_only_the_variables_that_it_is_given(monkeypatch):
    monkeypatch.setenv("SECRET_ONE", "1")
    monkeypatch.setenv("SECRET_TWO", "2")
    server = program(pass_env=["SECRET_ONE"])
    rollout = RolloutConfig(environment="tools", tools=["mcp:x"], mcp={"x": server})
    assert server_variables(rollout, RewardConfig()) == {"SECRET_ONE": "1"}
    play = started({"x": server})(PROMPT)
    calls = [call("variable", name=name) for name in ("SECRET_ONE", "SECRET_TWO", "HOME")]
    assert answers(play, *calls)[0] == ["1", "not set", os.environ["HOME"]]
    monkeypatch.delenv("SECRET_ONE")
    with pytest.raises(UserError, match=r"variable SECRET_ONE, which rollout.mcp.x needs, is not set"):
        server_variables(rollout, RewardConfig())


def test_a_token_is_sent_as_a_header(monkeypatch):
    seen = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            seen.append((self.headers["Authorization"], self.headers["X-Team"]))
            self.send_error(403)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("MY_TOKEN", "abc")
    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = url(server.server_port, token_env="MY_TOKEN", headers={"X-Team": "red"})
        with pytest.raises(UserError, match=r"could not be used: .*error response \(HTTP status 403 Forbidd"):
            assert tools({"x": options}).tools
    finally:
        server.shutdown()
        server.server_close()
    assert set(seen) == {("Bearer abc", "red")}


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    ("names", "servers", "says"),
    [
        (
            ["mcp:x"],
            {"x": program("broken")},
            r"(?s)mcp:x: .* could not be used.*ends with:\nno database.\[2J",
        ),
        (["mcp:x"], {"x": program("silent", start_timeout=1)}, "gave no list of its tools within 1 s"),
        (["mcp:x"], {"x": program("odd")}, "mcp:x: a tool has the name 'my <tool>', but models can only"),
        (["mcp:http://127.0.0.1:1/mcp"], {}, "could not be used: ConnectError"),
        (
            ["mcp:x", "mcp:y"],
            {"x": program(), "y": program()},
            "mcp:y has a tool add, which rollout.tools=mcp:x is ",
        ),
        (
            ["mcp:x"],
            {"x": program(tools=["add", "sub"])},
            r"rollout.mcp.x.tools: the server has no tool 'sub'; it has add,",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_one_clear_error(names, servers, says):
    with pytest.raises(UserError, match=says) as raised:
        assert ToolEnvironment(names, RewardConfig(timeout=TIMEOUT), servers).tools is None
    assert "Traceback" not in str(raised.value)


@pytest.mark.slow
def test_a_tool_may_not_have_the_name_of_a_function():
    with pytest.raises(UserError, match="mcp:x has a tool add, which a function is called too"):
        assert tools({"x": program()}, "tests.unit.test_tool_servers:add").tools is None


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def test_without_the_client_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        UserError, match=r"mcp:x needs the official client, version 2 or later: pip install mcp=="
    ):
        assert tools({"x": program(prefix="absent_")}).tools is None


@pytest.mark.slow
def test_a_worker_with_other_tools_than_the_prompts_is_refused():
    offered = tools({"x": program()}).tools
    other = tools({"x": program("other")})
    with pytest.raises(
        UserError, match="mcp:x: on this node, the server also lists search; prompts do not show"
    ):
        other.start(offered)
    with pytest.raises(UserError, match="the server no longer lists die"):
        tools({"x": program(tools=ALL[:-1])}).start(offered)
    changed = [json.loads(json.dumps(one)) for one in offered]
    changed[0]["function"]["description"] = "Subtract."
    with pytest.raises(UserError, match="the server describes add otherwise than in the prompts"):
        tools({"x": program()}).start(changed)


@pytest.mark.slow
def test_a_process_waits_for_many_episodes_at_once():
    rollout = RolloutConfig(environment="tools", tools=["mcp:x"], mcp={"x": program()})
    reward = RewardConfig(timeout=TIMEOUT)
    playing = EnvironmentHost(rollout, reward, decode, offered_tools(rollout, reward))
    assert playing.work([("reset", n, (PROMPT, 0)) for n in range(20)], 1.0) == [""] * 20
    start = time.monotonic()
    found = playing.work([("step", n, (encode(call("wait", seconds=1)),)) for n in range(20)], 5.0)
    assert time.monotonic() - start < 8
    assert [result.observation[0]["content"] for _, result in found] == ["waited 1.0"] * 20
    # What goes wrong for the model is an answer; what goes wrong for the machine costs the episode.
    turns = [call("fail", text="no"), call("die", marker="")]
    (_, told), lost = playing.work([("step", n, (encode(turn),)) for n, turn in enumerate(turns)], 5.0)
    assert told.observation[0]["content"] == "error: Error executing tool fail: no"
    assert isinstance(lost, EnvironmentFailed)
    assert re.search(r"environment tools: step\(.*\) on record 7 failed: rollout.tools=mcp:x: ", str(lost))
    assert playing.work([("close", n, ()) for n in range(20)], 1.0) == [None] * 20

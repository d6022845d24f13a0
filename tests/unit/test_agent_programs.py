"""Programs as agents: their task, reward and end, and what they can reach. The model's turns are given."""

import asyncio
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from grpo_megatron.config.agent import AgentConfig, AgentIsolation
from grpo_megatron.config.reward import RewardConfig
from grpo_megatron.config.rollout import RolloutConfig
from grpo_megatron.errors import UserError
from grpo_megatron.rollout import agent_program
from grpo_megatron.rollout.agent_program import AgentProgram
from grpo_megatron.rollout.agent_task import AgentTask
from grpo_megatron.rollout.agents import AgentEpisodes, AgentFailed
from grpo_megatron.rollout.trajectory import Episode
from grpo_megatron.sandbox.contain import BARE, LANDLOCK, NAMESPACES
from grpo_megatron.sandbox.program import CommandStopped
from tests.sandboxes import processes
from tests.tools import wait_until
from tests.unit.test_agents import Rewards
from tests.unit.test_gateway import Model, tokenizer  # noqa: F401 - a fixture
from tests.unit.test_trajectories import prompt_of

# A program without the official client starts faster.
ASK = """
import json, os, sys, urllib.request
def post(path, body):
    url = os.environ["OPENAI_BASE_URL"] + path
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
def ask(text):
    messages = [{"role": "user", "content": text}]
    return post("/chat/completions", {"messages": messages})["choices"][0]["message"]["content"]
"""
# Requests after it go to the session itself.
AT_ROOT = 'os.environ["OPENAI_BASE_URL"] = os.environ["ANTHROPIC_BASE_URL"];'


def python(source: str) -> str:
    return f"python -c {shlex.quote(ASK + source)}"


@pytest.fixture(params=[NAMESPACES, pytest.param(LANDLOCK, marks=pytest.mark.slow), BARE])
def containment(request, monkeypatch):
    if request.param == BARE:
        return BARE
    problem = agent_program.problem_with(request.param)
    if problem or (request.param == LANDLOCK and not agent_program.bounds_connections()):
        pytest.skip(f"{request.param}: {problem}")
    monkeypatch.setattr(agent_program, "_containment", lambda _: request.param)
    return request.param


@pytest.fixture
def play(tokenizer, tmp_path, monkeypatch):  # noqa: F811
    """A function that plays an episode with a command, of which nothing is left afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.mkdir(tempfile.tempdir)
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    before = processes()

    def play(command, containment=NAMESPACES, timeout=None, turns=("one<eos>",), files=(), **reward):
        isolation = "none" if containment == BARE else "full"
        agent = AgentConfig(command=command, isolation=isolation, files=list(map(str, files)))
        rollout = RolloutConfig(agent=agent, episode_timeout=timeout)
        episodes = AgentEpisodes(rollout, RewardConfig(**reward), tokenizer, Rewards())
        episode = Episode(prompt_of(tokenizer), 3, 0, 400, (0, 0))

        async def main():
            try:
                return await episodes.play(episode, Model(tokenizer, *turns))
            finally:
                await episodes._gateway.stop()
                episodes.close()

        return asyncio.run(main())

    yield play
    wait_until(lambda: processes() <= before, "a process is left", seconds=10)
    assert os.listdir(tempfile.tempdir) == []


def test_a_program_gets_the_task_and_gives_the_reward(play, containment):
    source = """
task = json.load(sys.stdin)
assert task["messages"] == [{"role": "user", "content": "ask"}], task
assert os.environ["TASK"] == "ask" and task["model"] == os.environ["OPENAI_MODEL"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"] == task["base_url"]
assert task["api_key"] == os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
open("notes", "w").write("kept")
assert os.listdir(".") == ["notes"] and os.environ["TMPDIR"] == os.getcwd()
print("some text")
print(json.dumps({"reward": len(ask("a")), "asked": 1}))
"""
    (sample,) = play(python(source), containment)
    assert (sample.reward, sample.reward_components) == (3.0, {"asked": 1.0})


@pytest.mark.parametrize(
    ("source", "reward", "components"),
    [
        ('ask("a"); print("[1]")', 4.0, {"long": 1.0}),
        ('ask("a")', 4.0, {"long": 1.0}),
        (f'ask("a"); {AT_ROOT} post("/complete", {{"reward": 0.25}})', 0.25, {}),
        (f'ask("a"); {AT_ROOT} post("/complete", {{"reward": 0.25}}); print(\'{{"reward": 1}}\')', 1.0, {}),
    ],
)
def test_other_sources_of_the_reward(play, source, reward, components):
    """The last line of output comes first, then the request to end the session, then reward.function."""
    (sample,) = play(python(source))
    assert (sample.reward, sample.reward_components) == (reward, components)


def test_a_program_can_leave_its_episode_out(play):
    assert play(python(f'ask("a"); {AT_ROOT} post("/complete", {{"leave_out": True}})')) == ()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (python("ask('a'); sys.exit('planted')"), "ended with exit status 1: planted"),
        (python("ask('a'); print('seen', flush=True); os.abort()"), "ended with exit status 134: "),
        ("exec " + python("ask('a'); os.abort()"), "was ended by signal 6"),
        ("no_such_program", "exit status 127: .*not found"),
        (python("print('no key')"), "returned without a request to http.*; its output ends with: no key"),
        (python(AT_ROOT + "post('/complete', {'failed': 'no time'})"), "says that it failed: no time"),
        (python("ask('a'); print(json.dumps({'reward': 'much'}))"), "much"),
    ],
)
def test_a_program_that_fails(play, command, says):
    with pytest.raises(AgentFailed, match=f"(?s)rollout.agent=.* record 7: .*{says}"):
        play(command)
    assert play(command, on_failure="leave_out") == ()


def test_only_the_end_of_much_output_is_kept(play):
    source = "print('x' * (1 << 21)); ask('a'); sys.stderr.write('y' * (1 << 21) + 'end'); sys.exit(2)"
    with pytest.raises(AgentFailed, match=r"exit status 2: y{1000,2000}end$"):
        play(python(source))
    (sample,) = play(python("print('x' * (1 << 21)); ask('a'); print(json.dumps({'reward': 1}))"))
    assert sample.reward == 1.0


# Processes that leave their parent, its process group and its session.
LEAVES_PROCESSES = """
import subprocess
for command in ("sleep 600 &", "(setsid sleep 601 &)", "setsid sh -c 'sleep 602 & sleep 603'  &"):
    subprocess.run(command, shell=True)
"""


def test_no_process_outlives_its_episode(play, containment):
    (sample,) = play(python(LEAVES_PROCESSES + "ask('a'); print(json.dumps({'reward': 1}))"), containment)
    assert sample.reward == 1.0
    assert _sleeping() == []


def test_a_program_that_takes_too_long_is_killed_with_its_children(play, containment):
    command = python(LEAVES_PROCESSES + "ask('a'); import time; time.sleep(600)")
    start = time.monotonic()
    with pytest.raises(AgentFailed, match=r"took longer than rollout\.episode_timeout=3 s"):
        play(command, containment, timeout=3.0)
    assert time.monotonic() - start < 30
    assert _sleeping() == []


def _sleeping() -> list[list[str]]:
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if line[:1] == ["sleep"] and line[-1] in ("600", "601", "602", "603")]


_RUNS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from grpo_megatron.config.agent import AgentConfig, AgentIsolation
from grpo_megatron.rollout.agent_program import AgentProgram
from grpo_megatron.rollout.agent_task import AgentTask
program = AgentProgram(AgentConfig(command=sys.argv[1], isolation=sys.argv[2]))
task = AgentTask("http://127.0.0.1:9/v1", "key", "policy", [], "", {})
program._outcome(task, os.eventfd(0))
"""


@pytest.mark.parametrize("isolation", ["full", "none"])
def test_no_process_outlives_a_worker_that_is_killed(tmp_path, isolation):
    command = "(setsid sleep 601 &) ; sleep 600"
    worker = subprocess.Popen([sys.executable, "-c", _RUNS, command, isolation])
    try:
        wait_until(lambda: len(_sleeping()) == 2, "the program does not start", seconds=60)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
    wait_until(lambda: _sleeping() == [], "a process is left", seconds=10)


def test_what_a_program_can_reach(play, containment, tmp_path):
    """Nothing but the endpoint, its folder, its files and what every program of the machine needs."""
    (tmp_path / "given").write_text("given")
    (tmp_path / "other").write_text("other")
    source = f"""
import socket, subprocess
def works(action):
    try:
        action()
        return True
    except OSError:
        return False
print(json.dumps({{"reward": len(ask("a"))}} | {{name: int(works(action)) for name, action in {{
    "given": lambda: open("given").read(),
    "change": lambda: open("given", "a"),
    "other": lambda: open({str(tmp_path / "other")!r}),
    "passwd": lambda: open("/etc/passwd"),
    "gateway": lambda: socket.create_connection(("127.0.0.1", {{port}})),
    "secret": lambda: open("given" if "SECRET_TOKEN" in os.environ else "none"),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "fast": lambda: socket.socket().sendto(b"x", socket.MSG_FASTOPEN, ("127.0.0.1", {{port}})),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "process": lambda: os.kill({os.getpid()}, 0),
    "run": lambda: subprocess.run("true", shell=True, check=True, start_new_session=True),
    }}.items()}}))
"""
    with socket.create_server(("127.0.0.1", 0)) as other:
        source = source.replace("{port}", str(other.getsockname()[1]))
        (sample,) = play(python(source), containment, files=[tmp_path / "given"])
    found = {name for name, value in sample.reward_components.items() if value}
    if containment == BARE:
        assert found >= {"given", "change", "other", "passwd", "gateway", "secret", "unix", "process", "run"}
    else:
        assert found == {"given", "run"}


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not here")
def test_a_program_of_node(play, containment):
    """Its client needs WebAssembly, which reserves more address space than a limit on it would allow."""
    source = """
    const headers = {authorization: `Bearer ${process.env.OPENAI_API_KEY}`}
    const body = JSON.stringify({messages: [{role: "user", content: "a"}]})
    fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {method: "POST", headers, body})
      .then(answer => answer.json())
      .then(answer => console.log(JSON.stringify({reward: answer.choices[0].message.content.length})))
    """
    (sample,) = play(f"node -e {shlex.quote(source)}", containment)
    assert sample.reward == 3.0


def test_many_programs_at_once_are_not_started_in_the_event_loop(tokenizer, monkeypatch):  # noqa: F811
    started = []

    class Started(subprocess.Popen):
        def __init__(self, *arguments, **options):
            started.append(threading.current_thread())
            super().__init__(*arguments, **options)

    command = python("print(json.dumps({'reward': len(ask('a'))}))")
    rollout = RolloutConfig(agent=AgentConfig(command=command))
    episodes = AgentEpisodes(rollout, RewardConfig(), tokenizer, Rewards())
    monkeypatch.setattr(subprocess, "Popen", Started)

    async def main():
        playing = [
            episodes.play(Episode(prompt_of(tokenizer), 3, i, 400, (0, i)), Model(tokenizer, "one<eos>"))
            for i in range(24)
        ]
        played = await asyncio.gather(*playing)
        await episodes._gateway.stop()
        episodes.close()
        return played

    assert [sample.reward for (sample,) in asyncio.run(main())] == [3.0] * 24
    assert len(set(started) - {threading.main_thread()}) == 24


def test_programs_one_after_the_other_share_a_sandbox_and_no_files(containment, monkeypatch):
    started = []

    class Started(subprocess.Popen):
        def __init__(self, *arguments, **options):
            started.append(self)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Started)
    isolation = AgentIsolation.none if containment == BARE else AgentIsolation.full
    command = "ls; : > mine; (sleep 603 &); test -e mine"
    program = AgentProgram(AgentConfig(command=command, isolation=isolation))
    task = AgentTask("http://127.0.0.1:9/v1", "key", "policy", [], "", {})

    async def main():
        with ThreadPoolExecutor(1) as threads:
            return [(await program.run(task, threads)).output for _ in range(3)]

    assert asyncio.run(main()) == ["", "", ""]
    assert [helper.poll() for helper in started] == [None]
    assert _sleeping() == []
    started[0].kill()
    started[0].wait()
    assert asyncio.run(main()) == ["", "", ""]
    assert [helper.poll() for helper in started] == [-9, None]
    program.close()
    assert [helper.poll() for helper in started] == [-9, 0]


def test_closing_kills_the_programs_that_still_run(play):
    program = AgentProgram(AgentConfig(command="(setsid sleep 601 &) ; sleep 600"))
    task = AgentTask("http://127.0.0.1:9/v1", "key", "policy", [], "", {})

    async def main():
        with ThreadPoolExecutor(1) as threads:
            running = asyncio.create_task(program.run(task, threads))
            await asyncio.to_thread(
                wait_until, lambda: len(_sleeping()) == 2, "it does not start", seconds=60
            )
            program.close()
            with pytest.raises(CommandStopped):
                await running

    asyncio.run(main())
    assert _sleeping() == []


@pytest.mark.parametrize(
    ("files", "says"), [(["none"], "none does not exist"), (["a/x", "b/x"], "two entries with the name x")]
)
def test_files_that_cannot_be_given(tmp_path, monkeypatch, files, says):
    monkeypatch.chdir(tmp_path)
    for folder in "ab":
        Path(folder).mkdir()
        Path(folder, "x").touch()
    with pytest.raises(UserError, match=says):
        AgentProgram(AgentConfig(command="true", files=files))


def test_a_command_must_find_its_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    Path("agents/mine.py").touch()
    absolute = f"{tmp_path}/agents/mine.py"
    for command in ("python agents/mine.py --fast; true", f"python {absolute}"):
        with pytest.raises(UserError, match=r"names .*mine.py, .* to rollout.agent.files, and write mine.py"):
            AgentProgram(AgentConfig(command=command))
    for options in (
        {"command": "python mine.py", "files": ["agents/mine.py"]},
        {"command": "python agents/mine.py", "files": ["agents"]},
        {"command": f"python {absolute}", "files": [absolute]},
        {"command": f"python {absolute}", "isolation": "none"},
        {"command": f"cd {tmp_path} && python agents/mine.py", "isolation": "none"},
        {"command": "python -c 'import os; \"'"},
        {"command": f"{sys.executable} -c '{'x' * 5000}'"},
    ):
        AgentProgram(AgentConfig(**options))


def test_a_machine_that_cannot_isolate_a_command(monkeypatch):
    monkeypatch.setattr(agent_program, "problem_with", lambda containment: f"no {containment} here")
    with pytest.raises(
        UserError, match=r"namespaces: no namespaces here; .*set rollout\.agent\.isolation=none"
    ):
        AgentProgram(AgentConfig(command="true"))
    AgentProgram(AgentConfig(command="true", isolation="none"))

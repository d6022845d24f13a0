"""Episodes that verifiers' real environment server plays. The model's turns are given."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import psutil
import pytest
import yaml

from grpo_megatron.cli import main
from grpo_megatron.config.reward import OnFailure, RewardConfig
from grpo_megatron.config.rollout import RolloutConfig, VerifiersConfig
from grpo_megatron.errors import ProcessLost, UserError
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.agent_task import AgentUnusable
from grpo_megatron.rollout.agents import AgentFailed
from grpo_megatron.rollout.published.episodes import PublishedEpisodes
from grpo_megatron.rollout.published.tasks import write_tasks
from grpo_megatron.rollout.trajectory import Episode
from tests.published import PYTHON, TASK_SETS, needs_verifiers, on_this_machine, words_for_games
from tests.tools import wait_until
from tests.unit.test_gateway import Model, tokenizer, tokens_of  # noqa: F401 - a fixture
from tests.unit.test_trajectories import prompt_of

pytestmark = [pytest.mark.slow, needs_verifiers]


OWN = {"python": str(PYTHON), "env": on_this_machine("agent")}


@pytest.fixture(autouse=True)
def in_the_folder_of_the_task_set(monkeypatch):
    monkeypatch.chdir(TASK_SETS)


def episode_of(tokenizer, number=1):  # noqa: F811
    task = {"idx": number, "prompt": f"{number}+1=", "answer": str(number + 1)}
    own = replace(prompt_of(tokenizer, task["prompt"]), fields={"verifiers": task})
    return Episode(own, 3, number, 400, (0, 0))


def played(tokenizer, tmp_path, act, environment="verifiers:sums_tasks", env=None, **reward):  # noqa: F811
    """Start an environment server, and return the result of act(its episodes)."""
    verifiers = VerifiersConfig(python=str(PYTHON), env=env or on_this_machine("agent"))
    episodes = PublishedEpisodes(
        RolloutConfig(environment=environment, verifiers=verifiers),
        RewardConfig(**reward),
        tokenizer,
        str(tmp_path / "verifiers.log"),
    )

    async def main():
        try:
            return await act(episodes)
        finally:
            if episodes._gateway.port:
                await episodes._gateway.stop()

    try:
        return asyncio.run(main())
    finally:
        episodes.close()


def test_episodes_at_once_have_their_own_tokens_and_rewards(tokenizer, tmp_path):  # noqa: F811
    models = [Model(tokenizer, "it is 1<eos>"), Model(tokenizer, "it is 2<eos>"), Model(tokenizer, "no<eos>")]

    async def act(episodes):
        return await asyncio.gather(
            *(episodes.play(episode_of(tokenizer, number), model) for number, model in enumerate(models))
        )

    samples = [sample for (sample,) in played(tokenizer, tmp_path, act)]
    assert [sample.reward for sample in samples] == [2.0, 2.0, 0.0]
    assert samples[0].reward_components == {"right": 1.0, "letters": 7.0}
    for number, (sample, model) in enumerate(zip(samples, models, strict=True)):
        read, wrote, _ = model.requests[0]
        assert tokenizer.decode_all(sample.arrays.prompt_ids) == f"<user>{number}+1=<assistant>"
        assert sample.arrays.prompt_ids.tolist() == list(read)
        assert sample.arrays.response_ids.tolist() == list(wrote)
        assert sample.arrays.loss_mask.all()


def test_a_game_of_textarena_is_exact_to_the_token(tokenizer, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NLTK_DATA", str(words_for_games(tmp_path)))
    model = Model(tokenizer, "I take [R]<eos>", "no move<eos>", "[river]<eos>")
    task = {"prompt": "play", "system_prompt": "You play.", "info": {"game": "Hangman-v0", "seed": 0}}
    own = replace(prompt_of(tokenizer, "play"), fields={"verifiers": task})

    async def act(episodes):
        return await episodes.play(Episode(own, 3, 0, 4000, (0, 0)), model)

    env = on_this_machine("player", game="Hangman-v0")
    (sample,) = played(tokenizer, tmp_path, act, environment="verifiers:textarena", env=env)
    text = tokenizer.decode_all(np.array(tokens_of(sample)))
    assert text.startswith("<system>You play.<user>play<assistant>I take [R]<eos><user>")
    assert (sample.reward, sample.turns) == (1.0, 3)
    assert sample.reward_components == {"game_reward": 1.0}
    trained = sample.arrays.response_ids[sample.arrays.loss_mask]
    assert trained.tolist() == [id for _, wrote, _ in model.requests for id in wrote]
    read, wrote, _ = model.requests[-1]
    assert tokens_of(sample) == [*read, *wrote]
    assert "Invalid" in text  # what the game said to a turn without a move


def tasks_of(id, env, folder):
    """Return the records of a task set."""
    rollout = RolloutConfig(
        environment=f"verifiers:{id}", verifiers=VerifiersConfig(python=str(PYTHON), env=env)
    )
    write_tasks(rollout, f"{folder}/tasks.jsonl", None)
    return [json.loads(line) for line in (folder / "tasks.jsonl").read_text().splitlines()]


class ResourceServer(BaseHTTPRequestHandler):
    """Stands for a resource server of NeMo Gym with the tool `add`. An answer with the sum gets 1."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        answers = {
            "/seed_session": lambda: {},
            "/add": lambda: body["a"] + body["b"],
            "/verify": lambda: {
                "reward": float(body["answer"] in json.dumps(body["response"]["output"][-1])),
                "calls": sum(one["type"] == "function_call" for one in body["response"]["output"]),
                "responses_create_params": body["responses_create_params"],
                "response": body["response"],
            },
        }
        text = json.dumps(answers[self.path]()).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def test_a_task_of_nemo_gym_calls_the_tools_of_its_resource_server(tokenizer, tmp_path):  # noqa: F811
    add = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool = {"type": "function", "name": "add", "parameters": add, "strict": False}
    asked = {"input": [{"role": "user", "content": "1+2="}], "tools": [tool]}
    row = {"responses_create_params": asked, "answer": "3"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), ResourceServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    env = on_this_machine("agent", dataset=f"{tmp_path}/rows.jsonl", task={"resources_url": url})
    (record,) = tasks_of("nemo_gym", env, tmp_path)
    assert record["prompt"] == asked["input"]
    own = replace(prompt_of(tokenizer, "1+2="), fields={"verifiers": record["verifiers"]})
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>'
    model = Model(tokenizer, call, "it is 3<eos>")

    async def act(episodes):
        return await episodes.play(Episode(own, 3, 0, 4000, (0, 0)), model)

    try:
        (sample,) = played(tokenizer, tmp_path, act, environment="verifiers:nemo_gym", env=env)
    finally:
        server.shutdown()
        server.server_close()
    assert (sample.reward, sample.turns) == (1.0, 2)
    assert sample.reward_components == {"nemo_gym": 1.0, "calls": 1.0}
    assert tokenizer.decode_all(np.array(tokens_of(sample))) == (
        f"(add)<user>1+2=<assistant>{call}<tool>3<assistant>it is 3<eos>"
    )


@pytest.mark.skipif(
    not any(PYTHON.parents[1].glob("lib/*/site-packages/openenv")),
    reason=".venv-verifiers has no openenv: pip install 'verifiers[openenv]==0.4.0' there",
)
def test_a_server_of_openenv_is_asked_for_observations(tokenizer, tmp_path):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([PYTHON, TASK_SETS / "openenv_sums.py", str(port)])

    def listens():
        assert server.poll() is None
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    env = on_this_machine("player", base_url=f"http://127.0.0.1:{port}", resets=[{"a": 2, "b": 3}])
    (task,) = tasks_of("openenv", env, tmp_path)
    own = replace(prompt_of(tokenizer), fields={"verifiers": task["verifiers"]})
    model = Model(tokenizer, "4<eos>", "5<eos>")

    async def act(episodes):
        return await episodes.play(Episode(own, 3, 0, 4000, (0, 0)), model)

    try:
        wait_until(listens, "the server of OpenEnv does not listen", seconds=60)
        (sample,) = played(tokenizer, tmp_path, act, environment="verifiers:openenv", env=env)
    finally:
        server.kill()
        server.wait()
    assert (sample.reward, sample.turns) == (0.75, 2)
    text = tokenizer.decode_all(np.array(tokens_of(sample)))
    assert text.startswith('<user>{"observation": {')
    asked, again = text.split("<assistant>4<eos><user>")
    assert ('"text": "2+3?"' in asked, '"text": "no"' in again) == (True, True)
    assert again.endswith("<assistant>5<eos>")


def test_the_harness_bash_runs_the_commands_of_the_model(tokenizer, tmp_path):  # noqa: F811
    call = '<tool_call>{"name": "bash", "arguments": {"command": "echo sum $((2 + 3))"}}</tool_call><eos>'
    model = Model(tokenizer, call, "it is 2<eos>")
    env = {"agent": {"harness": {"id": "bash"}, "runtime": {"type": "subprocess"}}}

    async def act(episodes):
        return await episodes.play(replace(episode_of(tokenizer), limit=4000), model)

    (sample,) = played(tokenizer, tmp_path, act, env=env)
    text = tokenizer.decode_all(np.array(tokens_of(sample)))
    assert text.startswith("(bash)(edit)<system>You are a coding agent.")
    assert text.endswith(f"<user>1+1=<assistant>{call}<tool>sum 5\n<assistant>it is 2<eos>")
    assert (sample.reward, sample.turns) == (2.0, 2)
    trained = sample.arrays.response_ids[sample.arrays.loss_mask]
    assert trained.tolist() == [id for _, wrote, _ in model.requests for id in wrote]


def test_only_one_agent_of_an_episode_can_be_trained(tokenizer, tmp_path):  # noqa: F811
    """All agents ask the same model, unless the configuration says otherwise, and would share its tokens."""

    async def act(episodes):
        await episodes.play(episode_of(tokenizer), Model(tokenizer, "it is 2<eos>", "it is 2<eos>"))

    env = on_this_machine("agent") | {"id": "best_of_n", "n": 2}
    with pytest.raises(AgentUnusable, match="two agents of an episode, agent and agent, ask"):
        played(tokenizer, tmp_path, act, env=env, on_failure="leave_out")


def test_what_fails_is_told_and_reward_on_failure_decides(tokenizer, tmp_path, capsys):  # noqa: F811
    async def failing(episodes):
        return await episodes.play(episode_of(tokenizer), Model(tokenizer, "fail<eos>"))

    with pytest.raises(AgentFailed, match=r"record 7: .*planted"):
        played(tokenizer, tmp_path, failing)

    async def left_out(episodes):
        failed = await failing(episodes)
        return failed, await episodes.play(episode_of(tokenizer), Model(tokenizer, "it is 2<eos>"))

    failed, (sample,) = played(tokenizer, tmp_path, left_out, on_failure="leave_out")
    assert (failed, sample.reward) == ((), 2.0)
    assert capsys.readouterr().out.count("it is left out") == 1


def test_an_episode_that_takes_too_long_ends_in_the_server_too(tokenizer, tmp_path):  # noqa: F811
    async def act(episodes):
        # Warm, so that only the reward takes long.
        await episodes.play(episode_of(tokenizer), Model(tokenizer, "it is 2<eos>"))
        episodes._timeout = 15.0
        left_out = await episodes.play(episode_of(tokenizer), Model(tokenizer, "wait<eos>"))
        working = children(episodes.server.pid)
        return left_out, working

    left_out, working = played(tokenizer, tmp_path, act, on_failure="leave_out")
    assert (left_out, working) == ((), [])


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


class Hangs(Model):
    """Never answers its first request, and the later ones at once."""

    asked = False

    async def __call__(self, ids, most, routed=0, part=0):
        self.parts = [*getattr(self, "parts", ()), part]
        if not self.asked:
            self.asked = True
            await asyncio.Event().wait()
        return await super().__call__(ids, most, routed, part)


def test_a_server_that_is_killed_is_told_once_and_its_episodes_are_played_again(
    tokenizer,  # noqa: F811
    tmp_path,
    capsys,
):
    async def act(episodes):
        pid, models = episodes.server.pid, [Hangs(tokenizer, "it is 2<eos>") for _ in range(3)]
        playing = [asyncio.create_task(episodes.play(episode_of(tokenizer), model)) for model in models]
        while not all(model.asked for model in models):
            await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        samples = await asyncio.gather(*playing)
        assert episodes.server.pid != pid
        return samples, models

    samples, models = played(tokenizer, tmp_path, act)
    assert [sample.reward for (sample,) in samples] == [2.0] * 3
    assert all(model.parts == [0, 1] and len(model.requests) == 1 for model in models)
    assert capsys.readouterr().out.count("has ended with signal 9; its log is") == 1


def test_a_server_that_always_dies_ends_the_run(tokenizer, tmp_path, capsys):  # noqa: F811
    async def act(episodes):
        left_out = await episodes.play(episode_of(tokenizer), Model(tokenizer, "die<eos>", "die<eos>"))
        with pytest.raises(AgentUnusable, match=r"exit status 7[^$]*It is not started again"):
            await episodes.play(episode_of(tokenizer), Model(tokenizer, "it is 2<eos>"))
        episodes._on_failure = OnFailure.error
        episodes.server._deaths = -1  # as if other episodes had been finished between its deaths
        with pytest.raises(ProcessLost, match="exit status 7"):
            await episodes.play(episode_of(tokenizer), Model(tokenizer, "die<eos>", "die<eos>"))
        return left_out

    assert played(tokenizer, tmp_path, act, on_failure="leave_out") == ()
    assert "this was its second attempt; it is left out" in capsys.readouterr().out


def test_tasks_are_written_as_records(tmp_path, capsys):
    settings = tmp_path / "sums.yaml"
    settings.write_text(
        yaml.safe_dump({"rollout": {"environment": "verifiers:sums_tasks", "verifiers": OWN}})
    )
    given = ["tasks", "--config", str(settings), "--out", str(tmp_path / "tasks.jsonl")]
    assert main([*given, "--number", "2"]) == 0
    assert "2 tasks of verifiers:sums_tasks" in capsys.readouterr().out
    records = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    assert records[1] == {
        "prompt": [{"role": "user", "content": "1+1="}],
        "answer": "",
        "verifiers": {"idx": 1, "prompt": "1+1=", "answer": "2"},
    }
    assert main(given) == 2
    assert "tasks.jsonl exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "env", "says"),
    [
        ("nothing_of_that_name", {}, "taskset 'nothing_of_that_name' not found"),
        ("textarena", {}, "taskset.game\n *Field required"),
        ("sums_tasks", {"agent": {"retries": {"max_retries": 1}}}, "env.agent.retries: .*set retries to 0"),
        ("sums_tasks", {"agnt": {}}, "agnt"),
    ],
)
def test_what_verifiers_refuses_is_told_before_the_run(environment, env, says):
    given = [
        "model.path=m",
        "data.train=d.jsonl",
        f"rollout.environment=verifiers:{environment}",
        f"rollout.verifiers.python={PYTHON}",
        f"rollout.verifiers.env={json.dumps(env)}",
    ]
    with pytest.raises(UserError, match=says):
        load_config(None, given)

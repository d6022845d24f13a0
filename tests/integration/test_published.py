"""Training on published environments, by verifiers' environment server and a real engine."""

import json
import os

import psutil
import pytest

from grpo_megatron.cli import main
from grpo_megatron.data import PromptTokenizer
from grpo_megatron.rollout.recording.replay import Replay
from tests.integration.ends import LiveRun
from tests.integration.train_runs import arguments, metrics, trained
from tests.published import PYTHON, TASK_SETS, needs_verifiers, on_this_machine, words_for_games

pytestmark = [pytest.mark.slow, needs_verifiers]


@pytest.fixture(scope="module")
def hangman(tmp_path_factory):
    """Folder with a tiny model of bytes: model/."""
    from make_tiny_model import make

    root = tmp_path_factory.mktemp("hangman")
    make(root / "model", tokenizer="bytes", hidden=64, ffn=128, seed=3, positions=4096)
    return root


def configured(environment, env, tasks, folder):
    """Return the arguments of a short run on the tasks of an environment of verifiers.

    env: verifiers' section `env`.
    tasks: number of tasks.
    """
    own = [
        f"rollout.environment=verifiers:{environment}",
        f"rollout.verifiers.python={PYTHON}",
        f"rollout.verifiers.env={json.dumps(env)}",
    ]
    out = f"{folder}/tasks.jsonl"
    assert main(["tasks", *own, "--out", out, "--number", str(tasks)]) == 0
    # Later arguments override earlier ones.
    return [*own, f"data.train={out}", "reward.function=exact_match", "rollout.max_turns=3"]


def test_games_of_textarena_train(hangman, tmp_path, monkeypatch):
    monkeypatch.setenv("NLTK_DATA", str(words_for_games(tmp_path)))
    env = on_this_machine("player", game="Hangman-v0")
    env["player"]["sampling"] = {"max_tokens": 12}
    changes = [
        *configured("textarena", env, 4, tmp_path),
        "data.max_prompt_length=2048",
        "data.train_batch_size=2",
        "rollout.n=2",
        "rollout.max_response_length=1500",
        "rollout.engine.max_total_tokens=65536",
        f"rollout.record={tmp_path}/rollouts",
        "train.ppo_mini_batch_size=2",
        "train.max_tokens_per_micro_batch=4096",
    ]
    with LiveRun("train", arguments(hangman, tmp_path, *changes), tmp_path) as run:
        assert run.ended(560) == 0, run.output() + run.errors()
    rows = metrics(tmp_path, "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/max"] for row in rows) < 1e-4
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    tokenizer = PromptTokenizer(f"{hangman}/model")
    samples = [
        sample
        for step in (1, 2, 3)
        for group in Replay(f"{tmp_path}/rollouts").read(step)
        for sample in group.samples
    ]
    assert len(samples) == 3 * 2 * 2  # each game is one sample
    assert {sample.turns for sample in samples} <= {1, 2, 3}
    texts = [tokenizer.decode_all(sample.arrays.response_ids) for sample in samples if sample.turns > 1]
    assert texts  # the game answers an invalid move, and the model has another one
    assert all("Invalid" in text for text in texts)


def server_of(run) -> psutil.Process | None:
    return next((one for one in run.processes() if one.cmdline()[-1:] == ["serve"]), None)


def test_a_server_that_is_killed_is_told_once_and_the_books_balance(arithmetic, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{TASK_SETS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    changes = [
        *configured("sums_tasks", on_this_machine("agent"), 3, tmp_path),
        "data.train_batch_size=3",
        "rollout.n=2",
        "run.max_restarts=0",
        f"rollout.record={tmp_path}/rollouts",
    ]
    with LiveRun("train", arguments(arithmetic, tmp_path, *changes), tmp_path) as run:
        run.wait_for(run.steps)
        server = server_of(run)
        run.wait_for(server.children)  # it plays
        server.kill()
        assert run.ended(400) == 0, run.output() + run.errors()
        assert run.left_after(10.0) == []
        told = (run.output() + run.errors()).count("has ended with signal 9; its log is")
    assert told == 1
    assert [row["step"] for row in metrics(tmp_path, "run")] == [1, 2, 3]
    assert main(["ledger", f"{tmp_path}/run"]) == 0
    assert len(trained(tmp_path, "run")) == 3 * 3
    groups = [group for step in (1, 2, 3) for group in Replay(f"{tmp_path}/rollouts").read(step)]
    assert [len(group.samples) for group in groups] == [2] * 9  # no episode is missing, and none is twice

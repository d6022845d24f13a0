"""`grpo-megatron serve`, with the SDK of the Tinker API and the loop of its cookbook, both as published."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tools import unpacked

pytestmark = pytest.mark.slow

# A name of which the cookbook knows the format of the prompts.
NAME = "Qwen/Qwen3-8B-Base"
KEY = "tml-of-the-test"
SDK = (
    "tinker==0.38.0",
    "tinker-cookbook==0.6.1",
    "blobfile==3.3.0",
    "chz==0.4.0",
    "h2==4.4.1",
    "hpack==4.2.0",
    "hyperframe==6.1.0",
    "pylatexenc==2.11",
    "pyqwest==0.12.0",
    "termcolor==3.3.0",
)
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
---
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny model and problems, in the places where the cookbook looks for them.

    The model's vocabulary has \\boxed{0} to \\boxed{9} as tokens, and the answer to each problem is 4. So a
    random model is right now and then.
    """
    from make_tiny_model import make
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root = tmp_path_factory.mktemp("serve")
    make(root / NAME, hidden=64, ffn=128, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(root / NAME)
    tokenizer.add_tokens([f"\\boxed{{{digit}}}" for digit in range(10)])
    model = AutoModelForCausalLM.from_pretrained(root / NAME)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(root / NAME)
    tokenizer.save_pretrained(root / NAME)
    data = root / "openai" / "gsm8k"
    data.mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    problems = [{"question": f"{i % 5}+{4 - i % 5}=?", "answer": "It is 4.\n#### 4"} for i in range(80)]
    (data / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in problems))
    return root


@contextmanager
def serving(folder: Path, *arguments: str):
    """Run the server, and yield (its address, its process)."""
    command = [sys.executable, "-m", "grpo_megatron.cli", "serve", "--port", "0", "--name", NAME, *arguments]
    keys = [
        f"run.root={folder}/runs",
        "run.name=served",
        f"model.path={folder}/{NAME}",
        "rollout.max_response_length=8",
        "rollout.engine.dtype=float32",
        "rollout.engine.max_total_tokens=16384",
        "train.max_tokens_per_micro_batch=4096",
        "megatron.precision=fp32",
    ]
    with (
        open(folder / "serve.log", "a") as log,
        subprocess.Popen(
            [*command, *keys],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"TINKER_API_KEY": KEY},
        ) as server,
    ):
        try:
            for line in server.stdout:
                if found := re.search(r"TINKER_BASE_URL=(\S+)", line):
                    break
            else:
                pytest.fail(f"the server ended: {(folder / 'serve.log').read_text()}")
            yield found[1], server
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)


def environment(address: str) -> dict[str, str]:
    """Return the environment of a client, whose packages come before those that are installed."""
    packages = ":".join([*(str(unpacked(package)) for package in SDK), os.getcwd()])
    hub = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return os.environ | hub | {"TINKER_BASE_URL": address, "TINKER_API_KEY": KEY, "PYTHONPATH": packages}


def cookbook(folder: Path, address: str, log: str, steps: int, save_every: int = 0) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tinker_cookbook.recipes.rl_loop",
        f"model_name={NAME}",
        f"base_url={address}",
        f"log_path={folder}/{log}",
        "batch_size=2",
        "group_size=16",
        "max_tokens=6",
        "learning_rate=0.02",
        "loss_fn=importance_sampling",
        f"max_steps={steps}",
        f"save_every={save_every}",
    ]


def rows(folder: Path, log: str) -> list[dict]:
    path = folder / log / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def running(folder):
    environment("")  # skips the tests if a package is missing
    with serving(folder, "--lost-after", "25") as server:
        yield server


@pytest.fixture
def address(folder, running):
    """Address of the server, which must not have ended in an earlier test."""
    assert running[1].poll() is None, (folder / "serve.log").read_text()
    return running[0]


def test_the_sdk(folder, address):
    """The program raises where a log-prob, a loss or a weight is not as it must be."""
    program = [sys.executable, "tests/integration/tinker_client.py", f"{folder}/{NAME}", NAME]
    done = subprocess.run(program, env=environment(address), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all is as it must be"


def test_the_cookbooks_loop_learns(folder, address):
    loop = cookbook(folder, address, "learns", steps=10)
    done = subprocess.run(
        loop, cwd=folder, env=environment(address), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    rewards = [row["reward/total"] for row in rows(folder, "learns")]
    norms = [row.get("optim/grad_norm", 0) for row in rows(folder, "learns")]
    assert len(rewards) == 10
    assert max(norms[:3]) > 0
    assert sum(rewards[:2]) / 2 < 0.3 < 0.8 < sum(rewards[-2:]) / 2, rewards


def test_a_loop_that_is_killed_leaves_its_last_saved_state(folder, address):
    loop, own = cookbook(folder, address, "killed", steps=6, save_every=2), environment(address)
    with subprocess.Popen(loop, cwd=folder, env=own, stderr=subprocess.DEVNULL) as first:
        limit = time.monotonic() + 300
        while len(rows(folder, "killed")) < 4 and time.monotonic() < limit:
            time.sleep(0.2)
        first.kill()
    saved = json.loads((folder / "killed" / "checkpoints.jsonl").read_text().splitlines()[-1])["batch"]
    assert saved in (2, 4)
    done = subprocess.run(loop, cwd=folder, env=own, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert f"Resuming from batch {saved}" in done.stderr
    assert [row["step"] for row in rows(folder, "killed")][saved - 6 :] == list(range(saved, 6))
    final = json.loads((folder / "killed" / "checkpoints.jsonl").read_text().splitlines()[-1])
    model, _, name = final["state_path"].removeprefix("tinker://").split("/")
    assert (folder / "runs" / "served" / "tinker" / model / "weights" / name / "manifest.json").exists()


def test_a_server_that_starts_again_has_the_saved_states(folder, address, running):
    """The loop has ended, so that it only loads its last state and saves it again."""
    running[1].send_signal(signal.SIGTERM)
    assert running[1].wait(120) == 75
    assert "the same command serves the saved states again" in (folder / "serve.log").read_text()
    with serving(folder) as (again, _):
        loop = cookbook(folder, again, "killed", steps=6)
        done = subprocess.run(
            loop, cwd=folder, env=environment(again), capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    assert "Resuming from batch 40" in done.stderr

"""Each benchmark runs to its end at the smallest size. Its figures then mean nothing."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Arguments that make a benchmark short, and a figure of its last line. Benchmarks that are missing here have
# tests of their own.
BENCHMARKS = {
    "checkpoint": (["--saves", "1", "--tokens", "64", "--layers", "2", "--before"], "blocked_share"),
    "convert": (["--layers", "1", "--processes", "1", "--repeats", "1"], "speed_over_copy"),
    "delta_net": (["--tokens", "65", "--hidden", "64", "--repeats", "1"], "delta_over_attention"),
    "engine_death": (["--only", "kill"], "kill_back"),
    "exchange": (["--repeats", "1"], "swap_over_copy"),
    "controller": (
        ["--sequences", "64", "--tokens", "2048", "--replicas", "2", "--steps", "1"],
        "shipped_over_needed",
    ),
    "gateway": (["--sessions", "8", "--turns", "2", "--seconds", "0.2"], "overhead_share"),
    "ledger": (["--entries", "65536"], "balance_seconds"),
    "loop": (
        ["--steps", "1", "data.train_batch_size=4", "train.ppo_mini_batch_size=4", "rollout.n=4"],
        "overhead_share",
    ),
    "many_engines": (
        ["--engines", "16", "--requests", "8", "--groups", "8", "--steps", "1", "--seconds", "1"],
        "discarded",
    ),
    "memory": (["--tokens", "256"], "activations_full"),
    "reshard": (["--engine-tp", "1", "--repeat", "1"], "bytes_over_bound"),
    "rewards": (["--repeats", "1", "--samples", "64"], "rewards_over_pool"),
    "rollout": (["--steps", "1", "--only", "sync,1-fifo"], "async_speedup"),
    "schedule": (["--calls", "1"], "bins_over_bound"),
    "train_step": (["--steps", "1", "--sequences", "8"], "packed_speedup"),
}
ELSEWHERE = {"logprob", "learning", "gpu", "real_model"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_runs_small(name):
    arguments, figure = BENCHMARKS[name]
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])[figure] is not None


def test_none_is_left_out():
    assert {path.stem for path in Path("benchmarks").glob("*.py")} == BENCHMARKS.keys() | ELSEWHERE
    of_make = re.search(
        r"for file in ([\w ]+); do \$\(BIN\)/python benchmarks/", Path("Makefile").read_text()
    )[1]
    assert set(of_make.split()) == (BENCHMARKS.keys() | ELSEWHERE) - {"gpu"}

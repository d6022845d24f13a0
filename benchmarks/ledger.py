"""Measure the ledger of a long run: recording a step, the command `grpo-megatron ledger`, and a resume.

    python benchmarks/ledger.py [--entries N]

Each step has 1,024 prompts x 8 samples of 1 to 4,096 tokens, in 4 mini-batches. One group in eight is
filtered. Each sample has four entries. Steps are recorded as the controller does it, until there are N
entries (default: 10 million). Then `grpo-megatron ledger` prints, in a process of its own, the balance of all
steps and the history of one sample. The resume begins from a checkpoint that was made when nine tenths of the
steps were done.

Prints a table and, as its last line, one JSON object:

    append_us_per_entry   microseconds to record a step, divided by its entries, median of the steps
    step_ms               milliseconds to record a step, median of the steps
    bytes_per_entry       size of the file over the entries
    balance_seconds       `grpo-megatron ledger RUN_DIR`, with the start of Python
    story_seconds         `grpo-megatron ledger RUN_DIR --sample ID`
    peak_gib              largest resident memory of the two commands
    resume_seconds        opening the ledger from the checkpoint, which undoes the last tenth
    summary_bytes         bytes of the ledger's state in the checkpoint's state.json
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from grpo_megatron.batch.prompt import Prompt
from grpo_megatron.batch.sample import Group, Sample, WeightSpan
from grpo_megatron.batch.table import SampleTable
from grpo_megatron.files import json_text
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import Ledger

PROMPTS, N, MINI_BATCHES = 1024, 8, 4
FILTERED = 8  # one group in FILTERED groups is filtered
LONGEST = 4096


def groups() -> list[Group]:
    draw = np.random.default_rng(0)
    ids, tokens = np.zeros(200, np.int32), np.zeros(LONGEST, np.int32)
    mask, logprobs = np.ones(LONGEST, bool), np.zeros(LONGEST, np.float32)

    def sample(group: int, member: int) -> Sample:
        length = int(draw.integers(1, LONGEST + 1))
        arrays = (ids, tokens[:length], mask[:length], logprobs[:length])
        spans, reward = (WeightSpan(1, 0, length),), float(draw.random())
        return Sample.of(group, N * group + member, *arrays, "stop", weight_spans=spans, reward=reward)

    return [
        Group(group, Prompt(group, ids, "", ""), tuple(sample(group, member) for member in range(N)))
        for group in range(PROMPTS)
    ]


def write(folder: str, entries: int) -> tuple[list[float], int, dict]:
    """Record steps (at least two) until the ledger in `folder` has at least `entries` entries.

    Returns (seconds of each step, number of steps, state of the ledger in a checkpoint after 0.9 of the
    steps).
    """
    sampled, per_step = groups(), 4 * PROMPTS * N
    left_out = sampled[::FILTERED]
    removed = np.array([sample.trajectory_id for group in left_out for sample in group.samples])
    kept = [group for group in sampled if group.group_id % FILTERED]
    parts = np.array_split(np.arange(len(kept)), MINI_BATCHES)
    tables = [SampleTable.of([sample for i in part for sample in kept[i].samples]) for part in parts]
    weights = [np.full(len(table.reward), 1e-4) for table in tables]
    # Every step records the same samples. With replayed=True, the ledger gives them new ids each time.
    ledger = Ledger(folder, replayed=True)
    seconds, steps, saved = [], max(-(-entries // per_step), 2), {}
    for step in range(1, steps + 1):
        start = time.perf_counter()
        ledger.taken(step, sampled, [])
        ledger.filtered(step, [("nonzero_variance", removed)])
        ledger.trained(step, tables, weights, [False] * MINI_BATCHES)
        ledger.balance()
        seconds.append(time.perf_counter() - start)
        if step == max(steps * 9 // 10, 1):
            saved = json.loads(json_text(ledger.state_dict()))
    return seconds, steps, saved


def command(*words: str) -> tuple[float, str]:
    """Run `grpo-megatron ledger` with these arguments. Return (seconds, output)."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "grpo_megatron.cli", "ledger", *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - start, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10**7, help="number of entries")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds, steps, saved = write(folder, options.entries)
        entries, size = steps * 4 * PROMPTS * N, Path(folder, LEDGER).stat().st_size
        balance_seconds, balance = command(folder)
        assert balance.split("\n")[-2].split()[1] == str(steps * PROMPTS * N)
        story_seconds, _ = command(folder, "--sample", str(steps * PROMPTS * N - 1))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        start = time.perf_counter()
        resumed = Ledger(folder, saved["step"], saved)
        resume_seconds = time.perf_counter() - start
        assert resumed.tokens == saved["tokens"]
    step_seconds = statistics.median(seconds)
    summary = {
        "append_us_per_entry": 1e6 * step_seconds * steps / entries,
        "step_ms": 1e3 * step_seconds,
        "bytes_per_entry": size / entries,
        "balance_seconds": balance_seconds,
        "story_seconds": story_seconds,
        "peak_gib": peak,
        "resume_seconds": resume_seconds,
        "summary_bytes": len(json_text(saved)),
    }
    print(f"{entries:,} entries of {steps} steps, {size / 1e6:.0f} MB")
    for name, value in summary.items():
        print(f"{name:<22}{value:>12.4g}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()

"""Measure how much faster training is with sampling beside it, for responses of very different lengths.

    python benchmarks/rollout.py [--steps N] [--only NAME,...] [key=value ...]

A random Qwen3 of 2.5M parameters answers over several turns. Most prompts take one turn, some take twenty, so
that the longest responses are about twenty times as long as the median. An engine and a trainer rank have one
core each. Runs, each with the processes of a real run (Ray, SGLang, Megatron, weight sync):

    sync               rollout.staleness=0: sampling and training alternate
    best_sync          the same, with two trainer ranks, for a core each while the engine waits
    1-fifo, ...        rollout.staleness and rollout.order, with rollout.on_update=continue
    2-wait             rollout.staleness=2 with rollout.on_update=wait
    trainer_bound      2-window with three epochs over each batch, so that training takes longer

At first engine and trainer are pinned to a core each, then not. `key=value` changes the configuration of all
runs.

Prints a table and, as its last line, one JSON object with the figures of all runs by name, and these:

    async_speedup           seconds of a step of `sync` over those of the fastest run beside training, pinned
    possible                (generation + training) / max(generation, training) of `sync`, pinned
    share_of_possible       (async_speedup - 1) / (possible - 1)
    async_speedup_free, possible_free, share_of_possible_free
                            the same, not pinned
    speedup_over_best_sync  seconds of a step of `best_sync` over those of the fastest run, not pinned
    discarded               samples of all runs that were sampled and not trained on
    generated_over_trained  samples sampled over samples trained, of all runs
    max_age_over_bound      largest age of a token minus the staleness, of all runs: at most 0
    mean_age                mean age of tokens, of `trainer_bound`
    busy_engine, busy_trainer    shares of the step, of the fastest run, pinned
    longest_over_median     of the lengths of responses
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# The ranks use the same settings. See benchmarks/loop.py.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from make_tiny_model import make

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.config.schema import Config
from grpo_megatron.controller import Controller
from grpo_megatron.logs import show_messages
from grpo_megatron.preflight.check import load_config
from grpo_megatron.rollout.source import Rollout
from grpo_megatron.run.folder import METRICS
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import read_books

WARM_UP = 3
ENGINE_CORE, TRAINER_CORE = 0, 1
# Names of the processes of engine and trainer, as Ray and SGLang set them.
OF_ENGINE = ("ray::SGLangEngine", "sglang", "ray::WorkerProcess", "ray::PoolWorker")
OF_TRAINER = ("ray::_Worker",)
BESIDE = ("rollout.on_update=continue",)
RUNS = {
    "sync": (),
    "best_sync": ("megatron.data_parallel=2",),
    "1-fifo": ("rollout.staleness=1", *BESIDE),
    "1-window": ("rollout.staleness=1", "rollout.order=window", *BESIDE),
    "2-fifo": ("rollout.staleness=2", *BESIDE),
    "2-window": ("rollout.staleness=2", "rollout.order=window", *BESIDE),
    "2-wait": ("rollout.staleness=2",),
    "trainer_bound": ("rollout.staleness=2", "rollout.order=window", "train.ppo_epochs=3", *BESIDE),
}
COMPARED = ("1-fifo", "1-window", "2-fifo", "2-window", "2-wait")


@dataclass(frozen=True)
class Measured:
    """Figures of a run. Times, shares and ages are those of the steps after the warm-up."""

    step: float
    """Mean seconds of a step."""
    generation: float
    """Mean seconds of a step in which the driver waited for samples."""
    training: float
    """Mean seconds of a step for everything else."""
    busy_engine: float
    """Share of the time in which groups were being sampled."""
    busy_trainer: float
    """Share of the time in which the trainer's ranks worked."""
    max_age: float
    """Largest age of a token, in weight versions."""
    mean_age: float
    """Mean age of the tokens."""
    discarded: int
    """Number of samples of the whole run that were not trained on."""
    sampled: int
    """Number of samples of the whole run."""
    bound: int
    """rollout.staleness."""
    longest_over_median: float
    """Length of the longest response divided by the median length."""

    @property
    def possible(self) -> float:
        """Speed-up of this run if generation and training overlapped perfectly."""
        return (self.generation + self.training) / max(self.generation, self.training)


def write_prompts(path: Path, count: int, seed: int = 0) -> None:
    """Write `count` prompts to a JSONL file. Their episodes have 1 to 20 turns; one of 16 prompts has 20."""
    rng = random.Random(seed)
    turns = [1] * 11 + [2, 2, 3, 6, 20]
    with open(path, "w", encoding="utf-8") as file:
        for index in range(count):
            if index % len(turns) == 0:
                rng.shuffle(turns)
            text = f"{rng.randrange(1000)}+{rng.randrange(1000)}="
            record = {"prompt": text, "answer": "0", "turns": turns[index % len(turns)]}
            file.write(json.dumps(record) + "\n")


def configured(folder: str, name: str, steps: int, changes: list[str]) -> Config:
    return load_config(
        None,
        [
            f"run.root={folder}/runs",
            f"run.name={name}",
            "run.resume=none",
            f"run.total_steps={WARM_UP + steps}",
            f"model.path={folder}/model",
            f"data.train={folder}/train.jsonl",
            "data.train_batch_size=16",
            "data.max_prompt_length=32",
            "rollout.n=4",
            "rollout.max_response_length=1024",
            "rollout.environment=benchmarks.environments.turns:Turns",
            "rollout.max_turns=20",
            "rollout.engine.cpu_threads=1",
            "rollout.engine.max_total_tokens=131072",
            "reward.workers=1",
            "train.ppo_mini_batch_size=16",
            "train.max_tokens_per_micro_batch=4096",
            "train.old_logprobs=rollout",
            "megatron.precision=fp32",
            "megatron.cpu_threads=1",
            "cluster.placement=separate",
            # A small rate, because lengths must not change much.
            "optimizer.lr=1e-6",
            *changes,
        ],
    )


def pin(processes: tuple[str, ...], core: int) -> int:
    """Pin all threads of some of the run's processes to a CPU core. Return the number of these processes.

    processes: texts, of which the command line of a pinned process contains at least one.
    """
    pinned = 0
    for process in psutil.Process().children(recursive=True):
        if any(name in " ".join(process.cmdline()) for name in processes):
            pinned += 1
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})
    return pinned


def run(folder: str, name: str, pinned: bool, steps: int, changes: list[str]) -> Measured:
    config = configured(folder, f"{name}{'-pinned' if pinned else ''}", steps, changes)
    with assembled_loop(config) as (controller, _):
        controller.rollouts.start()
        lengths = noted_lengths(controller)
        if pinned:
            assert pin(OF_ENGINE, ENGINE_CORE)
            assert pin(OF_TRAINER, TRAINER_CORE)
            os.sched_setaffinity(0, {TRAINER_CORE})
        try:
            for step in range(WARM_UP + steps):
                if step == WARM_UP:
                    start = time.perf_counter()
                controller.train_step(controller.loop.begin_step())
            seconds = time.perf_counter() - start
        finally:
            os.sched_setaffinity(0, range(os.cpu_count()))
        directory = controller.monitor.directory
    with open(f"{directory}/{METRICS}", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file][-steps:]
    books = read_books(Path(directory, LEDGER))[0].totals()
    generation = statistics.mean(row["time/generate"] for row in rows)
    sampling = statistics.mean(row.get("rollout/sampling_seconds", row["time/generate"]) for row in rows)
    return Measured(
        step=seconds / steps,
        generation=generation,
        training=seconds / steps - generation,
        busy_engine=sampling * steps / seconds,
        busy_trainer=1 - statistics.mean(row["idle/trainer"] for row in rows),
        max_age=max(row["staleness/max"] for row in rows),
        mean_age=statistics.mean(row["staleness/mean"] for row in rows),
        discarded=books["admitted"] - books["trained"],
        sampled=books["admitted"],
        bound=config.rollout.staleness,
        longest_over_median=max(lengths) / statistics.median(lengths),
    )


def noted_lengths(controller: Controller) -> list[int]:
    """Return a list that grows with each later step by the lengths of the step's trajectories.

    A length is the number of tokens that the model wrote. The method source.take is wrapped for this.
    """
    lengths, source = [], controller.rollouts.source
    taken = source.take

    def take(step: int, revive) -> Rollout:
        rollout = taken(step, revive)
        for group in rollout.groups:
            lengths.extend(sum(sample.num_written for sample in own) for own in group.trajectories)
        return rollout

    source.take = take
    return lengths


def summary(found: dict[str, dict[bool, Measured]]) -> dict[str, float]:
    """Return the figures of the last line except `runs`. Figures whose runs are missing are left out.

    found: {name of a run: {whether it was pinned: its figures}}.
    """
    results = [result for by_pinned in found.values() for result in by_pinned.values()]
    summary = {
        "discarded": sum(result.discarded for result in results),
        "generated_over_trained": sum(result.sampled for result in results)
        / sum(result.sampled - result.discarded for result in results),
        "max_age_over_bound": max(result.max_age - result.bound for result in results),
        "longest_over_median": statistics.median(result.longest_over_median for result in results),
    }
    if "trainer_bound" in found:
        summary["mean_age"] = found["trainer_bound"][True].mean_age
    beside = [name for name in COMPARED if name in found]
    if "sync" not in found or not beside:
        return summary
    for pinned, suffix in ((True, ""), (False, "_free")):
        sync = found["sync"][pinned]
        fastest = min((found[name][pinned] for name in beside), key=lambda result: result.step)
        summary |= {f"async_speedup{suffix}": sync.step / fastest.step, f"possible{suffix}": sync.possible}
        gain = summary[f"async_speedup{suffix}"] - 1
        summary[f"share_of_possible{suffix}"] = gain / (sync.possible - 1)
        if pinned:
            summary |= {"busy_engine": fastest.busy_engine, "busy_trainer": fastest.busy_trainer}
        elif "best_sync" in found:
            summary["speedup_over_best_sync"] = found["best_sync"][pinned].step / fastest.step
    return summary


def main() -> None:
    show_messages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run")
    parser.add_argument("--only", default=",".join(RUNS), help="names of the runs, separated by commas")
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="values that override the configurations'"
    )
    options = parser.parse_intermixed_args()
    found: dict[str, dict[bool, Measured]] = {name: {} for name in options.only.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"), hidden=256, layers=4, heads=8, ffn=512)
        write_prompts(Path(folder, "train.jsonl"), 1024)
        for pinned in (True, False):
            for name, results in found.items():
                changes = [*RUNS[name], *options.changes]
                results[pinned] = run(folder, name, pinned, options.steps, changes)
    print(f"{options.steps} steps a run; engine and trainer pinned to a core each, or free")
    shown = ("step", "generation", "training", "busy_engine", "busy_trainer", "mean_age", "max_age")
    print(f"{'':<22}" + "".join(f"{name:>13}" for name in shown))
    for name, by_pinned in found.items():
        for pinned, result in by_pinned.items():
            values = (getattr(result, column) for column in shown)
            print(
                f"{name:<14}{'pinned' if pinned else 'free':<8}"
                + "".join(f"{value:>13.3f}" for value in values)
            )
    figures = {
        f"{name}{'' if pinned else '_free'}": asdict(one)
        for name, own in found.items()
        for pinned, one in own.items()
    }
    print(json.dumps({**summary(found), "runs": figures}))


if __name__ == "__main__":
    main()

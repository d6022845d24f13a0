"""Measure how long one of two engines is missing after it dies, hangs, or gets wrong weights.

    python benchmarks/engine_death.py [--only kill,hang,digest] [key=value ...]

A small run samples beside training, with two engines. In each case one engine fails at a random moment:

    kill     SGLang's scheduler gets SIGKILL
    hang     SGLang's scheduler gets SIGSTOP, which the hang detector finds (cluster.hang_timeout=10)
    digest   after a weight sync, the engine's report says that a tensor is wrong

The run goes on with the other engine. The failed engine is started again, gets the weights in the next sync,
and serves again. Seconds are counted from the failure:

    noticed  until the engine gets no further requests
    ready    until its replacement has loaded the model
    back     until the first group that the replacement has sampled

Prints a table and, as its last line, one JSON object: these figures as CASE_noticed, CASE_ready and
CASE_back, `ranks_started_again`, and `unbalanced`, the samples that are neither trained nor filtered nor
failed.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from loop import write_prompts
from make_tiny_model import make

from grpo_megatron.commands.train import assembled_loop
from grpo_megatron.controller import Controller
from grpo_megatron.logs import show_messages
from grpo_megatron.preflight.check import load_config
from grpo_megatron.samples.blocks import LEDGER
from grpo_megatron.samples.ledger import read_books
from grpo_megatron.weights.sync import resharding

CASES = ("kill", "hang", "digest")
MOST_STEPS = 2000
HANG_SECONDS = 10
SCHEDULER, RANK = "sglang::scheduler", "ray::_Worker"


def processes(title: str) -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [process] if title in " ".join(process.cmdline()) else []
    return sorted(found, key=lambda process: process.pid)


class Failure:
    """Makes an engine fail at a random moment, and records when this is noticed and when the engine is back.

    seconds: {moment: seconds since the failure}, with the moments `noticed`, `ready` and `back`
    """

    def __init__(self, controller: Controller, case: str, seed: int):
        self._pool = controller.rollouts.handover.weight_sync._target
        self._case, self._random = case, random.Random(seed)
        self.seconds: dict[str, float] = {}
        self._at, self._lost, self._joined = 0.0, -1, None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def _watch(self) -> None:
        time.sleep(self._random.uniform(0.0, 2.0))
        self._at = time.monotonic()
        if self._case == "digest":
            self._plant()
        else:
            how = signal.SIGKILL if self._case == "kill" else signal.SIGSTOP
            self._random.choice(processes(SCHEDULER)).send_signal(how)
        while "ready" not in self.seconds:
            time.sleep(0.02)
            if "noticed" not in self.seconds and len(self._pool.serving) == 1:
                self._note("noticed")
                (self._lost,) = {0, 1} - self._pool.serving.keys()
            elif "noticed" in self.seconds and len(self._pool.membership.in_updates) == 2:
                self._note("ready")

    def _plant(self) -> None:
        """Patch weight sync so that the reports of engine 1 name a wrong tensor in the next sync only."""
        original = resharding._by_rank

        def planted(reports):
            found = original(reports)
            if len({me.engine for me in found}) == 2:
                resharding._by_rank = original
                found = {
                    me: replace(report, wrong=("planted",)) if me.engine else report
                    for me, report in found.items()
                }
            return found

        resharding._by_rank = planted

    def _note(self, moment: str) -> None:
        self.seconds[moment] = time.monotonic() - self._at

    def see(self, groups) -> bool:
        """Look for samples of the replacement in the groups of a step. Return True if there have been any.

        The moment `back` is recorded when the first such group is seen.
        """
        if "ready" in self.seconds and len(self._pool.serving) == 2:
            # Groups that the engine sampled before it failed have older versions.
            versions = [(group.engine, group.samples[0].weight_spans[0].version) for group in groups]
            if self._joined is None:
                self._joined = max(version for _, version in versions)
            if any(engine == self._lost and version >= self._joined for engine, version in versions):
                self._note("back")
        return "back" in self.seconds


def measure(folder: str, case: str, changes: list[str]) -> dict[str, float]:
    config = load_config(
        None,
        [
            f"run.root={folder}/runs",
            f"run.name={case}",
            "run.resume=none",
            f"run.total_steps={MOST_STEPS}",
            f"model.path={folder}/model",
            f"data.train={folder}/train.jsonl",
            "data.train_batch_size=8",
            "data.max_prompt_length=32",
            "rollout.n=4",
            "rollout.max_response_length=64",
            "rollout.staleness=2",
            "rollout.on_update=continue",
            "rollout.engine.num_engines=2",
            "rollout.engine.cpu_threads=1",
            "rollout.engine.max_total_tokens=16384",
            "reward.function=exact_match",
            r"reward.extract=\d",
            "reward.workers=1",
            "train.ppo_mini_batch_size=8",
            "train.old_logprobs=rollout",
            "megatron.precision=fp32",
            "megatron.cpu_threads=1",
            "cluster.placement=separate",
            f"cluster.hang_timeout={HANG_SECONDS}",
            "optimizer.lr=1e-6",
            *changes,
        ],
    )
    with assembled_loop(config) as (controller, _):
        controller.rollouts.start()
        ranks, failure = processes(RANK), Failure(controller, case, seed=CASES.index(case))
        take, taken = controller.rollouts.source.take, []

        def noted(step, revive):
            rollout = take(step, revive)
            taken[:] = rollout.groups
            return rollout

        controller.rollouts.source.take = noted
        for step in range(MOST_STEPS):
            controller.train_step(controller.loop.begin_step())
            if step == 2:
                failure.begin()
            if failure.see(taken):
                break
        again = {process.pid for process in processes(RANK)} - {process.pid for process in ranks}
        directory = controller.monitor.directory
    books = read_books(Path(directory, LEDGER))[0].totals()
    ended = sum(books[name] for name in ("trained", "filtered", "failed"))
    return {
        **{f"{case}_{moment}": seconds for moment, seconds in failure.seconds.items()},
        "ranks_started_again": len(again),
        "unbalanced": books["admitted"] - ended,
    }


def main() -> None:
    show_messages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument(
        "changes", nargs="*", metavar="key=value", help="values that override the configuration's"
    )
    options = parser.parse_intermixed_args()
    summary = {"ranks_started_again": 0, "unbalanced": 0}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "model"))
        write_prompts(Path(folder, "train.jsonl"), 1024)
        for case in options.only.split(","):
            found = measure(folder, case, options.changes)
            for name in ("ranks_started_again", "unbalanced"):
                summary[name] += found.pop(name)
            summary |= found
    print(f"{'':<10}" + "".join(f"{moment:>12}" for moment in ("noticed", "ready", "back")))
    for case in options.only.split(","):
        seconds = (summary[f"{case}_{moment}"] for moment in ("noticed", "ready", "back"))
        print(f"{case:<10}" + "".join(f"{value:>12.1f}" for value in seconds))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
